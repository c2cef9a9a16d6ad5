"""One frozen configuration, read from vLLM's `kv_connector_extra_config` or built in code."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class ConfigError(ValueError):
    """A configuration key or value that TokenDance does not take; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Config:
    """How rounds are formed and reused.

    mode: "auto" lets a request's K/V be approximate where the round shares text; "exact" turns
        reuse off for every request that does not ask for it.
    backend: recovery backend of the collective pass (M9), for requests that name none.
    backend_options: options of that backend.
    round_timeout_ms: how long a round that was announced by hints waits for its missing members,
        counted from its first member.
    linger_ms: how long a request that marks segments but gives no hints waits for others.
    quorum: share of a round's announced size that is enough to start, 1.0 waits for all.
    min_shared_tokens: a request reuses nothing unless at least so many of its tokens are shared.
    max_order_distance: share of segment pairs that may stand in another order than the leader's; an
        agent beyond it gets a group of its own.
    pass_tokens: most rows one engine step computes collectively; None takes the engine's
        max_num_batched_tokens.
    keep_leaders: finished leaders whose pages, as long as they stand, serve agents that come later.
    keep_donors: finished requests that serve what later prompts quote of them, with backends that
        take text from where it was written (cacheblend, legolink, naive).
    fresh_tail: last rows of a prompt that every agent computes itself, shared or not. What an agent
        says next hangs on them most; a few repair most of what reuse changes.
    discover: find shared text in prompts that nobody has marked.
    store_gib: host memory of each rank for the K/V of finished agents, in GiB; 0 keeps nothing.
    store_int8: keep it as int8 per token and head: half the bytes of bf16, and approximate.
    store_folder: a folder, or a URL of fsspec, for what does not fit; empty for none.
    store_folder_gib: most that is kept there.
    separator: the text that marks a segment boundary.
    keep_separator: text that takes the separator's place in the prompt; empty removes it.
    require_reuse: refuse to start on a model or setting where reuse is not supported, instead of
        serving on the ordinary path.
    require_gate: reuse nothing for a model that has no passed verdict of `tokendance gate` with
        this backend; requests that name another backend take the ordinary path.
    """

    mode: str = "auto"
    backend: str = "region"
    backend_options: dict[str, Any] = field(default_factory=dict)
    round_timeout_ms: float = 500.0
    linger_ms: float = 5.0
    quorum: float = 1.0
    min_shared_tokens: int = 64
    max_order_distance: float = 1.0
    pass_tokens: int | None = None
    keep_leaders: int = 64
    keep_donors: int = 256
    fresh_tail: int = 0
    discover: bool = True
    store_gib: float = 0.0
    store_int8: bool = False
    store_folder: str = ""
    store_folder_gib: float = 64.0
    separator: str = "<TTSEP>"
    keep_separator: str = ""
    require_reuse: bool = False
    require_gate: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "exact"):
            raise ConfigError(f"mode must be 'auto' or 'exact', not {self.mode!r}")
        if not self.separator:
            raise ConfigError("separator must not be empty")
        if not 0.0 < self.quorum <= 1.0:
            raise ConfigError(f"quorum must be in (0, 1], not {self.quorum}")
        if not 0.0 <= self.max_order_distance <= 1.0:
            raise ConfigError(
                f"max_order_distance must be in [0, 1], not {self.max_order_distance}"
            )
        for name in (
            *("round_timeout_ms", "linger_ms", "min_shared_tokens", "keep_leaders"),
            *("keep_donors", "fresh_tail"),
            *("store_gib", "store_folder_gib"),
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, it is {getattr(self, name)}")
        if self.pass_tokens is not None and self.pass_tokens < 1:
            raise ConfigError(f"pass_tokens must be at least 1, it is {self.pass_tokens}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build from plain data; an unknown key or a wrong type is a ConfigError that says so."""
        known = {f.name: f for f in fields(cls)}
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ConfigError(f"unknown TokenDance option {key!r}{hint}")
            _check_type(key, str(known[key].type), value)
        return cls(**values)


def _check_type(key: str, declared: str, value: Any) -> None:
    if value is None and "None" in declared:
        return
    kind = declared.split("|")[0].split("[")[0].strip()
    wanted: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
        "dict": (dict,),
    }
    if not isinstance(value, wanted[kind]) or (kind != "bool" and isinstance(value, bool)):
        raise ConfigError(f"TokenDance option {key!r} takes {declared}, not {value!r}")
