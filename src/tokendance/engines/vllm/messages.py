"""What travels between the scheduler side and the workers: plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tokendance.plan.reuse_plan import ReusePlan


@dataclass(frozen=True)
class Plans(KVConnectorMetadata):
    """Scheduler side to workers, every step."""

    plans: tuple[ReusePlan, ...] = ()


@dataclass(frozen=True)
class Refusal(KVConnectorHandshakeMetadata):
    """Worker to scheduler side at start-up: why it cannot reuse K/V, "" if it can."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a pass did for one request, beside its plan.

    recomputed: rows the plan copies that the backend computed instead. deviation: see
    reuse.collective.MemberOutcome. failure: why the pass was given up and all rows were computed.
    """

    recomputed: int = 0
    deviation: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):
    """Worker to scheduler side, after a step with passes: what ran, by request id."""

    ran: dict[str, Ran]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """All ranks run the same rows; a rank that failed speaks for all."""
        assert isinstance(other, Report)
        failed = {key: ran for key, ran in other.ran.items() if ran.failure}
        return Report({**other.ran, **self.ran, **failed})
