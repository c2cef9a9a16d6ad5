"""Many rounds, a small budget: nothing grows and nothing comes back wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokendance.bench.churn import churn, growth

BUDGET = 150_000


def test_sizes_stay_flat_while_everything_comes_and_goes(tmp_path: Path) -> None:
    tally = churn(240, tmp_path, budget=BUDGET, samples=24)
    assert tally.wrong == 0 and tally.checked > 500
    # The churn really evicts, trims, promotes, spills and loads; else it would show nothing.
    for event in ("evicted", "trimmed", "promoted", "spilled", "loaded"):
        assert tally.counters.get(event, 0) > 0, (event, tally.counters)
    assert all(sample.held <= BUDGET for sample in tally.samples)
    assert all(sample.disk <= 3.2 * BUDGET for sample in tally.samples)
    assert growth([sample.tables for sample in tally.samples]) < 1.4


def test_growth_tells_flat_from_rising() -> None:
    assert growth([5] * 20) == pytest.approx(1.0)
    assert growth(list(range(1, 21))) > 1.8
    assert growth([1, 9, 3, 8, 2, 9]) == pytest.approx(1.0)
