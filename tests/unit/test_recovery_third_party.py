"""A recovery backend from outside: what somebody else has to write, and that it runs.

A package offers it with an entry point in its pyproject.toml, and it is then known by name:

    [project.entry-points."tokendance.recovery"]
    outliers = "their_package:Outliers"

Code in the same process may use @register("outliers") instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution

import pytest
import tiny
import torch
from rounds import STANDARD, on_engine

from tokendance.plan.reuse_plan import Member
from tokendance.reuse.collective import run_pass
from tokendance.reuse.recovery import Check, Recovery, RecoveryError, create, names
from tokendance.types import Rows


@dataclass(frozen=True)
class Outliers(Recovery):
    """Computes the first `seam` rows of every copy in all layers, and from the check layer on those
    whose V deviates more than `times` as much as the average of their request."""

    times: float = 2.0
    seam: int = 1
    check_layer: int = 1

    def __post_init__(self) -> None:
        if self.times <= 0:
            raise RecoveryError(f"outliers: times must be positive, it is {self.times}")

    def static(self, member: Member) -> tuple[Rows, ...]:
        return tuple(Rows(c.start, min(c.start + self.seam, c.end)) for c in member.copies)

    def select(self, check: Check) -> torch.Tensor:
        rows = torch.bincount(check.member).clamp(min=1)
        average = torch.bincount(check.member, weights=check.v_deviation.double()) / rows
        return check.v_deviation > self.times * average[check.member]


class TheirPackage(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename == "entry_points.txt":
            return f"[tokendance.recovery]\noutliers = {__name__}:Outliers\n"
        return None

    def locate_file(self, path: object) -> object:  # type: ignore[override]
        raise NotImplementedError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TheirPackage().entry_points
    monkeypatch.setattr(
        "tokendance.reuse.recovery.base.entry_points", lambda **which: found.select(**which)
    )


@pytest.mark.usefixtures("installed")
def test_a_backend_of_an_installed_package_is_known_by_name() -> None:
    assert "outliers" in names()
    assert create("outliers", {"times": 3.0}) == Outliers(times=3.0)
    with pytest.raises(RecoveryError, match="times must be positive"):
        create("outliers", {"times": 0})
    with pytest.raises(RecoveryError, match="there is outliers"):
        create("outlier")


@pytest.mark.usefixtures("installed")
def test_it_runs_in_the_collective_pass() -> None:
    engine = tiny.engine("llama")
    with on_engine(engine, STANDARD, donors=True) as (plan, _):
        backend = create("outliers", {"times": 1.5, "seam": 2})
        outcome = run_pass(engine, plan, 10**6, [backend] * 4)
        for member, found in zip(plan.members, outcome.members):
            first = {r for c in member.copies for r in range(c.start, c.start + 2)}
            chosen = {r for rows in found.recomputed for r in range(*rows)}
            assert first < chosen < {r for c in member.copies for r in range(*c.rows)}
            assert found.deviation
