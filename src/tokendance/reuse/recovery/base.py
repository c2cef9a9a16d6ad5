"""The adapter behind which every recovery method stands (M9).

A plan says which rows take K/V from elsewhere. A backend says which of those are computed all the
same, and sees nothing but rows and K/V. It has two places to do so:

    before the pass    static(member): rows chosen by position alone
    at a check layer   select(check): rows chosen by looking at fresh and copied K/V of the whole
                       group, once; from that layer on only they are computed

Rows that a member copies *exactly* are what computing would give; a check never shows them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, TypeVar

import torch

from tokendance.plan.reuse_plan import Copy, Member, ReusePlan
from tokendance.reuse.deviation import squared_distance
from tokendance.types import Rows, subtract_rows

ENTRY_POINTS = "tokendance.recovery"
"""Entry point group in which an installed package offers backends of its own, by name."""


class RecoveryError(ValueError):
    """A backend's name or options that do not hold; the text says what does."""


@dataclass(frozen=True)
class Check:
    """The copied, not exact, rows of a group at the check layer.

    Rows stand in the order of members and positions.
    member: int64 [rows], index into the plan's members. position: int64 [rows], in the member's
    prompt. piece, offset: int64 [rows], which copied piece the row is of, and its place in it.
    fresh_k, fresh_v: computed in the member's own context. cached_k, cached_v: copied, K rotated to
    `position`. All [rows, kv_heads, head_dim]; under tensor parallelism this rank's heads.
    across_ranks: sums a float32 [rows] tensor over the tensor-parallel ranks.
    """

    member: torch.Tensor
    position: torch.Tensor
    piece: torch.Tensor
    offset: torch.Tensor
    fresh_k: torch.Tensor
    fresh_v: torch.Tensor
    cached_k: torch.Tensor
    cached_v: torch.Tensor
    across_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda values: values

    @cached_property
    def k_deviation(self) -> torch.Tensor:
        """float32 [rows], squared distance of fresh and copied K over all heads of all ranks."""
        return self.across_ranks(squared_distance(self.fresh_k, self.cached_k))

    @cached_property
    def v_deviation(self) -> torch.Tensor:
        """As k_deviation, of V."""
        return self.across_ranks(squared_distance(self.fresh_v, self.cached_v))

    def part(self, rows: torch.Tensor) -> Check:
        """The check of a subset of the rows (bool [rows])."""
        names = (f.name for f in fields(self) if f.name != "across_ranks")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


class Recovery:
    """A recovery method. Subclasses are frozen dataclasses whose fields are their options.

    check_layer: the layer at which `select` is asked, None for methods without one. Layers below
        it run on all rows. Layer 0 tells nothing: its K and V depend on the token and, for K, the
        position only, so a rotated copy never deviates there.
    donors: the planner should take a segment's K/V from where it was written (its author's decode,
        an earlier round) instead of from one member that computes it for all. The pass does the
        same in both cases.
    """

    check_layer: int | None = None
    donors: bool = False

    def static(self, member: Member) -> tuple[Rows, ...]:
        """Rows of the member's copies that are computed in every layer; sorted. A pure function."""
        return ()

    def select(self, check: Check) -> torch.Tensor:
        """bool [rows]: the rows that are computed from the check layer on.

        Under tensor parallelism the answer has to be the same on all ranks: base it on the check's
        deviations and positions.
        """
        return torch.zeros_like(check.member, dtype=torch.bool)


_BACKENDS: dict[str, type[Recovery]] = {}

_Class = TypeVar("_Class", bound=type[Recovery])


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a backend known under `name`. A name that is taken is an error."""

    def add(backend: _Class) -> _Class:
        if not is_dataclass(backend):
            raise RecoveryError(f"backend {name!r} has to be a dataclass of its options")
        if _BACKENDS.setdefault(name, backend) is not backend:
            raise RecoveryError(f"a recovery backend named {name!r} exists already")
        return backend

    return add


def names() -> list[str]:
    """The known backends, including those that installed packages offer."""
    return sorted({*_BACKENDS, *(e.name for e in entry_points(group=ENTRY_POINTS))})


def create(name: str, options: Mapping[str, Any] | None = None) -> Recovery:
    """The backend `name` with its options; RecoveryError if either does not hold."""
    backend = _BACKENDS.get(name)
    if backend is None:
        found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
        if found is None:
            raise RecoveryError(f"unknown recovery backend {name!r}{_near(name, names())}")
        backend = found.load()
    known = [f.name for f in fields(backend)]  # type: ignore[arg-type]
    for key in options or {}:
        if key not in known:
            raise RecoveryError(f"backend {name!r} has no option {key!r}{_near(key, known)}")
    try:
        return backend(**(options or {}))
    except TypeError as error:
        raise RecoveryError(f"backend {name!r}: {error}") from error


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3) or known
    return f"; there is {', '.join(near)}" if near else ""


def with_static(plan: ReusePlan, recoveries: Sequence[Recovery]) -> ReusePlan:
    """The plan in which the rows that the members' backends choose by position are computed."""
    members = tuple(
        replace(m, copies=without(m.copies, r.static(m))) for m, r in zip(plan.members, recoveries)
    )
    return replace(plan, members=members)


def without(copies: Sequence[Copy], rows: Sequence[Rows]) -> tuple[Copy, ...]:
    """What is left of the copies outside `rows` (sorted)."""
    return tuple(
        copy._replace(
            source_start=copy.source_start + left.start - copy.start,
            start=left.start,
            length=len(left),
        )
        for copy in copies
        for left in subtract_rows(copy.rows, rows)
    )


def common_check_layer(recoveries: Sequence[Recovery], num_layers: int) -> int | None:
    """The one check layer of a group; RecoveryError if members want several or one too deep."""
    layers = sorted({r.check_layer for r in recoveries if r.check_layer is not None})
    if len(layers) > 1:
        raise RecoveryError(f"one group cannot check at layers {layers}: make a group of each")
    if layers and not 0 <= layers[0] < num_layers:
        raise RecoveryError(f"check layer {layers[0]}: the model has layers 0 to {num_layers - 1}")
    return layers[0] if layers else None
