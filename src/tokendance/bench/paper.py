"""Prefill of rounds of the paper's size: plain vLLM over TokenDance beside the bound by rows.

No model that knows anything is needed to time long prompts, so a small one with random weights runs
them. What of a large model matters here is how the cost of a row is split between linear layers and
attention: at 5000 keys Qwen2.5-7B computes 6.5 times as much in the former, and so does this model.
The histories that a prefix cache would serve are computed before the clock starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokendance.bench.engine_process import Call, EngineProcess, RoundResult
from tokendance.bench.measure import Bound, BoundCounter, rows_by_source
from tokendance.bench.prefill import (
    RoundShape,
    Say,
    Words,
    both,
    for_engine,
    round_calls,
    spread,
)
from tokendance.bench.render import HFTokenizer, Prompt, Renderer
from tokendance.bench.rounds import whole_pages
from tokendance.bench.trace import Trace, TraceError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama with tied embeddings and the vocabulary of the tokenizer that it is given."""

    hidden_size: int = 1024
    intermediate_size: int = 2560
    num_hidden_layers: int = 1
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 64
    max_position_embeddings: int = 32768


class Case(NamedTuple):
    """A round of a trace, with the prompts of the round before. last: the last one, else the first
    that quotes answers."""

    trace: Path
    last: bool = False


@dataclass(frozen=True, slots=True)
class PaperRound:
    """A round to be timed. histories: what the prefix cache holds of each prompt, empty if less
    than a page. bound: rows that plain vLLM and a region pass have to compute."""

    name: str
    index: int
    prompts: tuple[Prompt, ...]
    histories: tuple[tuple[int, ...], ...]
    bound: Bound


def make_model(folder: Path, tokenizer: Path, shape: ModelShape) -> Path:
    """Random weights beside the files of another model's tokenizer."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    vocabulary = AutoConfig.from_pretrained(str(tokenizer)).vocab_size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        **asdict(shape),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, folder)
    return folder


def load(case: Case, tokenizer: HFTokenizer) -> PaperRound:
    """Read a round. Raises TraceError if the trace has fewer than two."""
    trace = Trace(case.trace)
    render = Renderer(tokenizer, trace.header.render)
    steps = list(pairwise(trace.rounds()))
    if not steps:
        raise TraceError(f"{case.trace} has one round alone; this needs the one before as well")
    before, now = steps[-1 if case.last else 0]
    earlier = [render(request) for request in before.requests]
    known = {prompt.agent: prompt.ids for prompt in earlier}
    prompts = tuple(render(request) for request in now.requests)
    counter = BoundCounter()
    counter.add(earlier)
    return PaperRound(
        case.trace.stem,
        now.index,
        prompts,
        tuple(p.ids[: whole_pages(p.ids, known.get(p.agent, ()))] for p in prompts),
        counter.add(prompts),
    )


def bench_paper(
    model: Path, rounds: Sequence[PaperRound], repeat: int, threads: int, say: Say
) -> dict[str, Any]:
    """paper: one row per round; both engines run each `repeat` times, from histories alone."""
    rows = []
    with both(str(model), threads) as engines:
        words = Words([token for p in rounds[0].prompts for token in p.ids], seed=0)
        warm_up, _ = round_calls(RoundShape(3, 40, 1, 120), words, "warm-up")
        for engine in engines:
            engine.round(for_engine(engine, warm_up))  # first use of kernels and caches
        for round_ in rounds:
            turns = [_turn(engines, round_, turn, say) for turn in range(repeat)]
            rows.append(_row(round_, turns))
            ratio = rows[-1]["cpu_ratio"]["median"]
            say(f"{round_.name}, round {round_.index}, {len(round_.prompts)} agents: {ratio:.2f}x")
        dtype = engines[0].ready().dtype
    return {"paper": rows, "paper_dtype": dtype, "paper_repetitions": repeat}


def _turn(
    engines: Sequence[EngineProcess], round_: PaperRound, turn: int, say: Say
) -> dict[bool, RoundResult]:
    calls, histories = paper_calls(round_, str(turn))
    results: dict[bool, RoundResult] = {}
    for engine in engines if turn % 2 else engines[::-1]:
        engine.reset()
        if histories:
            engine.round(for_engine(engine, histories))
        found = results[engine.settings.tokendance] = engine.round(for_engine(engine, calls))
        say(f"{round_.name}, turn {turn + 1}, {engine.settings.name}: {found.prefill_cpu_s:.1f} s")
    return results


def paper_calls(round_: PaperRound, turn: str) -> tuple[list[Call], list[Call]]:
    """The calls of a round, and those that bring its histories into the prefix cache."""
    calls, histories = [], []
    for prompt, history in zip(round_.prompts, round_.histories):
        hints = {
            "session": f"{round_.name}.{round_.index}.{turn}",
            "round": str(round_.index),
            "agent": prompt.agent,
            "size": len(round_.prompts),
            "segments": [n for n in prompt.lengths if n],
        }
        name = f"{round_.name}.{turn}.{prompt.agent}"
        calls.append(Call(name, prompt.ids, prompt.ids[:1], hints))
        if history:
            # Exact, as what nobody shares: else texts that two histories quote would be found.
            exact = {"mode": "exact"}
            histories.append(Call(f"{name}.history", history, prompt.ids[:1], exact))
    return calls, histories


def _row(round_: PaperRound, turns: Sequence[dict[bool, RoundResult]]) -> dict[str, Any]:
    plain, ours = ([turn[side] for turn in turns] for side in (False, True))
    return {
        "trace": f"paper/{round_.name} round {round_.index}",
        "round": round_.index,
        "agents": len(round_.prompts),
        "prompt_tokens": sum(len(p.ids) for p in round_.prompts),
        "plain_rows": round_.bound.plain,
        "region_rows": round_.bound.region,
        "row_bound": round(round_.bound.ratio, 2),
        "plain_computed": sum(c.prompt_tokens - c.cached for c in plain[0].calls),
        "computed": sum(rows_by_source(c)["computed"] for c in ours[0].calls),
        "plain_cpu_s": spread([r.prefill_cpu_s for r in plain]),
        "cpu_s": spread([r.prefill_cpu_s for r in ours]),
        "cpu_ratio": spread([a.prefill_cpu_s / b.prefill_cpu_s for a, b in zip(plain, ours)]),
        "wall_ratio": spread([a.prefill_wall_s / b.prefill_wall_s for a, b in zip(plain, ours)]),
    }
