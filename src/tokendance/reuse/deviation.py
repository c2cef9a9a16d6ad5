"""How far copied K/V is from what computing gives, and which rows are worth computing (M7, M10)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def squared_distance(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """float32 [rows]: squared L2 distance per row of two [rows, kv_heads, head_dim] tensors.

    A sum over heads, so the parts of tensor-parallel ranks add up to the whole.
    """
    return (fresh.float() - cached.float()).square().sum((1, 2))


def totals(values: torch.Tensor, member: torch.Tensor, members: int) -> list[float]:
    """The sum of `values` (float32 [rows]) of each member; member: int64 [rows]."""
    sums = torch.bincount(member, weights=values.double(), minlength=members)
    return [float(value) for value in sums.tolist()]


def least(deviations: Sequence[float | None]) -> int | None:
    """Index of the smallest deviation, the first of equals; None counts as unknown (M10)."""
    known = [(value, index) for index, value in enumerate(deviations) if value is not None]
    return min(known)[1] if known else None


def most_deviating(
    deviation: torch.Tensor, member: torch.Tensor, unit: torch.Tensor, ratio: float
) -> torch.Tensor:
    """bool [rows]: for each member the units that deviate most, until `ratio` of its rows are in.

    deviation: float32 [rows]. member, unit: int64 [rows], rows of a unit stand together and are one
    member's; units count from 0. A unit is taken whole, so up to a unit less one row more than
    the ratio may be taken. All members are ranked in one go; ties go to the earlier unit.
    """
    if not deviation.numel():
        return torch.zeros_like(deviation, dtype=torch.bool)
    size = torch.bincount(unit)
    mean = torch.bincount(unit, weights=deviation.double()) / size
    owner = torch.zeros_like(size).scatter_(0, unit, member)
    order = mean.argsort(descending=True, stable=True)
    order = order[owner[order].argsort(stable=True)]
    rows = torch.bincount(member)
    before = size[order].cumsum(0) - size[order] - (rows.cumsum(0) - rows)[owner[order]]
    budget = (rows.double() * ratio - 1e-9).ceil()
    taken = torch.zeros_like(size, dtype=torch.bool)
    taken[order] = before < budget[owner[order]]
    return taken[unit]
