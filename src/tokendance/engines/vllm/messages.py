"""What travels between the scheduler side and the workers: plain, frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tokendance.plan.reuse_plan import ReusePlan
from tokendance.plan.saving import SaveFamily, SessionOrder
from tokendance.types import RequestId


@dataclass(frozen=True)
class Plans(KVConnectorMetadata):
    """Scheduler side to workers, every step. The saves come first: their pages may be taken by
    requests of this very step."""

    plans: tuple[ReusePlan, ...] = ()
    saves: tuple[SaveFamily, ...] = ()
    sessions: tuple[SessionOrder, ...] = ()


@dataclass(frozen=True)
class Refusal(KVConnectorHandshakeMetadata):
    """Worker to scheduler side at start-up: why it cannot reuse K/V, "" if it can."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a pass did for one request, beside its plan.

    recomputed: rows the plan copies that the backend computed instead. deviation: see
    reuse.collective.MemberOutcome. lost: rows that the store should have given and that were
    computed. failure: why the pass was given up and all rows were computed.
    """

    recomputed: int = 0
    lost: int = 0
    deviation: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):
    """Worker to scheduler side, after a step with work: what ran, by request id; whether each
    request that was to be stored was; and stored requests that are gone."""

    ran: dict[RequestId, Ran]
    saved: dict[RequestId, bool] = field(default_factory=dict)
    gone: frozenset[RequestId] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """All ranks run and keep the same rows; a rank that failed speaks for all."""
        assert isinstance(other, Report)
        failed = {key: ran for key, ran in other.ran.items() if ran.failure}
        ran = {**other.ran, **self.ran, **failed}
        return Report(ran, {**other.saved, **self.saved}, self.gone | other.gone)
