"""Planner and collective pass together: what the planner calls exact has to come out exact."""

from __future__ import annotations

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import Round, finish, on_engine, rounds

from tokendance.plan.planner import plan_round
from tokendance.plan.reuse_plan import ReusePlan, check_plan
from tokendance.plan.ticket import Ticket
from tokendance.reuse.collective import run_pass
from tokendance.reuse.recovery import create
from tokendance.types import RoundId, SegmentKey, Span


def tickets(spec: Round, plan: ReusePlan, exact: list[bool]) -> list[Ticket]:
    """The round as the scheduler side sees it: shared parts are marked segments."""
    made = []
    for index, member in enumerate(plan.members):
        spans, start = [], 0
        for part in spec.prompts[index]:
            if part in spec.shared and part:
                spans.append(Span(start, start + len(part), SegmentKey(repr(part).encode())))
            start += len(part)
        ticket = Ticket(
            member.request_id, member.agent, member.token_ids, tuple(spans), 0.0, lambda: 0
        )
        ticket.cached = member.cached
        ticket.blocks = plan.tables[index].blocks
        ticket.approximate_from = None if exact[index] else 0
        made.append(ticket)
    return made


@given(rounds(), st.lists(st.booleans(), min_size=4, max_size=4), st.sampled_from((7, 10**6)))
@settings(max_examples=25, deadline=None)
def test_exact_requests_are_exact(spec: Round, exact: list[bool], max_rows: int) -> None:
    engine = tiny.engine("llama")
    with on_engine(engine, spec) as (held, streams):
        plan = plan_round(RoundId("round"), tickets(spec, held, exact), ())
        check_plan(plan, engine.kv.page_size)
        outcome = run_pass(engine, plan, max_rows)
        assert outcome.computed_rows == plan.computed_rows
        got = finish(engine, plan, streams)
        for index, member in enumerate(plan.members):
            if exact[index] or all(copy.exact for copy in member.copies):
                want = tiny.oracle(list(member.token_ids))[-1]
                torch.testing.assert_close(got[index], want, atol=1e-4, rtol=0)
        run_pass(engine, plan, max_rows, [create("full")] * len(plan.members))
        for logits, member in zip(finish(engine, plan, streams), plan.members):
            want = tiny.oracle(list(member.token_ids))[-1]
            torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
