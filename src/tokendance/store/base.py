"""Words of the store: what makes K/V differ, who owns an entry, and how live K/V is read.

An *entry* is the K/V of one request, prompt and decoded tokens, of one tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple, NewType

import numpy as np
import torch
from numpy.typing import NDArray

from tokendance.reuse.base import KVAccess
from tokendance.types import AgentId, RequestId, SessionId

EntryKey = NewType("EntryKey", bytes)
"""Address of an entry: identity, tenant salt and token ids."""

Tokens = NDArray[np.int32]


class Owner(NamedTuple):
    """Whose history an entry is."""

    session: SessionId
    agent: AgentId


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything besides tokens and tenant that makes K/V differ; every rank has its own.

    rope: any text that names the rotary parameters completely, for instance their JSON.
    """

    model: str
    revision: str = ""
    dtype: str = "bfloat16"
    rope: str = ""
    adapter: str = ""
    tp_rank: int = 0
    tp_size: int = 1

    def digest(self) -> bytes:
        """16 bytes; equal digests mean interchangeable K/V."""
        text = "\x00".join(str(part) for part in astuple(self))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def entry_key(identity: Identity, salt: bytes, tokens: Tokens) -> EntryKey:
    """The key of these tokens for this model, rank and tenant (length-framed, so unambiguous)."""
    hasher = hashlib.blake2b(identity.digest(), digest_size=32, key=_salt_key(salt))
    hasher.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return EntryKey(hasher.digest())


def tenant_of(salt: bytes) -> str:
    """A name for a tenant that does not show its salt."""
    return hashlib.blake2b(salt, digest_size=16, person=b"tenant").hexdigest()


def _salt_key(salt: bytes) -> bytes:
    return salt if len(salt) <= 64 else hashlib.blake2b(salt).digest()


@dataclass(frozen=True, slots=True)
class Cache:
    """Live K/V of one request inside an engine: what the store reads from.

    token_ids: of rows [0, rows), prompt and decoded.
    slots: int64 [rows], where each row lies in `kv`; its pages must stay untouched during a put.
    exact_rows: leading rows known to be what the engine alone computes; None means all that the
        plan does not make approximate.
    salt: tenant; entries of different salts never meet.
    """

    request_id: RequestId
    owner: Owner
    token_ids: Sequence[int]
    kv: KVAccess
    slots: torch.Tensor
    exact_rows: int | None = None
    salt: bytes = b""

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `rows` (int64 [n]) of one layer, [n, kv_heads, head_dim]."""
        return self.kv.read(layer, self.slots[rows.to(self.slots.device)])


class Kept(NamedTuple):
    """What became of one request. kind: "master", "mirror", "dense", or "" with a reason."""

    request_id: RequestId
    key: EntryKey | None
    kind: str
    nbytes: int
    reason: str = ""


class Match(NamedTuple):
    """Rows [start, start + length) of a prompt hold the tokens of rows [entry_start, ...) of
    key."""

    start: int
    key: EntryKey
    entry_start: int
    length: int


class Receipt(NamedTuple):
    """What a release freed at once, and how many leased entries go when their lease ends."""

    entries: int
    nbytes: int
    deferred: int


class Stats(NamedTuple):
    """Bytes held by kind and what they would be if every entry were dense.

    A family ratio is never above its number of agents; `family_ratio` here is over all entries.
    """

    entries: int
    mirrors: int
    master_bytes: int
    mirror_bytes: int
    dense_bytes: int
    held: int
    budget: int
    dense_equivalent: int
    mirror_equivalent: int
    counters: dict[str, int]

    @property
    def family_ratio(self) -> float:
        return self.dense_equivalent / self.held if self.held else 1.0

    @property
    def mirror_ratio(self) -> float:
        return self.mirror_equivalent / self.mirror_bytes if self.mirror_bytes else 1.0


class EntryGone(RuntimeError):
    """An entry was read after the store dropped it; hold a lease while reading."""
