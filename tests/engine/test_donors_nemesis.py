"""Quotations in little memory, with an engine of its own (M5)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from audit import audited  # noqa: E402
from small_engine import Engine, Member, outcome, tokens, words  # noqa: E402

Start = Callable[..., AbstractContextManager[Engine]]


@pytest.mark.parametrize("store_gib", [0.0, 0.004], ids=["pages", "store"])
def test_long_talks_in_little_memory(start_engine: Start, store_gib: float) -> None:
    """Everybody quotes what was said in the last rounds, some are cut off, pages and the store run
    out. The audit looks at every row that is taken, and nothing is left behind."""
    random, seed = Random(5), int(store_gib * 1000)
    options = {"backend": "naive", "store_gib": store_gib, "min_shared_tokens": 16}
    with start_engine(
        options=options | {"round_timeout_ms": 100.0}, num_gpu_blocks_override=64
    ) as engine:
        free = engine.free_blocks
        with audited(engine) as audit:
            said: list[list[int]] = [words(random, 60)]
            taken = 0
            for number in range(8):
                members = []
                for agent in range(4):
                    pieces = [words(random, random.randrange(20, 60))]
                    pieces += random.sample(said[-8:], min(len(said), random.randrange(1, 5)))
                    pieces.append(words(random, 7))
                    hints = {"session": f"talk{seed}", "agent": f"a{agent}", "round": f"{number}"}
                    hints |= {"size": 4, "segments": [len(piece) for piece in pieces]}
                    members.append(Member([t for piece in pieces for t in piece], hints))
                names = [engine.add(*m, max_tokens=random.randrange(20, 90)) for m in members]
                engine.steps(random.randrange(1, 12))
                gone = random.sample(names, number % 2)
                for name in gone:
                    engine.abort(name)
                outputs = engine.answers([name for name in names if name not in gone])
                said += [tokens(output) for output in outputs]
                taken += sum(
                    o["rows"].get("sibling", 0) + o["rows"].get("stored", 0)
                    for o in map(outcome, outputs)
                    if "rows" in o
                )
        engine.steps(2)
        assert taken > 1000
        assert any(
            plan.tables[copy.source].request_id not in {m.request_id for m in plan.members}
            for plan in audit.plans
            for member in plan.members
            for copy in member.copies
        )
        assert engine.free_blocks == free and len(engine.book) == 0
