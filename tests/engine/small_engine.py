"""One vLLM engine in this process, driven step by step, and the tiny models it runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

BLOCK = 32
"""Rows of a page: the smallest that vLLM's CPU backend takes."""

LABELS = ("source", "outcome", "reason", "cause")

SCRATCH = 64
"""Pages of each engine that only the audit uses, so that it works when memory is scarce."""

Prompt = list[int] | str


class Member(NamedTuple):
    """One agent's prompt in a round and the hints that come with it."""

    prompt: list[int]
    hints: dict[str, Any]


def make_round(
    seed: int,
    agents: int,
    *,
    shared: Sequence[int] = (70, 50, 90),
    private: int = 40,
    system: int = 0,
    tail: int = 9,
    **hints: Any,
) -> list[Member]:
    """A round of random tokens: [system] + private[i] + shared blocks + tail.

    The private parts differ in length, so the shared blocks stand at other offsets in each prompt.
    """
    random = Random(seed)
    system_text = words(random, system)
    blocks = [words(random, length) for length in shared]
    task = words(random, tail)
    members = []
    for agent in range(agents):
        own = words(random, private + 3 * agent)
        pieces = [piece for piece in (system_text, own, *blocks, task) if piece]
        note = {"session": f"s{seed}", "round": "1", "agent": f"a{agent}", "size": agents, **hints}
        note["segments"] = [len(piece) for piece in pieces]
        members.append(Member([token for piece in pieces for token in piece], note))
    return members


def words(random: Random, length: int) -> list[int]:
    """Random token ids that mean nothing special."""
    return [random.randrange(100, 40000) for _ in range(length)]


def make_model(
    folder: Path, architecture: str, rope: dict[str, Any] | None, spread: float = 0.15
) -> Path:
    """Random weights, large enough that attention tells rows apart; SmolLM2's tokenizer."""
    import torch
    import transformers

    from tokendance.cli.model import ensure_model

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2 if architecture == "qwen2" else 4,  # its heads share hidden_size
        num_key_value_heads=1 if architecture == "qwen2" else 2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=spread,
        tie_word_embeddings=True,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(7)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    tokenizer = Path(ensure_model())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, folder)
    return folder


class Running:
    """Starts an engine and takes it down again, so that the next one finds a clean process."""

    def __init__(
        self, model: Path, reuse: bool, options: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        from vllm import LLM

        transfer = {
            "kv_connector": "TokenDanceConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 64,
            "num_gpu_blocks_override": 512,
            "disable_log_stats": True,
            "kv_transfer_config": transfer if reuse else None,
        }
        settings = {**defaults, **settings}
        settings["num_gpu_blocks_override"] += SCRATCH + 1  # one page is vLLM's own
        try:
            self.engine = Engine(LLM(str(model), **settings))
        except BaseException:
            clean_up()
            raise

    def close(self) -> None:
        self.engine.core.shutdown()
        self.engine.__dict__.clear()
        clean_up()


def clean_up() -> None:
    """Forget what vLLM keeps about its engine in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


class Engine:
    """What the tests need of vLLM and of our two sides in it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scratch = self._take_scratch_pages()
        self._names = count()
        self._open: set[str] = set()
        self._counted: dict[str, float] = {}
        self.finished: dict[str, Any] = {}

    def _take_scratch_pages(self) -> tuple[int, ...]:
        """Pages for the audit, taken from the pool for good; see SCRATCH."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.num_gpu_blocks -= SCRATCH
        return tuple(block.block_id for block in pool.get_new_blocks(SCRATCH))

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def scheduling(self) -> Any:
        """Our scheduler side."""
        return self.scheduler.connector._scheduler

    @property
    def book(self) -> Any:
        return self.scheduling._book

    @property
    def worker(self) -> Any:
        """Our worker side."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        prompt: Prompt,
        hints: dict[str, Any] | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        **sampling: Any,
    ) -> str:
        """Send one request, greedy and without an end unless `sampling` says otherwise."""
        text: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
        if salt:
            text["cache_salt"] = salt
        name = f"r{next(self._names)}"
        self._open.add(name)
        params = self.params(hints, **sampling)
        self.llm.llm_engine.add_request(name, text, params, priority=priority)
        return name

    @staticmethod
    def params(hints: dict[str, Any] | None, **sampling: Any) -> Any:
        """vLLM's SamplingParams with our hints in them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = None if hints is None else {"kv_transfer_params": {"tokendance": hints}}
        given = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **sampling}
        kind = RequestOutputKind.FINAL_ONLY
        return SamplingParams(extra_args=extra, output_kind=kind, **given)

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])
        self._open.discard(name)

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Any]:
        """One engine step; the outputs it made."""
        outputs = self.llm.llm_engine.step()
        for output in outputs:
            if output.finished and output.request_id in self._open:
                self._open.discard(output.request_id)
                self.finished[output.request_id] = output
        return list(outputs)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def run(self, names: Sequence[str] | None = None, limit_s: float = 120.0) -> None:
        """Step until these requests have finished, or all; a hang is a failure."""
        deadline = time.monotonic() + limit_s
        while left := self._open if names is None else self._open.intersection(names):
            assert time.monotonic() < deadline, f"{len(left)} requests did not finish"
            self.step()

    def answers(self, names: Sequence[str]) -> list[Any]:
        """Run until these requests have finished and give their outputs."""
        self.run(names)
        return [self.finished[name] for name in names]

    def ask(self, prompt: Prompt, hints: dict[str, Any] | None = None, **options: Any) -> Any:
        """One request on its own, to the end."""
        (output,) = self.answers([self.add(prompt, hints, **options)])
        return output

    def ask_exactly(self, prompt: Prompt, **options: Any) -> Any:
        """What vLLM itself says, on its ordinary path."""
        return self.ask(prompt, {"mode": "exact"}, **options)

    def forget(self) -> None:
        """Empty vLLM's prefix cache; nothing may be running."""
        assert not self._open
        assert self.llm.reset_prefix_cache()

    def counters(self) -> dict[str, float]:
        """Our Prometheus counters since the last call; needs disable_log_stats=False."""
        from prometheus_client import REGISTRY

        now = {
            "/".join(
                [sample.name, *(v for k, v in sample.labels.items() if k in LABELS)]
            ): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("tokendance:") and sample.name.endswith("_total")
        }
        since = {name: value - self._counted.get(name, 0.0) for name, value in now.items()}
        self._counted = now
        return {name: value for name, value in since.items() if value}


def outcome(output: Any) -> dict[str, Any]:
    """What the response says about reuse."""
    return dict((output.kv_transfer_params or {}).get("tokendance", {}))


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def logprobs(output: Any) -> list[dict[int, float]]:
    """Per generated token, what the model gave to the likeliest ones."""
    return [{t: p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs]


def distance(a: Any, b: Any) -> float:
    """Largest difference of the logprobs of two outputs with the same text."""
    assert tokens(a) == tokens(b)
    return max(
        abs(value - theirs[token])
        for mine, theirs in zip(logprobs(a), logprobs(b))
        for token, value in mine.items()
        if token in theirs
    )
