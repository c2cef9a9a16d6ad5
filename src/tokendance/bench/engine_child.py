"""The process behind EngineProcess: runs one vLLM engine and answers over a pipe.

Usage: python -m tokendance.bench.engine_child FD, where FD is the child's end of the pipe. The
forced answers and the captured logits go through vLLM's public logits processor interface, the
same way whether TokenDance is configured or not.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate

from tokendance.bench.engine_process import (
    Call,
    CallResult,
    Clock,
    EngineSettings,
    Ready,
    RoundResult,
)

IDLE_S = 0.001  # between engine steps that had nothing to do


class Teacher(AdapterLogitsProcessor):
    """Makes every request answer with its forced ids, and keeps the logits it would have used."""

    keep_rows = 0
    kept: dict[str, list[torch.Tensor]]
    before_step: Callable[[], None]

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.dtype = vllm_config.model_config.dtype

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        Teacher.before_step()
        super().update_state(batch_update)

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        lesson = (params.extra_args or {}).get("lesson")
        if lesson is None:
            return None
        call_id, forced = lesson

        def teach(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            step = len(output)
            if step < Teacher.keep_rows:
                rows = Teacher.kept.setdefault(call_id, [])
                del rows[step:]  # a chunk of a prompt is sampled too, and repeated
                rows.append(logits.to(self.dtype, copy=True))
            logits.fill_(float("-inf"))
            logits[forced[step]] = 0.0
            return logits

        return teach


class Engine:
    """Runs rounds on an in-process vLLM engine and measures them."""

    def __init__(self, settings: EngineSettings) -> None:
        self.llm = LLM(
            **settings.engine_arguments(),
            dtype=_dtype(settings.dtype),
            logits_processors=[Teacher],
        )
        self.engine = self.llm.llm_engine
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector = settings.tokendance
        self.clock = settings.clock
        self.pages = _Pages(time.perf_counter)
        Teacher.kept = {}
        Teacher.before_step = self._count_pages

    def ready(self) -> Ready:
        ours = sorted(name for name in sys.modules if name.startswith("tokendance.engines"))
        model = self.engine.model_config
        return Ready(
            vllm=vllm_version,
            device=current_platform.device_type,
            dtype=str(model.dtype).removeprefix("torch."),
            pages=self.pool.num_gpu_blocks,
            max_model_len=model.max_model_len,
            ours=tuple(ours),
        )

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache(reset_connector=self.connector):
            raise RuntimeError("the prefix cache could not be reset; requests are still running")

    def round(
        self, calls: Sequence[Call], path: str | None, rows: int, one_by_one: bool = False
    ) -> RoundResult:
        Teacher.keep_rows = rows if path else 0
        Teacher.kept = {}
        run = _Run(calls, self.clock)
        self.pages = _Pages(run.now)
        waiting = deque(sorted(calls, key=lambda call: call.arrival_s))
        sent: list[Any] = []
        while waiting or self.engine.has_unfinished_requests():
            while waiting and waiting[0].arrival_s <= run.now():
                if one_by_one and len(run.first) < len(sent):
                    break
                sent.append(self._send(waiting.popleft()))
            outputs = self.engine.step()
            for output in outputs:
                run.note(output)
            if not outputs:
                run.idle()
        preemptions = sum(request.num_preemptions for request in sent)
        result = run.result(self.pages, preemptions, path)
        if path:
            _write(path, [row for call in calls for row in Teacher.kept.get(call.id, ())])
        return result

    def _send(self, call: Call) -> Any:
        """Hand a call to the engine; its scheduler's own record of it."""
        self.engine.add_request(call.id, {"prompt_token_ids": list(call.prompt)}, _params(call))
        return next(reversed(self.scheduler.requests.values()))

    def _count_pages(self) -> None:
        free = self.pool.get_num_free_blocks()
        self.pages.note(self.pool.num_gpu_blocks - 1 - free)  # one is the null page


class _Pages:
    """Pages in use during one round, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.peak = self._used = 0
        self._clock = clock
        self._seconds = self._page_seconds = 0.0
        self._since = clock()

    def note(self, used: int) -> None:
        now = self._clock()
        if self.peak:  # not before the first request has pages
            self._seconds += now - self._since
            self._page_seconds += self._used * (now - self._since)
        self._used, self._since = used, now
        self.peak = max(self.peak, used)

    @property
    def mean(self) -> float:
        """Over the time from the first step to the last."""
        return self._page_seconds / self._seconds if self._seconds else float(self.peak)


def _dtype(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    slow = current_platform.is_cpu() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "float32" if slow else "bfloat16"


def _params(call: Call) -> SamplingParams:
    extra: dict[str, Any] = {"lesson": (call.id, call.forced)}
    if call.hints is not None:
        extra["kv_transfer_params"] = {"tokendance": call.hints}
    return SamplingParams(
        temperature=0.0,
        max_tokens=len(call.forced),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
        extra_args=extra,
    )


class _Run:
    """The clocks of one round and what its calls have reached."""

    def __init__(self, calls: Sequence[Call], clock: Clock) -> None:
        self.calls = calls
        self.clock = clock
        self.idle_s = 0.0
        self.first: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {call.id: [] for call in calls}
        self.last: dict[str, Any] = {}
        self.finish: dict[str, float] = {}
        self.prefill = (0.0, 0.0)
        self.cpu_start, self.wall_start = time.process_time(), time.perf_counter()
        self.total = (0.0, 0.0)

    def now(self) -> float:
        """Seconds since the start, on the engine's clock."""
        return self._on_clock(*self._spent())

    def idle(self) -> None:
        """Wait a moment for something to do."""
        time.sleep(IDLE_S)
        self.idle_s += IDLE_S

    def note(self, output: Any) -> None:
        spent = self._spent()
        now = self._on_clock(*spent)
        if output.request_id not in self.first:
            self.first[output.request_id] = now
            if len(self.first) == len(self.calls):
                self.prefill = spent
        times = self.tokens[output.request_id]
        times.extend([now] * (len(output.outputs[0].token_ids) - len(times)))
        if output.finished:
            self.last[output.request_id] = output
            self.finish[output.request_id] = now
            self.total = spent

    def _spent(self) -> tuple[float, float]:
        """CPU seconds and wall seconds since the start."""
        return time.process_time() - self.cpu_start, time.perf_counter() - self.wall_start

    def _on_clock(self, cpu: float, wall: float) -> float:
        return wall if self.clock == "wall" else cpu + self.idle_s

    def result(self, pages: _Pages, preemptions: int, logits: str | None) -> RoundResult:
        results, row = [], 0
        for call in self.calls:
            output = self.last[call.id]
            kept = len(Teacher.kept.get(call.id, ()))
            results.append(
                CallResult(
                    id=call.id,
                    first_token_s=self.first[call.id],
                    finish_s=self.finish[call.id],
                    output=tuple(output.outputs[0].token_ids),
                    prompt_tokens=len(output.prompt_token_ids),
                    cached=output.num_cached_tokens or 0,
                    outcome=output.kv_transfer_params,
                    logits=slice(row, row + kept),
                    token_s=tuple(self.tokens[call.id]),
                )
            )
            row += kept
        return RoundResult(
            calls=tuple(results),
            prefill_cpu_s=self.prefill[0],
            prefill_wall_s=self.prefill[1],
            total_cpu_s=self.total[0],
            total_wall_s=self.total[1],
            peak_pages=pages.peak,
            logits=logits,
            mean_pages=pages.mean,
            preemptions=preemptions,
        )


def _write(path: str, rows: Sequence[torch.Tensor]) -> None:
    table = torch.stack(tuple(rows)).cpu()
    if table.dtype == torch.bfloat16:
        np.save(path, table.view(torch.uint16).numpy())
    else:
        np.save(path, table.float().numpy())


def main(pipe: Connection) -> None:
    """Serve until the other end closes the pipe."""
    settings: EngineSettings = pipe.recv()
    engine: Engine | None = None
    message: tuple[Any, ...] = ("start",)
    while True:
        try:
            if engine is None:
                engine = Engine(settings)
                answer: Any = engine.ready()
            else:
                answer = getattr(engine, message[0])(*message[1:])
            reply = ("ok", answer)
        except Exception as error:
            traceback.print_exc()
            reply = ("error", f"{type(error).__name__}: {error}")
        try:
            pipe.send(reply)
            message = pipe.recv()
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown can take seconds and nothing is left to save
