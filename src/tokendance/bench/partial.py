"""What a long measurement has finished so far, kept beside its result so that it can go on there.

Two files: `NAME.partial` with one line of JSON per finished piece of work, each with its "key", and
`NAME.settings`. Both go when the result is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OtherSettings(ValueError):
    """The partial file belongs to a run with other settings."""


def open_partial(out: Path, settings: Mapping[str, Any], resume: bool) -> Path:
    """The file of finished lines of the result `out`; emptied unless it is to be resumed.

    Raises OtherSettings if it was made with other settings.
    """
    partial, beside = out.with_suffix(".partial"), out.with_suffix(".settings")
    out.parent.mkdir(parents=True, exist_ok=True)
    if resume and partial.exists() and beside.exists():
        if json.loads(beside.read_text()) != settings:
            raise OtherSettings(f"{partial} was made with other settings; run without --resume")
        return partial
    partial.unlink(missing_ok=True)
    beside.write_text(json.dumps(settings))
    return partial


def close_partial(partial: Path) -> None:
    """Remove what `open_partial` has made."""
    partial.unlink(missing_ok=True)
    partial.with_suffix(".settings").unlink()


def read_lines(partial: Path) -> list[dict[str, Any]]:
    """The complete lines of a partial file; one that was cut off is left out."""
    if not partial.exists():
        return []
    text = partial.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def append_line(partial: Path, line: Mapping[str, Any]) -> None:
    """Add a line; an interruption leaves the file with it or without it."""
    lines = [*read_lines(partial), line]
    scratch = partial.with_name(partial.name + ".new")
    scratch.write_text("".join(json.dumps(item) + "\n" for item in lines), encoding="utf-8")
    os.replace(scratch, partial)
