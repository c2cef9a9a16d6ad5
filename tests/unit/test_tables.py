"""The README's tables: made of the result files, in step with them, with the paper's values."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import report_samples

from tokendance.bench import tables

ROOT = Path(__file__).parents[2]
EMPTY = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"


def test_the_readme_is_in_step_with_the_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.insert(text, ROOT / "benchmarks/results") == text


def test_nothing_to_show_shows_nothing(tmp_path: Path) -> None:
    assert tables.insert(EMPTY, tmp_path) == f"before\n{tables.BEGIN}\n{tables.END}\nafter\n"


def test_every_file_has_its_table(tmp_path: Path) -> None:
    results = report_samples.write(tmp_path)
    for name in ("storage", "restore"):
        source = ROOT / f"benchmarks/results/{name}.json"
        (results / f"{name}.json").write_text(source.read_text())
    text = tables.insert(EMPTY, results)
    for said in (
        *("Agents in a pool", "A round at once", "How alike", "Full caches over", "Restoring"),
        *("Under memory pressure", "Greedy answers", "Recovery backends", "beside a round"),
    ):
        assert said in text
    for paper in ("2.57x", "11.2x and 17.5x", "1.3x to 2.6x", "3 of 8", "91 to 97 %", "2.7 times"):
        assert paper in text
    assert text.count("*Where we lose:*") == 7
    assert text.count("<details>") == text.count("</details>") == 1


def test_every_row_of_a_table_has_as_many_cells_as_its_head(tmp_path: Path) -> None:
    text = tables.insert(EMPTY, report_samples.write(tmp_path))
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(blocks) >= 6
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_figures_are_the_files(tmp_path: Path) -> None:
    text = tables.insert(EMPTY, report_samples.write(tmp_path))
    assert "| TokenDance | 10.5 | 10.5 | 12.30 (11.07-13.53) | 96 |" in text
    assert "| 10 | 2.72 (2.45-3.00)x | 1.58 (1.42-1.73)x | 3.17 (2.85-3.48)x | 2.57x |" in text
    assert "| TokenDance | 1 of 2 | 85% | 0.0040 | 0.970 | 90% | - |" in text


def test_check_tells_a_stale_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, results = tmp_path / "README.md", report_samples.write(tmp_path / "results")
    readme.write_text(EMPTY)
    words = ["tables", "--readme", str(readme), "--results", str(results)]
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    assert tables.main() == 1 and "out of date" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", words)
    assert tables.main() == 0
    monkeypatch.setattr(sys, "argv", [*words, "--check"])
    assert tables.main() == 0
