"""How much of a round is the same for its agents: tokens, blocks, K/V rows, bytes (figures 3, 12).

Tokens, the blocks of the region plan and the family's bytes are counted for every round. Whether
reused K and V point where computed ones do, and how many blocks CacheBlend's choice of rows leaves
equal, needs a model: that is measured on the last round of a trace, with fewer agents.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tokendance.bench import storage
from tokendance.bench.render import Prompt, Renderer, Tokenizer
from tokendance.bench.roundbench import LOCK_STEP, PLAIN, REGION, Method, RoundBench
from tokendance.bench.rounds import PAGE, LastRound, last_round, leader_plan, whole_pages
from tokendance.bench.trace import Trace, TraceError
from tokendance.engines.reference.model import Model
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.collective import PassOutcome
from tokendance.reuse.rows import slots_of
from tokendance.store.similarity import window_hashes
from tokendance.types import AgentId, Rows, merge_rows

BLOCK = 32
SHAPE = storage.Shape(1, 2, 64)
"""Of the blank K/V whose bytes are counted; other shapes give the same ratios."""

METHODS = {"region": REGION, "cacheblend": LOCK_STEP}

Say = Callable[[str], None]
Numbers = npt.NDArray[np.int64]


def count_rounds(path: Path, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One row per round in which two agents of a group speak. Raises TraceError."""
    trace = Trace(path)
    renderer = Renderer(tokenizer, trace.header.render)
    ratios = {
        row["round"]: row["family_ratio"]
        for row in storage.measure(trace, renderer, SHAPE, "region")
    }
    earlier: dict[str, tuple[int, ...]] = {}
    origins, rows = Origins(), []
    for round_ in trace.rounds():
        groups: dict[str, list[Prompt]] = defaultdict(list)
        for request in round_.requests:
            groups[trace.header.group_of(request.agent) or "all"].append(renderer(request))
        several = [prompts for prompts in groups.values() if len(prompts) > 1]
        numbers = [origins.add(_region(prompts, earlier)) for prompts in several]
        earlier.update((p.agent, p.ids) for prompts in groups.values() for p in prompts)
        if several:
            shares = [shared_tokens([p.ids for p in prompts]) for prompts in several]
            rows.append(
                {
                    "trace": f"{trace.header.size}/{path.stem}",
                    "round": round_.index,
                    "agents": max(map(len, several)),
                    "prompt_tokens": round(fmean(len(p.ids) for g in several for p in g)),
                    "shared_tokens": round(fmean(shares), 4),
                    "same_blocks": round(fmean(same_blocks(n, 0) for n in numbers), 4),
                    "k_cosine": None,
                    "v_cosine": None,
                    "family_ratio": ratios[round_.index],
                }
            )
    return rows


def shared_tokens(prompts: Sequence[Sequence[int]]) -> float:
    """Share of all tokens that lie in a run of BLOCK tokens which another prompt holds too."""
    windows = [window_hashes(np.array(ids, dtype=np.int32), BLOCK) for ids in prompts]
    holders = Counter(value for hashes in windows for value in set(hashes.tolist()))
    shared = 0
    for hashes in windows:
        starts = [i for i, value in enumerate(hashes.tolist()) if holders[value] > 1]
        shared += sum(len(run) for run in merge_rows(Rows(i, i + BLOCK) for i in starts))
    return shared / sum(map(len, prompts))


class Origins:
    """Gives every computed row of K/V a number of its own, and follows it from agent to agent.

    Rows have the same number if they hold the same K/V, but for one rotation of K. An agent's
    prefix cache keeps the numbers of its last prompt.
    """

    def __init__(self) -> None:
        self._next = 0
        self._last: dict[AgentId, Numbers] = {}

    def add(self, plan: ReusePlan, outcome: PassOutcome | None = None) -> list[Numbers]:
        """int64 [rows] per member, after a pass. What a recovery backend computed is new."""
        recomputed = {m.request_id: m.recomputed for m in outcome.members} if outcome else {}
        tables: dict[int, Numbers] = {}
        result = []
        for member in plan.members:
            mine = self._new(member.end + 1)
            mine[: member.cached] = self._last.get(member.agent, mine)[: member.cached]
            for copy in member.copies:
                if copy.source not in tables:
                    tables[copy.source] = self._new(len(plan.tables[copy.source].blocks) * PAGE)
                there = slice(copy.source_start, copy.source_start + copy.length)
                mine[copy.start : copy.end] = tables[copy.source][there]
            for run in recomputed.get(member.request_id, ()):
                mine[run.start : run.end] = self._new(len(run))
            tables[member.table] = mine
            self._last[member.agent] = mine
            result.append(mine)
        return result

    def _new(self, rows: int) -> Numbers:
        self._next += rows
        return np.arange(self._next - rows, self._next, dtype=np.int64)


def same_blocks(numbers: Sequence[Numbers], master: int) -> float:
    """Share of the mirrors' rows that lie in blocks which the master holds as they are.

    numbers: as Origins gives them; every member but the master is a mirror. Blocks of BLOCK rows
    are counted from the first row of a stretch that is moved by one distance; one that differs in
    a single row is the mirror's own.
    """
    order = numbers[master].argsort()
    keys = numbers[master][order]
    same = rows = 0
    for mirror in (n for index, n in enumerate(numbers) if index != master):
        place = np.minimum(np.searchsorted(keys, mirror), len(keys) - 1)
        held = np.flatnonzero(keys[place] == mirror)
        moved = order[place[held]] - held
        cuts = np.flatnonzero(np.diff(moved)) + 1
        same += sum(_in_whole_blocks(part) for part in np.split(held, cuts) if len(part))
        rows += len(mirror)
    return same / rows if rows else 0.0


def _in_whole_blocks(rows: Numbers) -> int:
    """How many of the rows (ascending) lie in blocks, counted from the first one, of which no row
    is missing; the last block may be shorter."""
    block = (rows - rows[0]) // BLOCK
    sizes = np.bincount(block)
    wanted = np.full(len(sizes), BLOCK)
    wanted[-1] = rows[-1] - rows[0] + 1 - BLOCK * (len(sizes) - 1)
    return int(sizes[sizes == wanted].sum())


def _region(prompts: Sequence[Prompt], earlier: dict[str, tuple[int, ...]]) -> ReusePlan:
    """The region plan of a round in which every agent finds its earlier prompt's pages."""
    cached = tuple(whole_pages(p.ids, earlier.get(p.agent, ())) for p in prompts)
    pages, first = [], 0
    for prompt in prompts:
        count = -(-len(prompt.ids) // PAGE)
        pages.append(tuple(range(first, first + count)))
        first += count
    return leader_plan(LastRound("count", tuple(prompts), cached, ()), pages)


class Cosines(NamedTuple):
    """Mean over rows of cos(reused, computed), one value per layer."""

    k: list[float]
    v: list[float]


def on_engine(
    path: Path,
    tokenizer: Tokenizer,
    model: Model,
    agents: int,
    say: Say,
    methods: Sequence[str] = tuple(METHODS),
) -> dict[str, Any]:
    """The last round of a trace, with K/V: per method same blocks and cosines. Raises TraceError.

    Cosines are over the rows that followers take from elsewhere, after recovery. Here the rows of
    an agent's prefix cache are its own. Contexts that no method takes K/V from are not computed.
    """
    round_, wanted = last_round(path, tokenizer, agents), {name: METHODS[name] for name in methods}
    if all(method.source != "donors" for method in wanted.values()):
        round_ = replace(round_, donors=())
    found: dict[str, Any] = {"engine_agents": len(round_.prompts)}
    with torch.inference_mode(), RoundBench(round_, model) as bench:
        bench.fill(PLAIN)
        exact = {method: _rows(bench, method) for method in wanted.values()}
        for name, method in wanted.items():
            outcome = bench.fill(method).outcome
            plan, cosines = (
                bench.plans[method.source],
                _cosines(exact[method], _rows(bench, method)),
            )
            master = plan.leader if plan.leader is not None else outcome and outcome.master
            found[name] = {
                "same_blocks": round(same_blocks(Origins().add(plan, outcome), master or 0), 4),
                "k_cosine": round(fmean(cosines.k), 4),
                "v_cosine": round(fmean(cosines.v), 4),
                "k_cosine_by_layer": [round(x, 4) for x in cosines.k],
                "v_cosine_by_layer": [round(x, 4) for x in cosines.v],
            }
            figures = [found[name][key] for key in ("same_blocks", "k_cosine", "v_cosine")]
            say("{}, {}: same blocks {:.3f}, K {:.4f}, V {:.4f}".format(path.stem, name, *figures))
    return found


def _rows(bench: RoundBench, method: Method) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V, per layer, of the rows that the method's plan copies inexactly for followers.

    Raises TraceError if there are none.
    """
    plan, kv = bench.plans[method.source], bench.engine.kv
    slots = [
        slots_of(plan.tables[member.table], copy.rows, kv.page_size)
        for member in plan.members[1:]
        for copy in member.copies
        if not copy.exact
    ]
    if not slots:
        raise TraceError(f"{bench.round.name}: these agents share nothing in the last round")
    where = torch.from_numpy(np.concatenate(slots)).to(bench.engine.device)
    return [kv.read(layer, where) for layer in range(kv.num_layers)]


def _cosines(
    computed: Sequence[tuple[torch.Tensor, torch.Tensor]],
    reused: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Cosines:
    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(F.cosine_similarity(a.float().flatten(1), b.float().flatten(1), dim=1).mean())

    pairs = list(zip(computed, reused))
    return Cosines([cosine(a[0], b[0]) for a, b in pairs], [cosine(a[1], b[1]) for a, b in pairs])
