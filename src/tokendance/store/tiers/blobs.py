"""What a stored blob looks like, on disk and far away.

safetensors is what model weights are kept in: no pickle, a bounded JSON header, tensors of every
dtype we store and a reader that checks sizes. It has no checksum, so a CRC-32 over each tensor with
its dtype and shape and one over the metadata are added. A database (lmdb, SQLite) would have to be
told the largest size, or copy every blob once more.
"""

from __future__ import annotations

import errno
import json
import zlib
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tokendance.store.tiers.base import Blob

SUFFIX = ".safetensors"
_FORMAT = "tokendance-kv/1"
_LENGTH = 8  # bytes of the number that a file begins with: the size of its JSON header
_MOST_HEADER = 100_000_000  # safetensors' own bound

DAMAGED = (SafetensorError, ValueError, KeyError, TypeError)
"""What reading a file raises that is cut, changed or none of ours."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def header(blob: Blob) -> dict[str, str]:
    """The metadata of a file: the blob's own and all checksums."""
    sums = {name: _sum(name, tensor) for name, tensor in blob.tensors.items()}
    body = json.dumps({"meta": dict(blob.meta), "sums": sums}, sort_keys=True)
    return {"format": _FORMAT, "body": body, "sum": str(zlib.crc32(body.encode()))}


def checked_meta(found: dict[str, str] | None) -> dict[str, Any]:
    """ "meta" and "sums" of a file's metadata. Raises ValueError or KeyError on anything that was
    not written by `header`."""
    if found is None or found["format"] != _FORMAT:
        raise ValueError("not one of our files")
    if zlib.crc32(found["body"].encode()) != int(found["sum"]):
        raise ValueError("the metadata does not match its checksum")
    body = json.loads(found["body"])
    return {"meta": body["meta"], "sums": body["sums"]}


def check_tensors(sums: dict[str, int], tensors: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless these are the tensors that were summed."""
    if sums != {name: _sum(name, tensor) for name, tensor in tensors.items()}:
        raise ValueError("a tensor does not match its checksum")


def encode(blob: Blob) -> bytes:
    """A whole file."""
    tensors = {name: tensor.contiguous() for name, tensor in blob.tensors.items()}
    return save(tensors, metadata=header(blob))


def decode(name: str, raw: bytes) -> Blob:
    """The blob of a whole file, verified. Raises one of DAMAGED."""
    found = checked_meta(_json(raw)["__metadata__"])
    tensors = load(raw)
    check_tensors(found["sums"], tensors)
    return Blob(name, found["meta"], tensors)


def head_size(raw: bytes) -> int:
    """Bytes before the tensors, of a file that begins with `raw`. Raises ValueError."""
    length = int.from_bytes(raw[:_LENGTH], "little")
    if len(raw) < _LENGTH or length > _MOST_HEADER:
        raise ValueError("there is no header")
    return _LENGTH + length


def meta_of_head(raw: bytes, size: int) -> dict[str, Any]:
    """The blob's own metadata, of the head of a file of `size` bytes. Raises one of DAMAGED."""
    fields = _json(raw)
    meta: dict[str, Any] = checked_meta(fields.pop("__metadata__"))["meta"]
    end = max((field["data_offsets"][1] for field in fields.values()), default=0)
    if head_size(raw) + end != size:
        raise ValueError("the file is cut or has a tail")
    return meta


def _json(raw: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(raw[_LENGTH : head_size(raw)])
    return fields


def _sum(name: str, tensor: torch.Tensor) -> int:
    label = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
    flat = tensor.contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy(), zlib.crc32(label))
