"""What lies below host memory, and the queue in front of it.

A tier is slow, may be full and may fail; serving must not notice. So every answer is an outcome
with a reason, never an exception; the bytes in flight are bounded; and a tier that keeps failing is
left alone for a while. A remote store is an adapter with these four methods.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch


class Reason(StrEnum):
    """Why a tier did not do what it was asked; OK if it did."""

    OK = ""
    BUSY = "busy"  # too many bytes in flight
    SLOW = "slow"  # not done before the deadline; it may still be done later
    FULL = "full"  # no room on the medium
    CORRUPT = "corrupt"  # checksum or format
    MISSING = "missing"
    PAUSED = "paused"  # it failed several times in a row
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Blob:
    """One stored entry: named tensors and JSON data about them."""

    name: str
    meta: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Loaded(NamedTuple):
    """A blob, or the reason why there is none."""

    blob: Blob | None
    reason: Reason = Reason.OK


class Tier(Protocol):
    """Storage of blobs by name. Called from one worker thread at a time; may block.

    capacity: bytes it may hold, None if it does not know; the store deletes old blobs in time.
    """

    capacity: int | None

    def write(self, blob: Blob) -> Reason:
        """Store a blob durably; after anything but OK no part of it can be read."""
        ...

    def read(self, name: str) -> Loaded:
        """The blob, verified, in new tensors."""
        ...

    def delete(self, name: str) -> None:
        """Forget a blob; unknown names are no error."""
        ...

    def catalog(self) -> dict[str, Mapping[str, Any]]:
        """name -> meta of everything that can be read."""
        ...


class TierQueue:
    """Runs a tier on a thread of its own.

    max_inflight: bytes that may wait or be on their way; what would exceed it is refused as BUSY,
        except when nothing else is in flight.
    patience: failures in a row after which the tier is PAUSED for `pause_s` seconds.
    """

    def __init__(
        self, tier: Tier, *, max_inflight: int = 1 << 30, patience: int = 3, pause_s: float = 30.0
    ) -> None:
        self.tier = tier
        self.inflight = 0
        self._max_inflight = max_inflight
        self._patience = patience
        self._pause_s = pause_s
        self._failures = 0
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokendance-tier")

    def write(self, blobs: list[Blob], done: Callable[[list[Reason]], None]) -> Reason:
        """Store a batch in order. done(reason per blob) is called on the tier's thread unless this
        returns a reason."""
        nbytes = sum(blob.nbytes for blob in blobs)
        reason = self._admit(nbytes)
        if reason is Reason.OK:
            self._pool.submit(self._run, nbytes, lambda: [self._write(b) for b in blobs], done)
        return reason

    def read(self, names: list[str], nbytes: int, done: Callable[[list[Loaded]], None]) -> Reason:
        """Load a batch of about `nbytes` in order; like `write`."""
        reason = self._admit(nbytes)
        if reason is Reason.OK:
            self._pool.submit(self._run, nbytes, lambda: [self._read(n) for n in names], done)
        return reason

    def delete(self, names: list[str]) -> None:
        """Forget blobs, after everything that was asked before."""
        self._pool.submit(self._delete, names)

    def flush(self, timeout: float | None = None) -> Reason:
        """Wait until everything asked so far is done."""
        barrier: Future[None] = self._pool.submit(lambda: None)
        try:
            barrier.result(timeout)
        except FutureTimeout:
            return Reason.SLOW
        return Reason.OK

    def close(self) -> None:
        """Finish what is in flight and stop the thread."""
        self._pool.shutdown(wait=True)

    def _admit(self, nbytes: int) -> Reason:
        with self._lock:
            if time.monotonic() < self._paused_until:
                return Reason.PAUSED
            if self.inflight and self.inflight + nbytes > self._max_inflight:
                return Reason.BUSY
            self.inflight += nbytes
            return Reason.OK

    def _run(self, nbytes: int, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            done(work())
        finally:
            with self._lock:
                self.inflight -= nbytes

    def _write(self, blob: Blob) -> Reason:
        try:
            reason = self.tier.write(blob)
        except Exception:
            reason = Reason.ERROR
        self._note(reason)
        return reason

    def _read(self, name: str) -> Loaded:
        try:
            loaded = self.tier.read(name)
        except Exception:
            loaded = Loaded(None, Reason.ERROR)
        self._note(loaded.reason)
        return loaded

    def _delete(self, names: list[str]) -> None:
        for name in names:
            try:
                self.tier.delete(name)
            except Exception:
                self._note(Reason.ERROR)

    def _note(self, reason: Reason) -> None:
        """Count failures of the tier itself: a missing or corrupt blob is the blob's, and a full
        medium is made room on."""
        with self._lock:
            if reason is not Reason.ERROR:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._patience:
                self._failures = 0
                self._paused_until = time.monotonic() + self._pause_s
