"""The collective pass with every recovery method, on the reference engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import STANDARD, Round, finish, kv_of, on_engine, part, rounds

from tokendance.engines.reference.engine import ReferenceEngine
from tokendance.plan.reuse_plan import Member, ReusePlan
from tokendance.reuse.collective import run_pass, run_serial
from tokendance.reuse.recovery import Recovery, RecoveryError, create
from tokendance.types import Rows

ALL = 10**6

BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("region", {}),
    ("naive", {}),
    ("legolink", {"tokens": 3}),
    ("cacheblend", {"ratio": 0.3}),
    ("cacheblend", {"ratio": 0.3, "of": "v", "check_layer": 2}),
    ("cacheblend", {"ratio": 0.3, "block": 4}),
    ("full", {}),
]
backends = st.sampled_from(BACKENDS)


def same(backend: Recovery, plan: ReusePlan) -> list[Recovery]:
    return [backend] * len(plan.members)


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@given(rounds(), st.booleans(), st.sampled_from((3, 8, ALL)))
@settings(max_examples=20, deadline=None)
def test_full_equals_transformers(spec: Round, donors: bool, max_rows: int) -> None:
    engine = tiny.engine("qwen3", "yarn")
    with on_engine(engine, spec, donors=donors) as (plan, streams):
        outcome = run_pass(engine, plan, max_rows, same(create("full"), plan))
        assert outcome.copied_rows == outcome.checked_rows == 0
        assert outcome.computed_rows == sum(m.end - m.cached for m in plan.members)
        got = finish(engine, plan, streams)
        for index, member in enumerate(plan.members):
            close(got[index], tiny.oracle(list(member.token_ids), "qwen3", "yarn")[-1])
            assert outcome.members[index].deviation == 0.0


@given(rounds(), backends)
@settings(max_examples=25, deadline=None)
def test_rows_before_any_approximate_copy_are_exact(
    spec: Round, named: tuple[str, dict[str, Any]]
) -> None:
    """The leader keeps its bits; a follower is exact as far as it shares the leader's prefix."""
    engine = tiny.engine("llama")
    with on_engine(engine, spec) as (plan, streams):
        run_pass(engine, plan, ALL, same(create(*named), plan))
        for index, (member, stream) in enumerate(zip(plan.members, streams)):
            exact = next((c.start for c in member.copies if not c.exact), member.end)
            rows = Rows(0, exact)
            got = kv_of(engine, stream, rows) if exact else None
            with engine.streams([member.token_ids]) as (alone,):
                runs = [Rows(0, member.cached), Rows(member.cached, member.end)]
                for run in runs if index == 0 else [Rows(0, member.end)]:
                    if len(run):
                        engine.hidden(engine.batch([(alone, [run])]))
                if got is None:
                    continue
                want = kv_of(engine, alone, rows)
            close(got, want, atol=1e-5)
            if index == 0:
                assert torch.equal(got, want)


@given(rounds(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_copies_are_their_source_moved(spec: Round, donors: bool) -> None:
    engine = tiny.engine("qwen2")
    with on_engine(engine, spec, donors=donors) as (plan, streams):
        outcome = run_pass(engine, plan, ALL, same(create("region"), plan))
        copies = [(s, c) for s, m in zip(streams, plan.members) for c in m.copies]
        assert outcome.copied_rows == sum(c.length for _, c in copies)
        for stream, copy in copies:
            source = replace(stream, blocks=plan.tables[copy.source].blocks)
            source.token_ids = source.token_ids + [0] * 99
            rows = Rows(copy.source_start, copy.source_start + copy.length)
            want, got = kv_of(engine, source, rows), kv_of(engine, stream, copy.rows)
            assert torch.equal(got[:, 1], want[:, 1])
            for layer in range(engine.kv.num_layers):
                assert torch.equal(got[layer, 0], engine.rotary.rotate(want[layer, 0], copy.delta))


def kv_of_all(engine: ReferenceEngine, plan: ReusePlan, streams: Any) -> list[torch.Tensor]:
    return [kv_of(engine, s, Rows(0, m.end)) for s, m in zip(streams, plan.members) if m.end]


@given(rounds(), backends, st.booleans())
@settings(max_examples=25, deadline=None)
def test_lock_step_equals_serial(
    spec: Round, named: tuple[str, dict[str, Any]], donors: bool
) -> None:
    results = []
    for run in (run_pass, run_serial):
        engine = tiny.engine("qwen3")
        with on_engine(engine, spec, donors=donors) as (plan, streams):
            outcome = run(engine, plan, ALL, same(create(*named), plan))
            results.append((outcome, kv_of_all(engine, plan, streams)))
    (together, kv_together), (alone, kv_alone) = results
    assert [m.recomputed for m in together.members] == [m.recomputed for m in alone.members]
    assert together.master == alone.master
    assert together.computed_rows == alone.computed_rows
    assert together.copied_rows == alone.copied_rows
    for a, b in zip(kv_together, kv_alone):
        close(a, b, atol=1e-5)
    for x, y in zip(together.members, alone.members):
        assert x.deviation == (y.deviation if y.deviation is None else pytest.approx(y.deviation))


@given(rounds(), backends, st.sampled_from((4, 11)), st.sampled_from((0.0, 1.0)))
@settings(max_examples=20, deadline=None)
def test_passes_of_any_size_agree(
    spec: Round, named: tuple[str, dict[str, Any]], max_rows: int, ratio: float
) -> None:
    """Cut into several forward passes. With a check layer each of them makes a selection of its
    own, so they agree where that is nothing or everything."""
    name, options = named
    if name == "cacheblend":
        options = {**options, "ratio": ratio}
    results = []
    for rows in (ALL, max_rows):
        engine = tiny.engine("llama")
        with on_engine(engine, spec) as (plan, streams):
            outcome = run_pass(engine, plan, rows, same(create(name, options), plan))
            results.append((outcome, kv_of_all(engine, plan, streams)))
    (whole, kv_whole), (cut, kv_cut) = results
    assert [m.recomputed for m in whole.members] == [m.recomputed for m in cut.members]
    assert whole.computed_rows == cut.computed_rows
    assert whole.copied_rows == cut.copied_rows
    for a, b in zip(kv_whole, kv_cut):
        close(a, b, atol=1e-5)


def dense_cacheblend(
    engine: ReferenceEngine, member: Member, cached: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, list[int]]:
    """CacheBlend of one prompt over dense tensors, no pages, no runs, nothing batched.

    cached: [layers, 2, rows, kv_heads, head_dim], rotated; rows that are not copied are ignored.
    """
    model, ratio, at = engine.model, options["ratio"], options.get("check_layer", 1)
    copied = [r for c in member.copies if not c.exact for r in range(*c.rows)]
    positions = torch.arange(member.end)
    x, rows = model.embedding[torch.tensor(member.token_ids[: member.end])], positions
    chosen: list[int] = []
    kv = cached.clone()
    for index, layer in enumerate(model.layers):
        q, k, v = model.project(layer, x, model.angles(rows))
        if index == at:
            plane, fresh = (1, v) if options.get("of") == "v" else (0, k)
            moved = {r: (fresh[r] - cached[index, plane, r]).square().sum() for r in copied}
            by_deviation = sorted(copied, key=lambda r: -moved[r].item())
            chosen = sorted(by_deviation[: -(-int(len(copied) * ratio * 1000) // 1000)])
            keep = torch.tensor([r for r in range(member.end) if r not in copied or r in chosen])
            x, q, k, v, rows = x[keep], q[keep], k[keep], v[keep], keep
        kv[index, 0, rows], kv[index, 1, rows] = k, v
        groups = model.heads // model.kv_heads
        keys, values = (p.repeat_interleave(groups, 1) for p in kv[index])
        scores = torch.einsum("qhd,khd->hqk", q, keys) / model.head_dim**0.5
        scores = scores.masked_fill(positions[None, None] > rows[None, :, None], -torch.inf)
        x = model.finish(layer, x, torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return kv, chosen


@pytest.mark.parametrize(
    "options", [{"ratio": 0.2}, {"ratio": 0.5, "of": "v"}, {"ratio": 0.35, "check_layer": 2}]
)
def test_cacheblend_equals_a_dense_implementation(options: dict[str, Any]) -> None:
    engine = tiny.engine("qwen2")
    spec = replace(STANDARD, cached=(0, 0, 0, 0))
    with on_engine(engine, spec, donors=True) as (plan, streams):
        want = []
        for member, stream in zip(plan.members, streams):
            source = torch.zeros_like(kv_of(engine, stream, Rows(0, member.end)))
            for copy in member.copies:
                donor = replace(stream, blocks=plan.tables[copy.source].blocks)
                rows = Rows(copy.source_start, copy.source_start + copy.length)
                part_of = kv_of(engine, donor, rows)
                for layer, keys in enumerate(part_of[:, 0]):
                    part_of[layer, 0] = engine.rotary.rotate(keys, copy.delta)
                source[:, :, copy.start : copy.end] = part_of
            want.append(dense_cacheblend(engine, member, source, options))
        outcome = run_pass(engine, plan, ALL, same(create("cacheblend", options), plan))
        for stream, member, found, (kv, chosen) in zip(
            streams, plan.members, outcome.members, want
        ):
            assert [r for rows in found.recomputed for r in range(*rows)] == chosen
            close(kv_of(engine, stream, Rows(0, member.end)), kv, atol=1e-5)


def test_all_of_cacheblend_is_exact_and_none_of_it_only_measures() -> None:
    engine = tiny.engine("llama")
    with on_engine(engine, STANDARD) as (plan, streams):
        every = run_pass(engine, plan, ALL, same(create("cacheblend", {"ratio": 1.0}), plan))
        assert every.checked_rows == every.copied_rows == 0
        got = finish(engine, plan, streams)
        for member, logits in zip(plan.members, got):
            close(logits, tiny.oracle(list(member.token_ids))[-1])
        none = run_pass(engine, plan, ALL, same(create("cacheblend", {"ratio": 0.0}), plan))
        assert [m.recomputed for m in none.members] == [()] * 4
        assert none.checked_rows == none.copied_rows == 3 * 63
        assert [m.deviation for m in none.members] == pytest.approx(
            [m.deviation for m in every.members]
        )


def test_master_is_the_member_that_deviates_least() -> None:
    """With a leader it is the leader, whose K/V is exact; with donors the member nearest them."""
    engine = tiny.engine("llama")
    backend = create("cacheblend", {"ratio": 0.15})
    with on_engine(engine, STANDARD) as (plan, _):
        outcome = run_pass(engine, plan, ALL, same(backend, plan))
        assert outcome.master == 0
        assert outcome.members[0] == ("r0", 0.0, ())
        assert all(m.deviation and m.deviation > 0 for m in outcome.members[1:])
    # The third agent's prompt begins as the donors' contexts do, so its copies hardly deviate.
    near = replace(STANDARD, authors=((), part(20, 1), part(20, 1) + part(17, 2)))
    with on_engine(engine, near, donors=True) as (plan, _):
        outcome = run_pass(engine, plan, ALL, same(backend, plan))
        assert outcome.master == 2
        assert outcome.members[2].deviation == pytest.approx(0.0, abs=1e-6)
    with on_engine(engine, STANDARD) as (plan, _):
        assert run_pass(engine, plan, ALL).members[1].deviation is None


def test_each_request_may_have_its_own_backend() -> None:
    """A member's result does not depend on what the others of its group asked for."""
    engine = tiny.engine("llama")
    own = [
        create("region"),
        create("cacheblend", {"ratio": 0.2}),
        create("legolink", {"tokens": 4}),
        create("cacheblend", {"ratio": 0.5, "of": "v", "block": 4}),
    ]
    with on_engine(engine, STANDARD) as (plan, streams):
        want = []
        for index, backend in enumerate(own):
            outcome = run_pass(engine, plan, ALL, same(backend, plan))
            rows = Rows(0, plan.members[index].end)
            want.append((outcome.members[index], kv_of(engine, streams[index], rows)))
        outcome = run_pass(engine, plan, ALL, own)
        for index, (found, kv) in enumerate(want):
            assert outcome.members[index].recomputed == found.recomputed
            close(kv_of(engine, streams[index], Rows(0, plan.members[index].end)), kv, atol=1e-5)
        assert [bool(m.recomputed) for m in outcome.members] == [False, True, True, True]


def test_a_group_that_cannot_be_checked_together_is_refused_before_it_starts() -> None:
    engine = tiny.engine("llama")
    with on_engine(engine, STANDARD) as (plan, streams):
        before = kv_of_all(engine, plan, streams)
        two, one = (create("cacheblend", {"check_layer": n}) for n in (2, 1))
        with pytest.raises(RecoveryError, match=r"layers \[1, 2\]"):
            run_pass(engine, plan, ALL, [one, two, one, one])
        for a, b in zip(before, kv_of_all(engine, plan, streams)):
            assert torch.equal(a, b)


def test_deviations_are_summed_over_ranks() -> None:
    """What a rank sees of its heads is scaled by the sum over ranks before anything is chosen."""
    engine = tiny.engine("llama")
    with on_engine(engine, STANDARD) as (plan, _):
        backends = same(create("cacheblend"), plan)
        alone = run_pass(engine, plan, ALL, backends)
        both = run_pass(engine, plan, ALL, backends, lambda values: values * 2)
        assert [m.deviation for m in both.members] == pytest.approx(
            [2 * (m.deviation or 0) for m in alone.members]
        )
        flipped = run_pass(engine, plan, ALL, backends, lambda values: -values)
        assert flipped.members[1].recomputed != alone.members[1].recomputed
