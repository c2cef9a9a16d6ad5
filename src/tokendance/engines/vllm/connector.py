"""TokenDanceConnector: vLLM's KV connector calls, translated into ours and back (M20).

vLLM makes one in the engine core (scheduler role) and one in every worker. It holds no logic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.logger import init_logger

from tokendance.config import Config
from tokendance.engines.vllm.eligibility import model_identity, refusal, stored_identity
from tokendance.engines.vllm.messages import Plans, Refusal, Report
from tokendance.engines.vllm.metrics import TokenDancePromMetrics, TokenDanceStats
from tokendance.engines.vllm.support import check_version
from tokendance.gate import objection
from tokendance.reuse.recovery import create

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tokendance.engines.vllm.scheduler_side import SchedulerSide
    from tokendance.engines.vllm.worker_side import WorkerSide

logger = init_logger(__name__)


class TokenDanceConnector(KVConnectorBase_V1):
    """See vLLM's KVConnectorBase_V1 for the contract of each method."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = Config.from_mapping(self._kv_transfer_config.kv_connector_extra_config or {})
        self._pass_rows = (
            self._config.pass_tokens or vllm_config.scheduler_config.max_num_batched_tokens
        )
        self._backend = create(self._config.backend, self._config.backend_options)
        self._refusal = refusal(vllm_config, kv_cache_config) or self._gate_objection()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler_side()
            self._disable(self._refusal)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nothing is handed to another engine, so a preemption loses nothing

    def _make_scheduler_side(self) -> SchedulerSide:
        from tokendance.engines.vllm.scheduler_side import SchedulerSide

        # A pass whose K/V cannot be computed at all hands its pages back; recompute, not fail.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        return SchedulerSide(
            self._config,
            block_size=self._vllm_config.cache_config.block_size,
            pass_rows=self._pass_rows,
            max_requests=self._vllm_config.scheduler_config.max_num_seqs,
            identity=model_identity(self._vllm_config),
            takes_donors=lambda name: (create(name) if name else self._backend).donors,
        )

    def _gate_objection(self) -> str:
        if not self._config.require_gate:
            return ""
        model = self._vllm_config.model_config
        options = self._config.backend_options
        return objection(model.model, model.revision, self._config.backend, options)

    def _disable(self, reason: str) -> None:
        if not reason or (self._scheduler is not None and self._scheduler.disabled):
            return  # the workers find the scheduler side's reasons again
        if self._config.require_reuse:
            raise ValueError(f"TokenDance cannot reuse KV here, and require_reuse is set: {reason}")
        logger.warning("TokenDance serves every request on the ordinary path: %s", reason)
        if self._scheduler is not None:
            self._scheduler.disabled = reason

    # -- scheduler side ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        refusals = [m.reason for m in metadata.values() if isinstance(m, Refusal) and m.reason]
        self._disable(next(iter(refusals), ""))

    def on_new_request(self, request: Request) -> None:
        self._scheduling.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        (block_ids,) = blocks.get_block_ids()
        self._scheduling.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        work = self._scheduling.work(scheduler_output)
        if work.saves:  # else vLLM starts with the forward, which writes to their pages
            scheduler_output.has_sync_kv_loads = True
        return work

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._scheduling.ran(report)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.finished(request)

    def reset_cache(self) -> bool | None:
        self._scheduling.reset()
        return True

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler-side call on a worker's connector"
        return self._scheduler

    # -- worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._refusal:
            return
        from tokendance.engines.vllm.kv_access import UnsupportedLayout
        from tokendance.engines.vllm.layers import VllmLayers
        from tokendance.engines.vllm.plugin import captured_model
        from tokendance.engines.vllm.rope import UnsupportedRope
        from tokendance.engines.vllm.worker_side import WorkerSide

        try:
            layers = VllmLayers(captured_model(), self._vllm_config, self._kv_cache_config)
        except (UnsupportedLayout, UnsupportedRope) as error:
            self._refusal = str(error)
            return
        self._worker = WorkerSide(layers, self._pass_rows, self._backend)
        if self._config.store_gib:
            self._worker.keep(self._config, stored_identity(self._vllm_config))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Refusal(self._refusal)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Plans)
        if self._worker is not None:
            self._worker.step(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.layers.before_attention(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass  # pages stay where the engine wrote them

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # -- both ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TokenDanceStats | None:
        side = self._scheduler or self._worker
        return side.take_stats() if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TokenDanceStats:
        return TokenDanceStats(data=data) if data is not None else TokenDanceStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TokenDancePromMetrics:
        return TokenDancePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
