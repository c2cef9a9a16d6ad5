"""What is exact is bit-equal to vLLM alone; what is computed in pieces agrees in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

import torch  # noqa: E402
from audit import Audit, audited  # noqa: E402
from small_engine import (  # noqa: E402
    BLOCK,
    Engine,
    Member,
    distance,
    logprobs,
    make_round,
    outcome,
    tokens,
    words,
)

from tokendance.plan.reuse_plan import PageTable  # noqa: E402
from tokendance.types import RequestId, Rows  # noqa: E402

Start = Callable[..., AbstractContextManager[Engine]]

OPTIONS = {"min_shared_tokens": 16}
SAMPLING: dict[str, Any] = {"max_tokens": 8, "logprobs": 20}


def same(a: Any, b: Any) -> bool:
    """Equal text and bit-equal logprobs."""
    return tokens(a) == tokens(b) and logprobs(a) == logprobs(b)


def ask_all(engine: Engine, members: list[Member], mode: str | None) -> list[Any]:
    """The round from an empty cache; mode None sends no hints."""
    engine.forget()
    hints = [None if mode is None else {**m.hints, "mode": mode} for m in members]
    names = [engine.add(m.prompt, h, **SAMPLING) for m, h in zip(members, hints)]
    return engine.answers(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bit_equality(start_engine: Start, dtype: str) -> None:
    """The leader, exact mode, and whatever is asked exactly after approximate requests (poison)."""
    members = make_round(1, 5, private=BLOCK)
    with start_engine(reuse=False, dtype=dtype) as engine:
        plain = ask_all(engine, members, None)
        continued = [m.prompt + tokens(o) + [77] for m, o in zip(members, plain)]
        engine.forget()
        plain_continued = [engine.ask(prompt, **SAMPLING) for prompt in continued]
    # Without discovery a request without hints is exact, too.
    with start_engine(options={**OPTIONS, "discover": False}, dtype=dtype) as engine:
        exact = ask_all(engine, members, "exact")
        assert all(same(a, b) for a, b in zip(exact, plain))
        mixed = ask_all(engine, members, "auto")
        assert [outcome(o)["role"] for o in mixed] == ["leader", *["follower"] * 4]
        assert same(mixed[0], plain[0])
        assert not any(same(a, b) for a, b in zip(mixed[1:], plain[1:])), "nothing approximate?"

        # The approximate pages are still there; none of them may be found by anybody.
        for hints in (None, {"mode": "exact"}):
            for member, before in zip(members, plain):
                assert same(engine.ask(member.prompt, hints, **SAMPLING), before)
            for prompt, before in zip(continued, plain_continued):
                assert same(engine.ask(prompt, hints, **SAMPLING), before)


@pytest.fixture(scope="class")
def engine(start_engine: Start) -> Iterator[Engine]:
    with start_engine(options=OPTIONS) as engine:
        yield engine


class TestOneEngine:
    """Scoped like this so that the engine is gone before the next one starts."""

    def test_continuing_what_a_follower_said_is_exact(self, engine: Engine) -> None:
        """Pages that fill up while a follower decodes are approximate too and found by nobody."""
        members = make_round(2, 3)
        engine.forget()
        outputs = engine.answers([engine.add(*m, max_tokens=2 * BLOCK) for m in members])
        prompts = [m.prompt + tokens(o) + [77] for m, o in zip(members, outputs)]
        after = [engine.ask_exactly(prompt, **SAMPLING) for prompt in prompts]
        fresh = []
        for prompt in prompts:
            engine.forget()
            fresh.append(engine.ask_exactly(prompt, **SAMPLING))
        # Rows that are found in the cache leave fewer for the batch: equal but for fp32 rounding.
        assert max(distance(a, b) for a, b in zip(after, fresh)) < 1e-4
        assert after[0].num_cached_tokens > 8 * BLOCK
        assert [o.num_cached_tokens for o in after[1:]] == [BLOCK, BLOCK]

    @pytest.mark.parametrize("longest", [1, 7, 16, 64])
    def test_virtual_sequences_give_what_one_sequence_gives(
        self, engine: Engine, longest: int
    ) -> None:
        """All rows of a running request, wiped out and computed again in many short runs."""
        audit, random = Audit(engine), Random(longest)
        prompt = words(random, 400)
        engine.forget()
        wanted = engine.ask_exactly(prompt, **SAMPLING)
        engine.forget()
        name = engine.add(prompt, {"mode": "exact"}, **SAMPLING)
        engine.step()  # the prompt is in the cache, one token is out
        (request,) = engine.scheduler.running
        (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        table, whole = PageTable(RequestId("r"), tuple(blocks)), Rows(0, len(prompt))
        before = audit.read(table, whole)
        audit.write(table, whole, [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in before])
        audit.compute(table, [*prompt, 0], runs(random, len(prompt), longest))
        for old, new in zip(before, audit.read(table, whole)):
            assert max(float((a - b).abs().max()) for a, b in zip(old, new)) < 1e-4
        assert distance(engine.answers([name])[0], wanted) < 1e-4


def runs(random: Random, rows: int, longest: int) -> list[Rows]:
    """Rows [0, rows) cut into runs of random lengths up to `longest`."""
    cut = []
    start = 0
    while start < rows:
        end = min(rows, start + random.randint(1, longest))
        cut.append(Rows(start, end))
        start = end
    return cut


# -- position encodings and models -----------------------------------------------------------------

THETA = {"rope_theta": 10000.0}
ORIGINAL = {"original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **THETA, **ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **THETA,
        **ORIGINAL,
    },
}
MODELS = [("llama", name) for name in ROPES] + [("qwen2", "default"), ("qwen3", "yarn")]


@pytest.mark.parametrize(("architecture", "rope"), MODELS)
def test_models_and_ropes(
    start_engine: Start, tiny_model: Callable[..., Path], architecture: str, rope: str
) -> None:
    model = tiny_model(architecture, ROPES[rope])
    with start_engine(model, options=OPTIONS, num_gpu_blocks_override=256) as engine:
        rotary = engine.worker.layers.rotary
        wanted = hugging_face_frequencies(model)
        assert torch.allclose(rotary.inv_freq, wanted.double(), rtol=2e-6, atol=0)
        check_rotation(engine, rotary)
        members = make_round(3, 3)
        with audited(engine) as audit:
            outputs = engine.answers([engine.add(*m, **SAMPLING) for m in members])
        assert audit.members == 3
        assert [outcome(o)["role"] for o in outputs] == ["leader", "follower", "follower"]
        assert distance(outputs[0], transformers_says(model, members[0].prompt, outputs[0])) < 1e-3


def hugging_face_frequencies(model: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded.model.rotary_emb.inv_freq


def check_rotation(engine: Engine, rotary: Any) -> None:
    """Keys of layer 0 depend on token and position only: moved by a rotation, they are the same."""
    audit, random = Audit(engine), Random(4)
    text = words(random, 60)
    front = words(random, 700)
    moved = {}
    for offset in (0, 5, 700):
        prompt = front[:offset] + text
        with audit.scratch(len(prompt)) as table:
            audit.compute(table, [*prompt, 0], [Rows(0, len(prompt))])
            moved[offset] = audit.read(table, Rows(offset, len(prompt)))[0][0]
    for a, b in ((0, 5), (0, 700), (5, 700), (700, 0)):
        error = (rotary.rotate(moved[a], b - a) - moved[b]).abs().max()
        assert float(error) < 2e-4, f"{a} -> {b}"
    assert float((moved[0] - moved[5]).abs().max()) > 0.1


class _Said:
    """An output in the form that vLLM's outputs have, for `distance`."""

    def __init__(self, token_ids: list[int], steps: list[dict[int, float]]) -> None:
        class Logprob:
            def __init__(self, value: float) -> None:
                self.logprob = value

        self.outputs = [self]
        self.token_ids = token_ids
        self.logprobs = [{t: Logprob(v) for t, v in step.items()} for step in steps]


def transformers_says(model: Path, prompt: list[int], output: Any) -> _Said:
    """transformers' logprobs for the text that vLLM generated."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = prompt + tokens(output)
    with torch.inference_mode():
        logits = loaded(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return _Said(
        [int(row.argmax()) for row in logits],
        [{t: float(row[t]) for t in step} for row, step in zip(logits, logprobs(output))],
    )
