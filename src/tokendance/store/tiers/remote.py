"""A tier on any file system that fsspec knows: s3://, gcs://, sftp://, memory://, file:// ...

Blobs have the format of the disk tier (blobs.py). A blob is written under another key and moved, so
that where a move is atomic no half-written one is ever found, and elsewhere its size and checksums
give it away. What goes wrong on the way is a reason and deletes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs

from tokendance.store.tiers.base import Blob, Loaded, Reason
from tokendance.store.tiers.blobs import (
    DAMAGED,
    NO_ROOM,
    SUFFIX,
    decode,
    encode,
    head_size,
    meta_of_head,
)

_PARTIAL = ".partial"
_HEAD = 1 << 16  # bytes asked for first: the whole head of most blobs


class RemoteTier:
    """Blobs as objects under `url`; `capacity` bounds their bytes (None: the service does).

    options: passed to the file system, such as credentials or an endpoint. What an earlier process
    left half written is removed. One process owns a URL at a time: give every rank its own folder.
    Raises what the file system raises if the folder cannot be listed, and ImportError if fsspec
    lacks the package for this kind of URL.
    """

    def __init__(self, url: str, capacity: int | None = None, **options: Any) -> None:
        self.capacity = capacity
        self._fs, root = url_to_fs(url, **options)
        self._root = root.rstrip("/")
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.invalidate_cache(self._root)
        self._sizes: dict[str, int] = {}
        for path, info in self._fs.find(self._root, maxdepth=1, detail=True).items():
            name = path.rsplit("/", 1)[-1]
            if name.endswith(_PARTIAL):
                self._remove(path)
            elif name.endswith(SUFFIX):
                self._sizes[name.removesuffix(SUFFIX)] = int(info["size"])

    @property
    def held(self) -> int:
        return sum(self._sizes.values())

    def write(self, blob: Blob) -> Reason:
        raw = encode(blob)
        if self.capacity is not None and self.held + len(raw) > self.capacity:
            return Reason.FULL
        partial, path = f"{self._root}/{blob.name}{_PARTIAL}", self._path(blob.name)
        try:
            self._fs.pipe_file(partial, raw)
            self._fs.mv(partial, path)
        except Exception as error:  # every kind of file system raises errors of its own
            self._remove(partial)
            self._remove(path)
            return Reason.FULL if getattr(error, "errno", None) in NO_ROOM else Reason.ERROR
        self._sizes[blob.name] = len(raw)
        return Reason.OK

    def read(self, name: str) -> Loaded:
        try:
            raw = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            self._sizes.pop(name, None)
            return Loaded(None, Reason.MISSING)
        except Exception:
            return Loaded(None, Reason.ERROR)
        try:
            return Loaded(decode(name, raw))
        except DAMAGED:
            self._forget(name)
            return Loaded(None, Reason.CORRUPT)

    def delete(self, name: str) -> None:
        """Forget a blob. Raises what the file system raises; the blob counts as held then."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        self._sizes.pop(name, None)

    def catalog(self) -> dict[str, Mapping[str, Any]]:
        """name -> meta of what can be read, after two short reads of each blob at most. Damaged
        ones are deleted; what cannot be reached now is left out and stays."""
        found: dict[str, Mapping[str, Any]] = {}
        for name, size in list(self._sizes.items()):
            try:
                found[name] = meta_of_head(self._head(name, size), size)
            except DAMAGED:
                self._forget(name)
            except Exception:
                continue
        return found

    def _head(self, name: str, size: int) -> bytes:
        raw = self._first(name, min(size, _HEAD))
        if head_size(raw) > len(raw):
            raw = self._first(name, min(size, head_size(raw)))
        return raw

    def _first(self, name: str, count: int) -> bytes:
        """Services refuse to read a range of nothing."""
        raw: bytes = self._fs.cat_file(self._path(name), start=0, end=count) if count else b""
        return raw

    def _forget(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self.delete(name)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm_file(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{SUFFIX}"
