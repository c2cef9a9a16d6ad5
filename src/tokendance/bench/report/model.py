"""What a section of the report is made of, and how a result file is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Run = Mapping[str, Any]
"""The content of a result file."""

ENGINES = {
    "tokendance": ("TokenDance", "ours"),
    "tokendance-15": ("TokenDance, 15 % computed again", "c3"),
    "prefix": ("vLLM prefix caching", "c1"),
    "reordered": ("vLLM shared text first", "c2"),
    "offload": ("vLLM KV offloading", "c3"),
    "cacheblend": ("CacheBlend lock step", "c4"),
    "cacheblend-serial": ("CacheBlend one by one", "c5"),
    "exact": ("exact mode", "c6"),
}
"""Names and colours of the engines of capacity.json and fidelity.json."""


class Table(NamedTuple):
    """Cells are plain text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Glance(NamedTuple):
    """A row of the overview. holds: ours is as good as the paper's; None where they cannot be
    compared."""

    what: str
    paper: str
    ours: str
    bound: str = ""
    holds: bool | None = None


class Figure(NamedTuple):
    """paper: what the paper found. read: what to see here. lose: where we are worse than something
    in the same plot."""

    paper: str
    read: str
    lose: str
    plots: Sequence[str]
    tables: Sequence[Table] = ()
    glance: Sequence[Glance] = ()


class Spec(NamedTuple):
    """A section. files: a glob of the result files it is made of, all given to `make` in order.
    command: what makes them."""

    title: str
    files: str
    command: str
    make: Callable[[Sequence[Run]], Figure]


def load(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError if it is none."""
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise ValueError("it holds no JSON object")
    return loaded


def middle(value: Any) -> float:
    """The median of a spread, or the number itself."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def ends(value: Any) -> tuple[float | None, float | None]:
    """Smallest and largest of a spread; nothing for a number."""
    if isinstance(value, Mapping):
        return float(value["min"]), float(value["max"])
    return None, None


def ranged(value: Any, digits: int = 2) -> str:
    """`median (min-max)`."""
    low, high = ends(value)
    text = f"{middle(value):.{digits}f}"
    return text if low is None else f"{text} ({low:.{digits}f}-{high:.{digits}f})"


def maybe(value: float | None, form: str) -> str:
    """The number, or a dash."""
    return "-" if value is None else format(value, form)


def several(texts: Sequence[str], none: str, most: int = 4) -> str:
    """A sentence from findings; the rest beyond `most` is counted."""
    if not texts:
        return none
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    text = "; ".join(texts[:most]) + more
    first = text.split(" ", 1)[0]
    plain = first.isalpha() and first.islower()  # not vLLM, nor the name of a trace
    return (text[0].upper() + text[1:] if plain else text) + "."
