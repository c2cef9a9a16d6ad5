"""Segments: a prompt cut at its boundaries, each piece addressed by its own content (M2)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from tokendance.types import SegmentKey, Span

KEY_BYTES = 32


class SegmentError(ValueError):
    """Boundaries that do not fit the prompt."""


class SegmentKeys:
    """Makes the keys of one model and one tenant.

    model: everything that makes the K/V of equal token ids differ: weights and revision, dtype,
        RoPE parameters, adapter, parallel layout. Any text that is equal exactly if they are.
    salt: the tenant's salt; segments are only found by requests with the same salt.

    Equal keys mean equal segments with overwhelming probability; whoever takes K/V because of an
    equal key confirms it on the token ids.
    """

    def __init__(self, model: str, salt: str = "") -> None:
        self._secret = _secret(model, salt)

    def key(self, token_ids: Sequence[int]) -> SegmentKey:
        """The content address of `token_ids`, KEY_BYTES long."""
        data = array("q", token_ids).tobytes()
        digest = hashlib.blake2b(data, key=self._secret, digest_size=KEY_BYTES).digest()
        return SegmentKey(digest)

    def spans(self, token_ids: Sequence[int], lengths: Sequence[int]) -> tuple[Span, ...]:
        """Cut a prompt into segments of the given lengths, which must add up to its length.

        Segments of length 0 are left out. Raises SegmentError.
        """
        return tuple(
            Span(start, end, self.key(token_ids[start:end]))
            for start, end in pairwise(boundaries(lengths, len(token_ids)))
            if start < end
        )


@lru_cache(maxsize=1024)
def _secret(model: str, salt: str) -> bytes:
    state = hashlib.blake2b(digest_size=hashlib.blake2b.MAX_KEY_SIZE)
    for part in (model.encode(), salt.encode()):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def boundaries(lengths: Iterable[int], total: int) -> list[int]:
    """Lengths as positions, from 0 to `total`; raises SegmentError if they do not add up."""
    positions = [0]
    for length in lengths:
        if length < 0:
            raise SegmentError(f"a segment cannot have {length} tokens")
        positions.append(positions[-1] + length)
    if positions[-1] != total:
        raise SegmentError(
            f"segments have {positions[-1]} tokens in all, but the prompt has {total}"
        )
    return positions


def lengths_of(cuts: Iterable[int], total: int) -> tuple[int, ...]:
    """Lengths of the segments between `cuts`; cuts outside (0, total) and repeated ones vanish."""
    if total == 0:
        return ()
    inner = sorted({cut for cut in cuts if 0 < cut < total})
    return tuple(end - start for start, end in pairwise([0, *inner, total]))


def clip_lengths(lengths: Sequence[int], kept: int, *, left: bool) -> tuple[int, ...]:
    """Lengths after truncation to `kept` tokens; `left` says that the front was cut off."""
    total = sum(lengths)
    shift = total - kept if left else 0
    positions = boundaries(lengths, total)
    return lengths_of((position - shift for position in positions), kept)
