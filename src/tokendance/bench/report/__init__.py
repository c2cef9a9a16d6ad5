"""All results as one page: the paper's figures drawn again, its values beside ours.

`build` makes it of the JSON files that are there. A file that is missing, or of another form, costs
its section and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import StatisticsError

from tokendance.bench.report.figures import SPECS
from tokendance.bench.report.model import Figure, Spec, load
from tokendance.bench.report.page import Section, page, sources

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, StatisticsError, StopIteration)
"""What a file that is cut, empty or of another version raises where it is read."""


def build(results: Path, failed: Mapping[str, str] | None = None) -> str:
    """The page of the folder's results. failed: commands that have just failed, and how."""
    sections = [_section(spec, results, failed or {}) for spec in SPECS]
    return page(sections, sources(sorted(results.glob("*.json"))))


def _section(spec: Spec, results: Path, failed: Mapping[str, str]) -> Section:
    paths = sorted(results.glob(spec.files))
    command = f"tokendance bench {spec.command}" if spec.command else "tokendance demo --out"
    name = spec.command.partition(" ")[0]
    if name in failed:
        return Section(spec.title, note=f"`{command}` failed: {failed[name]}")
    if not paths:
        return Section(spec.title, note=f"There is no {spec.files} yet; `{command}` makes it.")
    try:
        figure: Figure = spec.make([load(path) for path in paths])
    except UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        note = f"{spec.files} is not what this version writes ({why}); `{command}` makes it anew."
        return Section(spec.title, note=note)
    return Section(spec.title, figure, files=", ".join(path.name for path in paths))
