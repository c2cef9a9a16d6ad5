"""From a reuse plan to masters and mirrors (M10, M12): who is stored dense, who as differences.

The plan says which rows of a request are rows of another one. Here that becomes, per request, a
master and spans; rows that were recomputed inside a copied stretch flag the blocks of a grid that
starts where the stretch starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tokendance.plan.reuse_plan import Copy, Member, ReusePlan
from tokendance.store.base import Tokens
from tokendance.store.blocks import BLOCK, grid_blocks
from tokendance.store.mirror import Dense, Mirror, Span
from tokendance.types import RequestId, Rows, merge_rows, subtract_rows


@dataclass(frozen=True, slots=True)
class Layout:
    """How one request is to be stored. master None: dense. exact_rows: leading rows that the plan
    leaves exact. cached: leading rows that come from the engine's prefix cache or the store."""

    request_id: RequestId
    master: RequestId | None
    spans: tuple[Span, ...]
    exact_rows: int | None
    cached: int = 0


def layouts(
    plan: ReusePlan, page_size: int, stored: Callable[[RequestId], bool], block: int = BLOCK
) -> list[Layout]:
    """One layout per member, masters first.

    stored(request_id): a request of an earlier step can be a master if its entry is still dense.
    """
    given = _rows_given(plan, page_size)
    masters = _masters(plan, given, stored)
    result = []
    for index, member in enumerate(plan.members):
        best = max(masters, key=lambda table: given[index, table], default=None)
        related = best is not None and (given[index, best] or _held(member) > member.cached)
        if best is None or member.table in masters or not related:
            result.append(Layout(member.request_id, None, (), exact_rows(member), _held(member)))
            continue
        spans = tuple(_spans(plan, member, best, page_size, block))
        master = plan.tables[best].request_id
        exact = exact_rows(member)
        result.append(Layout(member.request_id, master, spans, exact, _held(member)))
    return sorted(result, key=lambda layout: layout.master is not None)


def exact_rows(member: Member) -> int | None:
    """Rows before the first approximate copy; a row after it attends to approximate K/V."""
    return next((c.start for c in member.copies if not c.exact), None)


def _held(member: Member) -> int:
    """Leading rows that came from the engine's prefix cache or, unmoved, out of the store."""
    rows = member.cached
    for copy in member.copies:
        if not copy.stored or copy.delta or copy.start != rows:
            break
        rows = copy.end
    return rows


def _rows_given(plan: ReusePlan, page_size: int) -> Counter[tuple[int, int]]:
    """(member, table) -> rows of the member that the table's request holds as well."""
    given: Counter[tuple[int, int]] = Counter()
    for index, member in enumerate(plan.members):
        for copy in member.copies:
            given[index, copy.source] += copy.length
        for table in range(len(plan.tables)):
            if table != member.table:
                given[index, table] += sum(
                    len(r) for r in _same_pages(plan, member, table, page_size)
                )
    return given


def _masters(
    plan: ReusePlan, given: Counter[tuple[int, int]], stored: Callable[[RequestId], bool]
) -> set[int]:
    """The tables worth keeping dense: the leader's, those already stored, and every other one that
    gives its mirrors more rows than it would save as a mirror itself."""
    members = {member.table: index for index, member in enumerate(plan.members)}
    masters = {
        t for t, table in enumerate(plan.tables) if t not in members and stored(table.request_id)
    }
    if plan.leader is not None:
        masters.add(plan.members[plan.leader].table)

    def saved(index: int) -> int:
        return max((given[index, table] for table in masters), default=0)

    total = Counter[int]()
    for (_, table), rows in given.items():
        total[table] += rows
    for table, _ in total.most_common():
        if table in masters or table not in members:
            continue
        others = (i for t, i in members.items() if t != table and t not in masters)
        gain = sum(max(0, given[i, table] - saved(i)) for i in others)
        if gain > saved(members[table]):
            masters.add(table)
    return masters


def _same_pages(plan: ReusePlan, member: Member, table: int, page_size: int) -> Iterator[Rows]:
    """Prefix rows that lie in pages the two requests share, so that their bits are the same."""
    mine, theirs = plan.tables[member.table].blocks, plan.tables[table].blocks
    pages = member.cached // page_size
    same = (i for i, (a, b) in enumerate(zip(mine[:pages], theirs)) if a == b)
    yield from merge_rows(Rows(i * page_size, (i + 1) * page_size) for i in same)


def _spans(
    plan: ReusePlan, member: Member, table: int, page_size: int, block: int
) -> Iterator[Span]:
    yield from (Span(r.start, len(r), r.start) for r in _same_pages(plan, member, table, page_size))
    for stretch in _stretches(c for c in member.copies if c.source == table):
        yield from _unflagged(stretch, block)


def _stretches(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Copies that are moved by the same distance: what lies between them was recomputed in
    place."""
    stretch: list[Copy] = []
    for copy in copies:
        if stretch and copy.delta != stretch[-1].delta:
            yield stretch
            stretch = []
        stretch.append(copy)
    if stretch:
        yield stretch


def _unflagged(stretch: list[Copy], block: int) -> Iterator[Span]:
    region = Rows(stretch[0].start, stretch[-1].end)
    flagged = (Rows(a.end, b.start) for a, b in pairwise(stretch) if a.end < b.start)
    for run in subtract_rows(region, grid_blocks(flagged, region, block)):
        yield Span(run.start, len(run), run.start - stretch[0].delta)


def inherited(previous: Mirror, cached: int, old_master: Dense, same_rows: int) -> Iterator[Span]:
    """What a mirror's prefix took from the master already when its agent's last entry was stored.

    cached: leading rows of the new mirror that are those of `previous`, out of the engine's prefix
    cache; same_rows: leading rows of the new master that are those of `old_master` likewise.
    """
    if previous.master is not old_master or previous.v_pieces is not previous.k_pieces:
        return
    for piece in (p for p in previous.k_pieces if p.shared and p.birth == p.at):
        length = min(piece.end, cached) - piece.start
        length = min(length, same_rows - piece.at)
        if length > 0:
            yield Span(piece.start, length, piece.at)


def disjoint(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans in order, each without the rows of those before it."""
    done = 0
    for span in sorted(spans):
        skip = max(0, done - span.start)
        if skip < span.length:
            yield Span(span.start + skip, span.length - skip, span.master_start + skip)
            done = span.start + span.length


def confirm(spans: Iterable[Span], tokens: Tokens, master: Tokens) -> tuple[Span, ...]:
    """The spans whose token ids really are the master's, as far as the rows to be stored reach;
    nothing is ever shared on trust."""
    within = (s._replace(length=min(s.length, len(tokens) - s.start)) for s in spans)
    return tuple(
        s
        for s in within
        if s.length > 0
        and s.master_start + s.length <= len(master)
        and np.array_equal(
            tokens[s.start : s.start + s.length],
            master[s.master_start : s.master_start + s.length],
        )
    )


def family_bound(agents: int, private_share: float) -> float:
    """The most a family of `agents` equal caches can shrink: N / (1 + (N - 1) * private share)."""
    return agents / (1 + (agents - 1) * private_share)
