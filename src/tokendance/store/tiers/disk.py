"""Local disk: one safetensors file per entry.

safetensors is what model weights are kept in: no pickle, a bounded JSON header, tensors of every
dtype we store and a reader that checks sizes. It has no checksum and no crash safety, so both are
added here: a CRC-32 over each tensor with its dtype and shape and one over the metadata, and
write-to-temporary, fsync, rename. A database (lmdb, SQLite) would have to be told the largest size,
or copy every blob once more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokendance.store.tiers.base import Blob, Loaded, Reason

_FORMAT = "tokendance-kv/1"
_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        self._sizes = {p.stem: p.stat().st_size for p in self.root.glob(f"*{_SUFFIX}")}

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
                metadata=_header(blob),
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
                meta = _checked_meta(file.metadata())
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            _check_tensors(meta["sums"], tensors)
        except OSError:
            return Loaded(None, Reason.ERROR)
        except (SafetensorError, ValueError, KeyError, TypeError):
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
                    found[name] = _checked_meta(file.metadata())["meta"]
            except (OSError, SafetensorError, ValueError, KeyError, TypeError):
                self.delete(name)
        return found

    def _path(self, name: str) -> Path:
        return self.root / f"{name}{_SUFFIX}"


def _sum(name: str, tensor: torch.Tensor) -> int:
    label = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
    flat = tensor.contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy(), zlib.crc32(label))


def _header(blob: Blob) -> dict[str, str]:
    sums = {name: _sum(name, tensor) for name, tensor in blob.tensors.items()}
    body = json.dumps({"meta": dict(blob.meta), "sums": sums}, sort_keys=True)
    return {"format": _FORMAT, "body": body, "sum": str(zlib.crc32(body.encode()))}


def _checked_meta(header: dict[str, str] | None) -> dict[str, Any]:
    """Raises ValueError or KeyError on anything that was not written by `_header`."""
    if header is None or header["format"] != _FORMAT:
        raise ValueError("not one of our files")
    if zlib.crc32(header["body"].encode()) != int(header["sum"]):
        raise ValueError("the metadata does not match its checksum")
    body = json.loads(header["body"])
    return {"meta": body["meta"], "sums": body["sums"]}


def _check_tensors(sums: dict[str, int], tensors: dict[str, torch.Tensor]) -> None:
    if sums != {name: _sum(name, tensor) for name, tensor in tensors.items()}:
        raise ValueError("a tensor does not match its checksum")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_no_room(error: Exception) -> bool:
    """safetensors reports the errno of a failed write only in its text."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return any(f"os error {code}" in str(error) for code in _NO_ROOM)
