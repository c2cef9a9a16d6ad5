"""Clients of a TokenDance server: whole rounds at once, or hints for an existing OpenAI client."""

from __future__ import annotations

from tokendance.client.hints import extra_body
from tokendance.client.rounds import (
    AgentOutput,
    AsyncRoundClient,
    Reuse,
    RoundClient,
    RoundError,
    RoundResult,
)
from tokendance.prompt.separator import SEPARATOR, escape, join_pieces

__all__ = [
    "SEPARATOR",
    "AgentOutput",
    "AsyncRoundClient",
    "Reuse",
    "RoundClient",
    "RoundError",
    "RoundResult",
    "escape",
    "extra_body",
    "join_pieces",
]
