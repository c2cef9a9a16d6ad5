"""Hints as a request carries them."""

from __future__ import annotations

from typing import Any

from tokendance.prompt.hints import Hints


def extra_body(
    *,
    round: str | int,
    agent: str,
    size: int,
    session: str = "",
    mode: str | None = None,
    backend: str | None = None,
    retain: str | None = None,
) -> dict[str, Any]:
    """What an `openai` client passes as `extra_body` so that a call joins its round.

        client.chat.completions.create(..., extra_body=extra_body(round=3, agent="maria", size=8))

    See `tokendance.prompt.hints.Hints` for the fields. Raises HintError for one that a server
    would refuse.
    """
    hints: dict[str, Any] = {"round": round, "agent": agent, "size": size}
    if session:
        hints["session"] = session
    if mode is not None:
        hints["mode"] = mode
    if backend is not None:
        hints["backend"] = backend
    if retain is not None:
        hints["retain"] = retain
    Hints.parse(hints)
    return {"kv_transfer_params": {"tokendance": hints}}
