"""Local disk: one file per entry (blobs.py).

Crash safety is added here: write-to-temporary, fsync, rename.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokendance.store.tiers.base import Blob, Loaded, Reason
from tokendance.store.tiers.blobs import (
    DAMAGED,
    NO_ROOM,
    SUFFIX,
    check_tensors,
    checked_meta,
    header,
)

_PARTIAL = ".partial"


class DiskTier:
    """Blobs as files under `root`; `capacity` bounds their bytes (None: the disk does).

    What a crash left half written is removed at start-up. One process owns a root at a time.
    """

    def __init__(self, root: str | os.PathLike[str], capacity: int | None = None) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.capacity = capacity
        for left_over in self.root.glob(f"*{_PARTIAL}"):
            left_over.unlink()
        self._sizes = {p.stem: p.stat().st_size for p in self.root.glob(f"*{SUFFIX}")}

    @property
    def held(self) -> int:
        return sum(self._sizes.values())

    def write(self, blob: Blob) -> Reason:
        if self.capacity is not None and self.held + blob.nbytes > self.capacity:
            return Reason.FULL
        partial = self._path(blob.name).with_suffix(_PARTIAL)
        try:
            save_file(
                {name: tensor.contiguous() for name, tensor in blob.tensors.items()},
                partial,
                metadata=header(blob),
            )
            _sync(partial)
            os.replace(partial, self._path(blob.name))
            _sync(self.root)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            return Reason.FULL if _is_no_room(error) else Reason.ERROR
        self._sizes[blob.name] = self._path(blob.name).stat().st_size
        return Reason.OK

    def read(self, name: str) -> Loaded:
        path = self._path(name)
        if not path.exists():
            return Loaded(None, Reason.MISSING)
        try:
            with safe_open(path, framework="pt") as file:
                meta = checked_meta(file.metadata())
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            check_tensors(meta["sums"], tensors)
        except OSError:
            return Loaded(None, Reason.ERROR)
        except DAMAGED:
            self.delete(name)
            return Loaded(None, Reason.CORRUPT)
        return Loaded(Blob(name, meta["meta"], tensors))

    def delete(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._path(name).unlink(missing_ok=True)

    def catalog(self) -> dict[str, Mapping[str, Any]]:
        found = {}
        for name in list(self._sizes):
            try:
                with safe_open(self._path(name), framework="pt") as file:
                    found[name] = checked_meta(file.metadata())["meta"]
            except (OSError, *DAMAGED):
                self.delete(name)
        return found

    def _path(self, name: str) -> Path:
        return self.root / f"{name}{SUFFIX}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_no_room(error: Exception) -> bool:
    """safetensors reports the errno of a failed write only in its text."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    return any(f"os error {code}" in str(error) for code in NO_ROOM)
