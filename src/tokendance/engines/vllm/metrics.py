"""What ran and what is stored: in vLLM's log line and at /metrics (Prometheus).

Every counter is counted where the thing happens: rows, passes and failures on the worker (rank 0
counts, the others do the same work), requests and declined reuse on the scheduler side.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tokendance.engines.vllm.messages import Ran
from tokendance.plan.reuse_plan import ReusePlan
from tokendance.restore.pipeline import Report as Restored
from tokendance.reuse.collective import PassOutcome
from tokendance.store.base import Stats
from tokendance.types import RequestId


class Counter(NamedTuple):
    """name: as in Prometheus; label: name of its one label, "" for none. gauge: a value that is
    set, not a count that grows."""

    name: str
    label: str
    text: str
    gauge: bool = False


ROWS = Counter(
    "tokendance:rows_total",
    "source",
    "Prompt rows of requests that went through a collective pass, by where their K/V came from.",
)
REQUESTS = Counter(
    "tokendance:requests_total",
    "outcome",
    "Requests that belonged to a round, by what became of it.",
)
DECLINED = Counter(
    "tokendance:declined_total", "reason", "Requests of a round that reused nothing, by reason."
)
PASSES = Counter("tokendance:passes_total", "", "Collective passes that ran.")
PASS_SECONDS = Counter(
    "tokendance:pass_seconds_total", "", "Wall seconds spent in collective passes."
)
FAILURES = Counter(
    "tokendance:pass_failures_total", "cause", "Collective passes that failed and were degraded."
)
SAVED = Counter(
    "tokendance:saved_total", "kind", "Finished requests stored, by kind, or refused, by reason."
)
SAVE_SECONDS = Counter("tokendance:save_seconds_total", "", "Wall seconds spent in storing.")
RESTORED_ROWS = Counter("tokendance:restored_rows_total", "", "Rows brought back from the store.")
RESTORE_BYTES = Counter(
    "tokendance:restore_bytes_total",
    "what",
    "Bytes that restores loaded from the store and wrote into pages.",
)
RESTORE_SECONDS = Counter("tokendance:restore_seconds_total", "", "Wall seconds of restores.")
STORE_BYTES = Counter(
    "tokendance:store_bytes", "kind", "Bytes that the store of rank 0 holds, by kind.", gauge=True
)
STORE_ENTRIES = Counter(
    "tokendance:store_entries", "kind", "Entries that the store of rank 0 holds.", gauge=True
)
STORE_RATIO = Counter(
    "tokendance:store_ratio",
    "of",
    "Bytes of all entries, and of the mirrors alone, if dense, over what they take.",
    gauge=True,
)
COPY_SPEED = Counter(
    "tokendance:copy_bytes_per_second",
    "",
    "What a plain copy from host memory reaches here, measured at start-up.",
    gauge=True,
)
COUNTERS = (
    *(ROWS, REQUESTS, DECLINED, PASSES, PASS_SECONDS, FAILURES),
    *(SAVED, SAVE_SECONDS, RESTORED_ROWS, RESTORE_BYTES, RESTORE_SECONDS),
    *(STORE_BYTES, STORE_ENTRIES, STORE_RATIO, COPY_SPEED),
)
_GAUGES = frozenset(counter.name for counter in COUNTERS if counter.gauge)

_COPIED = 64 << 20
"""Bytes of the copy that is measured: more than a CPU's caches hold."""


class TokenDanceStats(KVConnectorStats):
    """Increments of counters and values of gauges in one step: data[name][label value]."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def add(self, counter: Counter, value: float = 1, label: str = "") -> None:
        values = self.data.setdefault(counter.name, {})
        values[label] = value + (0 if counter.gauge else values.get(label, 0))

    def aggregate(self, other: KVConnectorStats) -> TokenDanceStats:
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, value in values.items():
                mine[label] = value + (0 if name in _GAUGES else mine.get(label, 0))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"{name.removeprefix('tokendance:')}{f'[{label}]' if label else ''}": value
            for name, values in self.data.items()
            for label, value in values.items()
        }

    def observe_pass(
        self, plan: ReusePlan, ran: Mapping[RequestId, Ran], outcome: PassOutcome, seconds: float
    ) -> None:
        self.add(PASSES, outcome.forwards)
        self.add(PASS_SECONDS, seconds)
        for member in plan.members:
            done = ran[member.request_id]
            rows = member.rows_by_source(done.recomputed, done.lost)
            for source, count in rows.items():
                if count:
                    self.add(ROWS, count, source.value)

    def observe_save(self, seconds: float, store: Stats) -> None:
        self.add(SAVE_SECONDS, seconds)
        self.add(STORE_BYTES, store.master_bytes, "master")
        self.add(STORE_BYTES, store.mirror_bytes, "mirror")
        self.add(STORE_BYTES, store.dense_bytes, "dense")
        self.add(STORE_BYTES, store.budget, "budget")
        self.add(STORE_ENTRIES, store.entries, "all")
        self.add(STORE_ENTRIES, store.mirrors, "mirror")
        self.add(STORE_RATIO, store.family_ratio, "all")
        self.add(STORE_RATIO, store.mirror_ratio, "mirrors")

    def count_saved(self, kind: str) -> None:
        self.add(SAVED, 1, kind)

    def observe_restore(self, report: Restored) -> None:
        self.add(RESTORED_ROWS, report.rows)
        self.add(RESTORE_BYTES, report.loaded, "loaded")
        self.add(RESTORE_BYTES, report.written, "written")
        self.add(RESTORE_SECONDS, report.seconds)

    def measure_copy(self, device: torch.device) -> None:
        """Time a plain copy of as much as a restore moves; the best of three."""
        source = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
        target = torch.empty_like(source, device=device)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            target.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        self.add(COPY_SPEED, _COPIED / min(seconds))

    def count_failure(self, cause: str) -> None:
        self.add(FAILURES, 1, cause)


class TokenDancePromMetrics(KVConnectorPromMetrics):
    """Registers the counters and adds what the steps report."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier_engine()
        self._counters = {
            counter.name: (self._gauge_cls if counter.gauge else self._counter_cls)(
                name=counter.name,
                documentation=counter.text,
                labelnames=labelnames + ([counter.label] if counter.label else []),
            )
            for counter in COUNTERS
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        engine = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                metric = self._counters[name].labels(*engine, *([label] if label else []))
                metric.set(value) if name in _GAUGES else metric.inc(value)


def _forget_earlier_engine() -> None:
    """Make room for the counters of another engine in this process, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("tokendance:"):
            REGISTRY.unregister(collector)
