"""The last round of a trace as the reference engine runs it: prompts, histories, donors, plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokendance.bench.render import Piece, Prompt, Renderer, Tokenizer
from tokendance.bench.trace import Kind, Trace, TraceError
from tokendance.config import Config
from tokendance.plan.planner import plan_round
from tokendance.plan.reuse_plan import ReusePlan, check_plan
from tokendance.plan.ticket import Ticket, common_prefix
from tokendance.prompt.segments import SegmentKeys
from tokendance.types import AgentId, RequestId, RoundId

PAGE = 32

ALL_KINDS: tuple[Kind, ...] = ("private", "shared", "task")


@dataclass(frozen=True, slots=True)
class LastRound:
    """A round whose agents have lived through the rounds before it.

    prompts: of the agents that are measured, the leader first; with their stored answers.
    cached: rows of each prompt that stand in the agent's prompt one round earlier too, in whole
    pages: what a prefix cache serves. donors: the contexts in which the shared texts were written
    or first read, as prompts that end with the answer; each holds a text that no earlier one does.
    """

    name: str
    prompts: tuple[Prompt, ...]
    cached: tuple[int, ...]
    donors: tuple[Prompt, ...]


def last_round(path: Path, tokenizer: Tokenizer, agents: int) -> LastRound:
    """Read the last round of a trace, of it the first `agents` requests. Raises TraceError."""
    trace = Trace(path)
    render = Renderer(tokenizer, trace.header.render)
    *earlier, last = trace.rounds()
    prompts = tuple(map(render, last.requests[:agents]))
    if not earlier or not all(prompt.output for prompt in prompts):
        raise TraceError(f"{path}: this needs two rounds at least and the answers of the last one")
    before = [[render(request) for request in round_.requests] for round_ in earlier]
    known = {prompt.agent: prompt.ids for prompt in before[-1]}
    cached = tuple(whole_pages(p.ids, known.get(p.agent, ())) for p in prompts)
    contexts = [_with_answer(prompt) for prompts_ in before for prompt in prompts_]
    return LastRound(trace.header.name, prompts, cached, _donors(prompts, contexts))


def whole_pages(ids: Sequence[int], earlier: Sequence[int]) -> int:
    """Rows of whole pages that a prefix cache finds in an earlier prompt; never the last row."""
    common = common_prefix(ids[:-1], earlier)
    return common - common % PAGE


def leader_plan(
    case: LastRound,
    pages: Sequence[tuple[int, ...]],
    keys: SegmentKeys | None = None,
) -> ReusePlan:
    """The region of the first agent serves all the others, as a server does by default."""
    tickets = _tickets(case, pages, keys or SegmentKeys("reference"))
    tickets[0].approximate_from = None
    return _checked(plan_round(RoundId(case.name), tickets, [], fresh_tail=Config().fresh_tail))


def donor_plan(
    case: LastRound,
    pages: Sequence[tuple[int, ...]],
    donor_pages: Sequence[tuple[int, ...]],
    keys: SegmentKeys | None = None,
) -> ReusePlan:
    """Every shared text comes from the context it was written in; new ones from a sibling."""
    keys = keys or SegmentKeys("reference")
    donors = [
        ticket(f"donor{i}", prompt, blocks, keys, kinds=("shared",))
        for i, (prompt, blocks) in enumerate(zip(case.donors, donor_pages))
    ]
    return _checked(plan_round(RoundId(case.name), _tickets(case, pages, keys), donors))


def ticket(
    name: str,
    prompt: Prompt,
    blocks: tuple[int, ...],
    keys: SegmentKeys,
    *,
    kinds: Sequence[Kind] = ALL_KINDS,
    computed: Callable[[], int] = lambda: 0,
) -> Ticket:
    """A prompt as the planner sees it; only segments of `kinds` are seen as such."""
    lengths = [n for n in prompt.lengths if n]
    spans = keys.spans(prompt.ids, lengths)
    wanted = [piece.kind in kinds for piece in prompt.pieces if piece.ids]
    return Ticket(
        RequestId(name),
        AgentId(prompt.agent),
        prompt.ids,
        tuple(span for span, take in zip(spans, wanted) if take),
        0.0,
        computed,
        blocks=blocks,
    )


def _tickets(case: LastRound, pages: Sequence[tuple[int, ...]], keys: SegmentKeys) -> list[Ticket]:
    tickets = []
    for index, (prompt, cached) in enumerate(zip(case.prompts, case.cached)):
        one = ticket(f"r{index}", prompt, pages[index], keys)
        one.cached = one.approximate_from = cached
        tickets.append(one)
    return tickets


def _checked(plan: ReusePlan) -> ReusePlan:
    check_plan(plan, PAGE)
    return plan


def _with_answer(prompt: Prompt) -> Prompt:
    answer = Piece("shared", prompt.output)
    end = Piece("task", prompt.ids[:1])  # the planner leaves the last row of a context alone
    return Prompt(prompt.agent, (*prompt.pieces, answer, end), ())


def _donors(prompts: Sequence[Prompt], contexts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The contexts, in order, that hold a shared text of the prompts which none before holds."""
    wanted = {piece.ids for p in prompts for piece in p.pieces if piece.kind == "shared"}
    donors = []
    for context in contexts:
        held = {piece.ids for piece in context.pieces if piece.kind == "shared"} & wanted
        if held:
            donors.append(context)
            wanted -= held
    return tuple(donors)
