"""Two tensor-parallel ranks on a CPU: the same answers as one, and ranks that agree on the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from small_engine import Member, distance, make_round, outcome  # noqa: E402

OPTIONS = {"min_shared_tokens": 16, "round_timeout_ms": 5000.0, "store_gib": 0.1}
ROUNDS = {
    "region": make_round(1, 4, backend="region"),
    "cacheblend": make_round(2, 4, backend="cacheblend"),
    "legolink": make_round(3, 3, backend="legolink"),
    "restored": make_round(1, 4, backend="region"),  # the first round, out of the store
}


class Served(NamedTuple):
    """outputs: per round. ranks: what the passes of each rank did, in order."""

    outputs: dict[str, list[Any]]
    ranks: list[list[Any]]


def record(worker: Any) -> None:
    """In a worker: keep what its passes report."""
    from tokendance.engines.vllm import worker_side

    run_pass, seen = worker_side.run_pass, []  # type: ignore[var-annotated]

    def recording(*args: Any) -> Any:
        done = run_pass(*args)
        rows = [tuple(map(tuple, member.recomputed)) for member in done.members]
        seen.append((done.computed_rows, done.copied_rows, done.checked_rows, rows))
        return done

    worker_side.run_pass = recording  # type: ignore[assignment]
    worker_side.seen = seen  # type: ignore[attr-defined]


def recorded(worker: Any) -> list[Any]:
    from tokendance.engines.vllm import worker_side

    return worker_side.seen  # type: ignore[attr-defined,no-any-return]


def serve(start_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ranks: int) -> Served:
    settings: dict[str, Any] = {"num_gpu_blocks_override": 256}
    if ranks > 1:
        settings |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    with start_engine(options=OPTIONS, **settings) as engine:
        engine.llm.collective_rpc(record)
        outputs = {}
        for name, members in ROUNDS.items():
            names = [engine.add(*m, logprobs=5, max_tokens=3) for m in members]
            outputs[name] = engine.answers(names)
            engine.steps(2)
            engine.forget()
        return Served(outputs, engine.llm.collective_rpc(recorded))


@pytest.fixture(scope="module")
def served(start_engine: Callable[..., Any]) -> tuple[Served, Served]:
    with pytest.MonkeyPatch.context() as patch:
        one = serve(start_engine, patch, 1)
        # The pages are read while the engine is up; a fork would inherit this process's threads.
        patch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        return one, serve(start_engine, patch, 2)


@pytest.mark.parametrize("name", ROUNDS)
def test_two_ranks_answer_as_one(served: tuple[Served, Served], name: str) -> None:
    members: list[Member] = ROUNDS[name]
    one, two = (run.outputs[name] for run in served)
    assert len(two) == len(members)
    for a, b in zip(one, two):
        assert outcome(a)["rows"] == outcome(b)["rows"]
        assert outcome(a)["role"] == outcome(b)["role"]
        assert distance(a, b) < 1e-3
    assert [outcome(o)["role"] for o in two].count("follower") == len(members) - 1


def test_ranks_choose_the_same_rows(served: tuple[Served, Served]) -> None:
    one, two = served
    (alone,) = one.ranks
    first, second = two.ranks
    assert first == second
    assert first == alone
    assert len(first) == len(ROUNDS)
    _, cacheblend, legolink, _ = first
    assert any(rows for rows in cacheblend[3]) and cacheblend[2] > 0
    assert any(rows for rows in legolink[3])


def test_every_rank_brings_its_part_back(served: tuple[Served, Served]) -> None:
    for run in served:
        for before, after in zip(run.outputs["region"], run.outputs["restored"]):
            assert outcome(after)["rows"]["stored"] > 100
            assert distance(before, after) < 1e-3
