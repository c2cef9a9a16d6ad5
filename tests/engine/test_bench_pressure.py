"""`tokendance bench pressure` from end to end, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokendance.cli import main

pytestmark = pytest.mark.engine


def test_what_comes_back_is_not_computed(tiny_model: Callable[[], Path], tmp_path: Path) -> None:
    out = tmp_path / "pressure.json"
    assert (
        main(["bench", "pressure", "--quick", "--model", str(tiny_model()), "--out", str(out)]) == 0
    )
    run = json.loads(out.read_text())
    rows = {(row["mode"], row["round"]): row for row in run["rows"]}
    assert rows["restore", 0]["rows_stored"] == 0
    # Three agents whose histories do not fit at once: of 150 own tokens and more all come back.
    assert rows["restore", 1]["rows_stored"] > 3 * 150
    assert rows["restore", 1]["rows_computed"] * 3 < rows["recompute", 1]["rows_computed"]
    assert rows["plain", 1]["kl_max"] == 0
    assert run["round_ratio"]["median"] > 0
