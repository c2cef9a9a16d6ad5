"""What ran, as counters: in vLLM's log line and at /metrics (Prometheus).

Every counter is counted where the thing happens: rows, passes and failures on the worker (rank 0
counts, the others do the same work), requests and declined reuse on the scheduler side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from tokendance.plan.reuse_plan import ReusePlan
from tokendance.reuse.collective import PassOutcome


class Counter(NamedTuple):
    """name: as in Prometheus; label: name of its one label, "" for none."""

    name: str
    label: str
    text: str


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
COUNTERS = (ROWS, REQUESTS, DECLINED, PASSES, PASS_SECONDS, FAILURES)


class TokenDanceStats(KVConnectorStats):
    """Counter increments of one step: data[counter name][label value] -> increment."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def add(self, counter: Counter, value: float = 1, label: str = "") -> None:
        values = self.data.setdefault(counter.name, {})
        values[label] = values.get(label, 0) + value

    def aggregate(self, other: KVConnectorStats) -> TokenDanceStats:
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, value in values.items():
                mine[label] = mine.get(label, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {
            f"{name.removeprefix('tokendance:')}{f'[{label}]' if label else ''}": value
            for name, values in self.data.items()
            for label, value in values.items()
        }

    def observe_pass(self, plan: ReusePlan, outcome: PassOutcome, seconds: float) -> None:
        self.add(PASSES, outcome.forwards)
        self.add(PASS_SECONDS, seconds)
        for member, done in zip(plan.members, outcome.members):
            rows = member.rows_by_source(recomputed=sum(map(len, done.recomputed)))
            for source, count in rows.items():
                if count:
                    self.add(ROWS, count, source.value)

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
            counter.name: self._counter_cls(
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
                self._counters[name].labels(*engine, *([label] if label else [])).inc(value)


def _forget_earlier_engine() -> None:
    """Make room for the counters of another engine in this process, as vLLM does with its own."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("tokendance:"):
            REGISTRY.unregister(collector)
