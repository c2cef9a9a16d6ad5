"""What a client may say about a request: `kv_transfer_params["tokendance"]`, all of it optional."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MODES = ("auto", "exact")
RETAIN = ("pin", "release")
MAX_NAME = 256
MAX_SIZE = 65536


class HintError(ValueError):
    """A hint that is not understood; `field` names it, `value` is what was sent."""

    def __init__(self, field: str, message: str, value: Any = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.value = value


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request.

    session: rounds of one session follow one another and keep their leader.
    round: requests of a session with the same round belong together.
    agent: who asks; a stable name from round to round.
    size: members of the round, so that it can start as soon as they are there.
    mode: "exact" never takes another request's K/V, "auto" may; None leaves it to the server.
    segments: lengths of the prompt's segments in tokens, for prompts given as token ids.
    backend: recovery backend (M9); None leaves it to the server.
    retain: what becomes of the session's entries in the server's store. "pin" keeps them in memory,
        "release" forgets them as soon as this request has ended; None leaves it to the budget.
    """

    session: str | None = None
    round: str | None = None
    agent: str | None = None
    size: int | None = None
    mode: str | None = None
    segments: tuple[int, ...] | None = None
    backend: str | None = None
    retain: str | None = None

    @classmethod
    def parse(cls, value: Any) -> Hints:
        """Check the object a client sent. Raises HintError with the name of the bad field."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise HintError("tokendance", f"takes an object, not {_kind(value)}", value)
        known = [f.name for f in fields(cls)]
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {known}"
                raise HintError(str(key), f"unknown hint, {hint}", value[key])
        return cls(
            session=_name("session", value),
            round=_name("round", value, number=True),
            agent=_name("agent", value, number=True),
            size=_size(value),
            mode=_one_of(MODES, "mode", value),
            segments=_segments(value),
            backend=_name("backend", value),
            retain=_one_of(RETAIN, "retain", value),
        )


def _name(field: str, hints: Mapping[str, Any], number: bool = False) -> str | None:
    value = hints.get(field)
    if value is None:
        return None
    if number and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    allowed = "a string or an integer" if number else "a string"
    if not isinstance(value, str):
        raise HintError(field, f"takes {allowed}, not {_kind(value)}", value)
    if not 0 < len(value) <= MAX_NAME:
        raise HintError(field, f"takes 1 to {MAX_NAME} characters, not {len(value)}")
    return value


def _size(hints: Mapping[str, Any]) -> int | None:
    value = hints.get("size")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise HintError("size", f"takes an integer, not {_kind(value)}", value)
    if not 1 <= value <= MAX_SIZE:
        raise HintError("size", f"takes 1 to {MAX_SIZE}, not {value}", value)
    return value


def _one_of(choices: tuple[str, ...], field: str, hints: Mapping[str, Any]) -> str | None:
    value = hints.get(field)
    if value is not None and value not in choices:
        raise HintError(field, f"takes {' or '.join(map(repr, choices))}, not {value!r}", value)
    return value


def _segments(hints: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = hints.get("segments")
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise HintError("segments", f"takes a list of lengths, not {_kind(value)}", value)
    for length in value:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise HintError("segments", f"takes lengths of at least 1, not {length!r}", length)
    return tuple(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), f"{value!r}")
