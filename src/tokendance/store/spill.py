"""Entries as blobs for the tiers below, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tokendance.store.base import EntryKey, Identity, Owner
from tokendance.store.blocks import Packed, Plane
from tokendance.store.mirror import Dense, Entry, Mirror, Piece
from tokendance.store.tiers.base import Blob
from tokendance.store.tiers.memory import HostMemory
from tokendance.types import AgentId, SessionId


def to_blob(
    entry: Entry, owners: Iterable[Owner], identity: Identity, tenant: str, *, trunk: bool
) -> Blob:
    """A view of the entry: the tensors are the entry's own."""
    shared = isinstance(entry, Mirror) and entry.k_pieces is entry.v_pieces
    pieces = entry.pieces if isinstance(entry, Dense) else entry.k_pieces
    meta: dict[str, Any] = {
        "key": entry.key.hex(),
        "identity": identity.digest().hex(),
        "tenant": tenant,
        "owners": [list(owner) for owner in sorted(owners)],
        "exact_rows": entry.exact_rows,
        "layers": len(entry.k.layers),
        "dtype": str(entry.k.dtype).removeprefix("torch."),
        "pieces": [list(p) for p in pieces],
        "v_pieces": None,
        "trunk": trunk,
        "master": None,
        "nbytes": entry.nbytes,
    }
    if isinstance(entry, Mirror):
        meta["master"] = entry.master.name
        meta["v_pieces"] = None if shared else [list(p) for p in entry.v_pieces]
    tensors = {"tokens": entry.tokens}
    for label, plane in (("k", entry.k), ("v", entry.v)):
        for index, layer in enumerate(plane.layers):
            tensors[f"{label}.{index}"] = layer.values
            if layer.scales is not None:
                tensors[f"{label}s.{index}"] = layer.scales
    return Blob(entry.name, meta, tensors)


def from_blob(blob: Blob, memory: HostMemory, master: Dense | None) -> Entry:
    """Copy a blob into accounted memory. Raises KeyError or ValueError on another format."""
    meta = blob.meta
    pieces = _pieces(meta["pieces"])
    key = EntryKey(bytes.fromhex(meta["key"]))
    dtype = getattr(torch, meta["dtype"])
    k = _plane(blob.tensors, "k", meta["layers"], dtype, memory)
    v = _plane(blob.tensors, "v", meta["layers"], dtype, memory)
    tokens = memory.copy(blob.tensors["tokens"])
    exact = meta["exact_rows"]
    if master is None:
        return Dense(key, tokens, pieces, k, v, exact, blob.name)
    v_pieces = pieces if meta["v_pieces"] is None else _pieces(meta["v_pieces"])
    return Mirror(key, tokens, pieces, v_pieces, k, v, exact, master, blob.name)


def owners_of(meta: Mapping[str, Any]) -> set[Owner]:
    return {Owner(SessionId(session), AgentId(agent)) for session, agent in meta["owners"]}


def _pieces(rows: Iterable[tuple[int, int, int, int, bool]]) -> tuple[Piece, ...]:
    return tuple(Piece(*row) for row in rows)


def _plane(
    tensors: Mapping[str, torch.Tensor],
    label: str,
    layers: int,
    dtype: torch.dtype,
    memory: HostMemory,
) -> Plane:
    plane = Plane(dtype, memory)
    for index in range(layers):
        values, scales = tensors[f"{label}.{index}"], tensors.get(f"{label}s.{index}")
        plane.append(Packed(values, scales))
    return plane
