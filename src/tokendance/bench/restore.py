"""Fused against dense restore, and both against a plain copy.

A family of one master and N mirrors (a tenth of their rows private, every mirror at another offset)
goes from the store into shuffled pages. Copy, fused and dense restore take turns within a
repetition, so that other load on the machine meets all three. `copy_share` is the time of a plain
copy of the bytes written over the time of the fused restore, in wall time and, as `cpu_...`, in
processor time, which says more where other work shares the cores; `loaded` and `written` are
counted by the restorer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from tokendance.plan.reuse_plan import Copy, Member, PageTable, ReusePlan
from tokendance.restore import PagedPlanes, Placement, Restorer
from tokendance.restore.kernels import best
from tokendance.restore.kernels.base import Kernel
from tokendance.reuse.rotary import Rotary
from tokendance.store import Cache, Identity, Owner, Store
from tokendance.types import AgentId, RequestId, RoundId, SessionId

PAGE = 16
SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)


class Setting(NamedTuple):
    """Shape of the model and of the family. private: share of a request's rows that is its own."""

    layers: int
    heads: int
    dim: int
    rows: int
    private: float
    int8: bool


class Noise:
    """A KVAccess whose rows come from one random tensor; it only has to be read fast."""

    def __init__(self, setting: Setting) -> None:
        self.num_layers = setting.layers
        self.page_size = PAGE
        self._rows = torch.randn(setting.rows, setting.heads, setting.dim).to(torch.bfloat16)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows[slots % len(self._rows)]
        return rows, rows

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        raise NotImplementedError("this cache is only a source")


class Family:
    """A stored family and pages for it. `master` is placed first if the round includes it."""

    def __init__(self, setting: Setting, mirrors: int, with_master: bool) -> None:
        self.setting = setting
        self.store = Store(Identity("bench"), budget=1 << 40, int8=setting.int8, min_saving=0.0)
        plan, caches = _round(setting, mirrors)
        kept = self.store.put_family(plan, caches)
        self.leases = ExitStack()
        entries = [self.leases.enter_context(self.store.lease(k.key)) for k in kept if k.key]
        self.master_bytes = kept[0].nbytes - 4 * setting.rows
        placed = entries if with_master else entries[1:]
        pages = -(-setting.rows // PAGE)
        shape = (pages * len(placed), PAGE, setting.heads, setting.dim)
        self.target = PagedPlanes.empty(setting.layers, *shape, torch.bfloat16)
        order = torch.from_numpy(np.random.default_rng(0).permutation(shape[0]))
        row = torch.arange(setting.rows)
        self.placements = [
            Placement(entry, order[i * pages + row // PAGE] * PAGE + row % PAGE)
            for i, entry in enumerate(placed)
            if entry is not None
        ]


def _round(setting: Setting, mirrors: int) -> tuple[ReusePlan, dict[RequestId, Cache]]:
    rng = np.random.default_rng(0)
    own = round(setting.rows * setting.private)
    shared = rng.integers(0, 50_000, setting.rows - own).tolist()
    kv = Noise(setting)
    members, tables, caches = [], [], {}
    for index in range(mirrors + 1):
        # Private rows before and after the region, split differently in every request.
        before = own * (index + 1) // (mirrors + 2)
        private = rng.integers(0, 50_000, own).tolist()
        tokens = [*private[:before], *shared, *private[before:]]
        name = RequestId(f"a{index}")
        lead = own // (mirrors + 2)
        copies = (Copy(0, lead, before, len(shared)),) if index else ()
        tables.append(PageTable(name, tuple(range(-(-setting.rows // PAGE)))))
        end = setting.rows - 1
        members.append(Member(name, AgentId(name), index, tuple(tokens), 0, end, copies))
        owner = Owner(SessionId("bench"), AgentId(name))
        caches[name] = Cache(name, owner, tokens, kv, torch.arange(setting.rows))
    return ReusePlan(RoundId("0"), tuple(members), tuple(tables), 0), caches


def measure(
    setting: Setting, mirrors: int, kernel: Kernel, repeat: int, with_master: bool = False
) -> dict[str, Any]:
    """One row of the result: medians over `repeat` repetitions, spread as (max - min) / median."""
    family = Family(setting, mirrors, with_master)
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, setting.dim, 2).double() / setting.dim)
    restorer = Restorer(family.target, Rotary(inv_freq), kernel=kernel)
    one = torch.ones(setting.layers * 2 * setting.rows * setting.heads * setting.dim)
    source = one.to(torch.bfloat16)
    sink = torch.zeros_like(source)
    del one
    report = restorer.restore(family.placements)
    times: dict[str, list[tuple[float, float]]] = {"copy": [], "fused": [], "dense": []}

    def copy() -> None:
        for _ in family.placements:
            sink.copy_(source)

    runs: dict[str, Callable[[], Any]] = {
        "copy": copy,
        "fused": lambda: restorer.restore(family.placements),
        "dense": lambda: [restorer.restore_dense(p) for p in family.placements],
    }
    for _ in range(repeat):
        for name, run in runs.items():
            begin = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    family.leases.close()
    wall, cpu = ({n: [pair[i] for pair in v] for n, v in times.items()} for i in (0, 1))
    middle = {name: median(values) for name, values in wall.items()}
    busy = {name: median(values) for name, values in cpu.items()}
    spread = {n: round((max(v) - min(v)) / middle[n], 3) for n, v in wall.items()}
    allowed = 1 + mirrors * round(setting.rows * setting.private) / setting.rows
    return {
        "mirrors": mirrors,
        "with_master": with_master,
        "private": setting.private,
        "kernel": report.kernel,
        "int8": setting.int8,
        "fused_over_dense": round(middle["dense"] / middle["fused"], 3),
        "copy_share": round(middle["copy"] / middle["fused"], 3),
        "cpu_fused_over_dense": round(busy["dense"] / busy["fused"], 3),
        "cpu_copy_share": round(busy["copy"] / busy["fused"], 3),
        "bytes": {"loaded": report.loaded, "written": report.written},
        "loaded_masters": round(report.loaded / family.master_bytes, 4),
        "allowed_masters": round(allowed, 4),
        "seconds": {name: round(value, 5) for name, value in middle.items()},
        "cpu_seconds": {name: round(value, 5) for name, value in busy.items()},
        "spread": spread,
        "copy_gb_per_s": round(2 * report.written / middle["copy"] / 1e9, 2),
    }


def bench_restore(
    base: Setting,
    mirrors: Sequence[int],
    repeat: int,
    say: Callable[[str], None],
    *,
    sweep: bool = False,
    kernel: Kernel | None = None,
) -> dict[str, Any]:
    """Every number of mirrors, and nine with their master; sweep: five mirrors at every share."""
    kernel = kernel or best(torch.device("cpu"))
    cases = [(base, n, False) for n in mirrors] + [(base, 9, True)]
    if sweep:
        cases += [(base._replace(private=share), 5, False) for share in SHARES]
    rows = []
    for setting, count, with_master in cases:
        rows.append(measure(setting, count, kernel, repeat, with_master))
        say(_line(rows[-1]))
        gc.collect()
    return {
        "shape": base._asdict(),
        "threads": torch.get_num_threads(),
        "repetitions": repeat,
        "rows": rows,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['mirrors']:3} mirrors{' + master' if row['with_master'] else '         '} "
        f"private {row['private']:.2f}  fused/dense {row['fused_over_dense']:5.2f}x  "
        f"copy share {row['copy_share']:5.2f}  (cpu {row['cpu_fused_over_dense']:.2f}x, "
        f"{row['cpu_copy_share']:.2f})  loaded {row['loaded_masters']:6.3f} masters "
        f"(<= {row['allowed_masters']:.3f})  {row['kernel']}"
    )
