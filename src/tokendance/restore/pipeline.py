"""Bringing entries back into a paged cache (M17-M19).

Layer by layer: start loading layer l + 1 into the buffer that layer l - 1 has left, place layer l
from the other one. A round is one call: entries made of one master share what is loaded of it. On
the CPU, unpacked rows need no load at all, the kernel reads them where the store holds them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tokendance.restore import kernels
from tokendance.restore.jobs import Batch, Job, Placement, prepare
from tokendance.restore.kernels.base import Kernel, Rows, Slots
from tokendance.restore.staging import Stager
from tokendance.restore.target import PagedPlanes
from tokendance.reuse.base import KVAccess
from tokendance.reuse.rotary import Rotary


class Report(NamedTuple):
    """What a restore did. loaded: bytes read from the store, a shared master counted once; written:
    bytes put into pages."""

    rows: int
    loaded: int
    written: int
    seconds: float
    kernel: str


class Restorer:
    """Restores into one target.

    target: paged planes are written by the kernel directly; any other KVAccess gets the rows of a
        layer in one write per placement.
    device: where the target's pages are.
    """

    def __init__(
        self,
        target: KVAccess,
        rotary: Rotary,
        *,
        kernel: Kernel | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device if device is not None else torch.device("cpu")
        self.kernel = kernel if kernel is not None else kernels.best(self.device)
        self._target = target
        self._rotary = rotary
        self._dense: dict[int, torch.Tensor] = {}

    def restore(self, placements: Sequence[Placement]) -> Report:
        """Restore a round of entries. Rows with position difference 0 are bit-equal to what was
        stored. Raises ValueError if a placement does not fit its slots, LookupError for rows that
        are not stored, and store.base.EntryGone without a lease."""
        begin = time.perf_counter()
        jobs, feeds = self._prepare(placements)
        with Stager(feeds, self.device) as stager:
            for layer in range(self._target.num_layers if jobs else 0):
                planes = stager.take(layer)
                for job in jobs:
                    self._place(layer, job, planes)
                stager.placed(layer)
        return self._report(jobs, stager.loaded, begin)

    def restore_dense(self, placement: Placement) -> Report:
        """The unfused way, for comparison: build the whole dense entry, in buffers that are kept,
        then rotate and scatter it."""
        begin = time.perf_counter()
        (job,), feeds = self._prepare([placement])
        count = len(job.where)
        plain = Slots.of(torch.arange(count, device=self.device), max(1, count))
        whole: list[torch.Tensor] = []
        with Stager(feeds, self.device) as stager:
            for layer in range(self._target.num_layers):
                planes = stager.take(layer)
                for plane, (master, _) in enumerate((job.k_feeds, job.v_feeds)):
                    whole.append(self._workspace(2 * layer + plane, planes[master], count))
                k, v = (plane[None] for plane in whole[-2:])
                self._run_kernel(k, v, job._replace(where=plain, turn=None), planes)
                stager.placed(layer)
        rows = plain.row
        dense = job._replace(k_source=rows, v_source=rows, k_feeds=(0, 1), v_feeds=(2, 3))
        for layer, (k, v) in enumerate(zip(whole[0::2], whole[1::2])):
            self._place(layer, dense, [k, k[:0], v, v[:0]])
        return self._report([job], stager.loaded, begin)

    def _workspace(self, number: int, like: torch.Tensor, count: int) -> torch.Tensor:
        held = self._dense.get(number)
        if held is None or held.shape[0] < count or held.shape[1:] != like.shape[1:]:
            held = self._dense[number] = like.new_empty((count, *like.shape[1:]))
        return held[:count]

    def _prepare(self, placements: Sequence[Placement]) -> Batch:
        return prepare(placements, self._rotary, self._target.page_size, self.device)

    def _report(self, jobs: Sequence[Job], loaded: int, begin: float) -> Report:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = sum(len(job.where) for job in jobs)
        written = sum(job.nbytes for job in jobs)
        return Report(rows, loaded, written, time.perf_counter() - begin, self.kernel.name)

    def _place(self, layer: int, job: Job, planes: Sequence[torch.Tensor]) -> None:
        target = self._target
        if isinstance(target, PagedPlanes):
            self._run_kernel(target.k[layer], target.v[layer], job, planes)
            return
        count = len(job.where)
        k, v = (_scratch(planes[f[0]], count) for f in (job.k_feeds, job.v_feeds))
        plain = Slots.of(torch.arange(count, device=self.device), max(1, count))
        self._run_kernel(k, v, job._replace(where=plain), planes)
        target.write(layer, job.slots, k[0], v[0])

    def _run_kernel(
        self, k: torch.Tensor, v: torch.Tensor, job: Job, planes: Sequence[torch.Tensor]
    ) -> None:
        k_rows = Rows(*(planes[i] for i in job.k_feeds))
        v_rows = Rows(*(planes[i] for i in job.v_feeds))
        if job.v_source is job.k_source:
            self.kernel.place_pair(k, v, job.where, k_rows, v_rows, job.k_source, job.turn)
        else:
            self.kernel.place_plane(k, job.where, k_rows, job.k_source, job.turn)
            self.kernel.place_plane(v, job.where, v_rows, job.v_source, None)


def _scratch(like: torch.Tensor, count: int) -> torch.Tensor:
    """One page of `count` rows."""
    return like.new_empty((1, count, *like.shape[1:]))
