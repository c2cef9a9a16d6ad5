"""The reuse plan (M10): for every request of a round, where each row's K/V comes from.

The plan is plain, frozen data. The scheduler side makes it, the worker side executes it and
storage consumes it. It knows requests, rows and pages; agents and rounds appear as labels only.

    rows of one member:  | prefix | compute | copy <- leader | compute | copy <- leader | tail
                         0      cached                                                 end  end+1

The row `end` (the last prompt token) is left to the engine, which samples from it as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokendance.types import AgentId, RequestId, RoundId, Rows, Source, subtract_rows


class Copy(NamedTuple):
    """Rows [start, start + length) take the K/V of rows [source_start, ...) of `source`.

    K is rotated by (start - source_start) positions. `exact` says that source and target see the
    same tokens at the same positions from 0 on, so the copied K/V is what computing would give.
    `stored` says that the rows stand in the store: the worker brings them into the member's own
    pages before the pass, and computes those that are no longer there.
    """

    source: int  # index into ReusePlan.tables
    source_start: int
    start: int
    length: int
    exact: bool = False
    stored: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def delta(self) -> int:
        return self.start - self.source_start

    @property
    def rows(self) -> Rows:
        return Rows(self.start, self.end)


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of one request: row r is in slot r % page_size of blocks[r // page_size].

    stored: it has no pages any more, its rows stand in the store under its request id.
    """

    request_id: RequestId
    blocks: tuple[int, ...]
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One request of the round and the source of each of its rows [0, end)."""

    request_id: RequestId
    agent: AgentId
    table: int  # its own pages: index into ReusePlan.tables
    token_ids: Sequence[int]  # of rows [0, end]
    cached: int  # rows [0, cached) are in the engine's prefix cache
    end: int  # rows [cached, end) are the plan's to fill
    copies: tuple[Copy, ...] = ()  # sorted, disjoint, inside [cached, end)
    reason: str = ""  # why nothing was reused, if nothing was
    backend: str = ""  # recovery backend (M9); "" takes the server's

    @property
    def compute(self) -> tuple[Rows, ...]:
        """The rows that have to be computed, as maximal runs."""
        return tuple(subtract_rows(Rows(self.cached, self.end), (c.rows for c in self.copies)))

    def rows_by_source(self, recomputed: int = 0, lost: int = 0) -> dict[Source, int]:
        """`recomputed`: copied rows that a recovery backend computed instead. `lost`: rows that the
        store no longer had, computed as well."""
        stored = sum(c.length for c in self.copies if c.stored)
        copied = sum(c.length for c in self.copies) - stored - recomputed
        return {
            Source.PREFIX: self.cached,
            Source.SIBLING: copied,
            Source.STORED: stored - lost,
            Source.COMPUTED: self.end - self.cached - copied - stored + lost,
        }


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What one collective pass has to do.

    members: in execution order; a copy's source is an earlier member, or a request that was
        computed in an earlier step, whose rows stand in pages or in the store (tables beyond the
        members).
    leader: index of the member whose context the region is computed in, None if the pages of an
        earlier step lead.
    """

    round_id: RoundId
    members: tuple[Member, ...]
    tables: tuple[PageTable, ...]
    leader: int | None = None

    @property
    def computed_rows(self) -> int:
        return sum(len(run) for m in self.members for run in m.compute)


class PlanError(ValueError):
    """A plan that breaks its own contract; always a bug in the planner."""


def check_plan(plan: ReusePlan, page_size: int) -> None:
    """Raise PlanError unless the plan keeps the contract stated above."""
    owners = {member.table: index for index, member in enumerate(plan.members)}
    if len(owners) < len(plan.members):
        raise PlanError("two members have the same pages")
    for index, member in enumerate(plan.members):
        _check_member(plan, owners, index, member, page_size)


def _check_member(
    plan: ReusePlan, owners: dict[int, int], index: int, member: Member, page_size: int
) -> None:
    where = f"member {index} ({member.request_id})"
    if not 0 <= member.cached <= member.end < len(member.token_ids):
        raise PlanError(f"{where}: need 0 <= cached <= end < number of tokens")
    if len(plan.tables[member.table].blocks) * page_size <= member.end:
        raise PlanError(f"{where}: its pages do not reach row {member.end}")
    position = member.cached
    for copy in member.copies:
        if copy.start < position or copy.end > member.end or copy.length <= 0:
            raise PlanError(f"{where}: copy {copy} overlaps, is empty or out of range")
        position = copy.end
        _check_source(plan, owners.get(copy.source), index, copy, page_size)


def _check_source(
    plan: ReusePlan, owner: int | None, index: int, copy: Copy, page_size: int
) -> None:
    if copy.stored is not plan.tables[copy.source].stored:
        raise PlanError(f"copy {copy}: its source and itself disagree on where the rows stand")
    if copy.stored:
        return
    if owner is None:
        if (copy.source_start + copy.length) > len(plan.tables[copy.source].blocks) * page_size:
            raise PlanError(f"copy {copy} reads beyond its source's pages")
        return
    if owner >= index:
        raise PlanError(f"copy {copy} reads member {owner}, which is not before member {index}")
    wanted = Rows(copy.source_start, copy.source_start + copy.length)
    copied = [c for c in plan.members[owner].copies if not (c.stored and c.exact)]
    if wanted.end > plan.members[owner].end or _overlaps(wanted, copied):
        raise PlanError(f"copy {copy} reads rows that are themselves copied or missing")


def _overlaps(rows: Rows, copies: Sequence[Copy]) -> bool:
    return any(c.start < rows.end and rows.start < c.end for c in copies)
