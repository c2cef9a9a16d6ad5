"""One vLLM engine in a process of its own, driven round by round over a pipe (M23).

Plain vLLM and TokenDance run in processes that differ in one thing only: whether the connector is
configured. The plain process does not even load vLLM plugins. Process CPU seconds then belong to
one engine, and an engine that fails takes nobody with it. The child is engine_child.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

Clock = Literal["wall", "cpu"]
"""What the seconds of a call are: time on the wall, or CPU seconds of the engine's process plus the
time it waits for something to do. On one thread of a CPU the second is what the first would be on a
machine with nothing else to do."""


class EngineError(RuntimeError):
    """The engine failed, ended or did not answer; the text holds its last words."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine is started; both sides of a comparison differ in `tokendance` alone.

    model: folder of the model. dtype: "auto" is bfloat16, or float32 on a CPU that has to emulate
    bfloat16. connector: options of the TokenDance connector, used only with `tokendance`.
    max_model_len: None takes the model's own. kv_cache_gib: memory of the KV cache
    (on a CPU; on a GPU `memory_share` rules). pages: pages of the KV cache that requests may use,
    instead of as many as fit. offload_gib: host memory of vLLM's own KV offloading, None for none.
    threads: OpenMP threads. clock: of the seconds of a call.
    """

    model: str
    tokendance: bool
    connector: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    block_size: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 64
    kv_cache_gib: float = 2
    memory_share: float = 0.42
    pages: int | None = None
    offload_gib: float | None = None
    threads: int = 1
    clock: Clock = "wall"

    @property
    def name(self) -> str:
        if self.tokendance:
            return "TokenDance"
        return "plain vLLM" if self.offload_gib is None else "vLLM with KV offloading"

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vllm.LLM, without the dtype."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "enforce_eager": True,
            "block_size": self.block_size,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.memory_share,
            "disable_log_stats": True,
        }
        if self.max_model_len is not None:
            arguments["max_model_len"] = self.max_model_len
        if self.pages is not None:
            arguments["num_gpu_blocks_override"] = self.pages + 1  # one is the null page
        if self.offload_gib is not None:
            arguments["kv_offloading_size"] = self.offload_gib
        if self.tokendance:
            arguments["kv_transfer_config"] = {
                "kv_connector": "TokenDanceConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(self.connector),
            }
        return arguments

    def environment(self) -> dict[str, str]:
        """Environment of the child; nothing of ours is loaded on the plain side."""
        environment = dict(os.environ)
        environment.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_WAIT_POLICY="passive",  # a thread that waits costs no CPU seconds
            VLLM_CPU_KVCACHE_SPACE=f"{self.kv_cache_gib:g}",
            VLLM_NO_USAGE_STATS="1",
            OMP_NUM_THREADS=str(self.threads),
            TOKENIZERS_PARALLELISM="false",
        )
        environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if Path(self.model).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        if self.tokendance:
            environment.pop("VLLM_PLUGINS", None)
        else:
            environment["VLLM_PLUGINS"] = ""
        return environment


class Call(NamedTuple):
    """One request. `forced` are the ids the engine has to answer with; at least one."""

    id: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    hints: dict[str, Any] | None = None  # becomes kv_transfer_params["tokendance"]
    arrival_s: float = 0.0


class CallResult(NamedTuple):
    """What became of a call. Seconds on the engine's clock since the start of the round.

    cached: prompt tokens that the engine did not compute, whatever the reason. outcome: the
    response's kv_transfer_params. logits: rows of this call in RoundResult.logits. token_s: when
    each token of the answer came.
    """

    id: str
    first_token_s: float
    finish_s: float
    output: tuple[int, ...]
    prompt_tokens: int
    cached: int
    outcome: dict[str, Any] | None
    logits: slice
    token_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round on one engine.

    prefill_*: until every call has its first token; total_*: until the last answer is complete.
    cpu_s is process CPU time. peak_pages, mean_pages: most pages of the KV cache in use by live
    requests, and their mean over time. preemptions: requests thrown out to make room, and later
    computed again.
    logits: .npy file [rows, vocab] of the model's logits before sampling, uint16 bf16 bits or
    float32; row 0 of a call belongs to its last prompt token, row i to its i-th forced token.
    """

    calls: tuple[CallResult, ...]
    prefill_cpu_s: float
    prefill_wall_s: float
    total_cpu_s: float
    total_wall_s: float
    peak_pages: int
    logits: str | None
    mean_pages: float = 0.0
    preemptions: int = 0


class Ready(NamedTuple):
    """What an engine says when it is up."""

    vllm: str
    device: str
    dtype: str
    pages: int
    max_model_len: int
    ours: tuple[str, ...]  # modules of tokendance.engines that are loaded


class EngineProcess:
    """A running engine. Use as a context manager: the process ends with the block.

    Starting returns at once; the first call of `ready()` or `round()` waits for the engine.
    """

    def __init__(self, settings: EngineSettings, *, timeout_s: float = 600.0) -> None:
        self.settings = settings
        self.timeout_s = timeout_s
        self._ready: Ready | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
        self._pipe, theirs = Pipe()
        self._child = _spawn(settings, theirs, self._log.fileno())
        theirs.close()
        self._pipe.send(settings)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ready(self) -> Ready:
        """Wait until the engine is up."""
        if self._ready is None:
            self._ready = self._receive("start")
        return self._ready

    def round(
        self,
        calls: Sequence[Call],
        *,
        logits: Path | None = None,
        logit_rows: int = 0,
        one_by_one: bool = False,
    ) -> RoundResult:
        """Run one round to its end. With `logits`, the first `logit_rows` logits of each call are
        written to that file after the timed part. one_by_one: hand a call to the engine only when
        those before it have their first token; its clock starts at its arrival all the same."""
        self.ready()
        file = logits and str(logits)
        result: RoundResult = self._ask("round", tuple(calls), file, logit_rows, one_by_one)
        return result

    def reset(self) -> None:
        """Forget every cached prefix; nothing may be running."""
        self.ready()
        self._ask("reset")

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._pipe.close()  # the child ends when it finds the pipe closed
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, *message: Any) -> Any:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._failure(f"ended before {message[0]!r}") from None
        return self._receive(message[0])

    def _receive(self, what: str) -> Any:
        try:
            if not self._pipe.poll(self.timeout_s):
                raise self._failure(f"did not answer to {what!r} within {self.timeout_s:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._failure(f"ended during {what!r}") from None
        if kind == "error":
            raise self._failure(f"failed during {what!r}: {value}")
        return value

    def _failure(self, what: str) -> EngineError:
        deadline = time.monotonic() + 2  # a dying process needs a moment to have an exit status
        while self._child.poll() is None and time.monotonic() < deadline and "ended" in what:
            time.sleep(0.05)
        status = f" (exit status {self._child.returncode})" if self._child.returncode else ""
        return EngineError(f"the engine of {self.settings.name} {what}{status}{self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-15:]
        return "\n  its last words:\n" + "\n".join("    " + x for x in lines) if lines else ""


def _spawn(settings: EngineSettings, pipe: Connection, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokendance.bench.engine_child", str(pipe.fileno())],
        env=settings.environment(),
        pass_fds=[pipe.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
