"""Real vLLM, in this process, on tiny models with random weights."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# vLLM compiles its sampler as soon as somebody asks for logprobs, which takes minutes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_engine import Engine, Running, make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model once: tiny_model(architecture="llama", rope=None)."""
    made: dict[str, Path] = {}

    def model(architecture: str = "llama", rope: dict[str, Any] | None = None) -> Path:
        key = f"{architecture} {rope}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model"), architecture, rope)
        return made[key]

    return model


@pytest.fixture(scope="session")
def start_engine(tiny_model: Callable[..., Path]) -> Callable[..., AbstractContextManager[Engine]]:
    """`with start_engine(reuse=True, **settings_of_LLM) as engine`; one at a time."""

    @contextmanager
    def start(
        model: Path | None = None, *, reuse: bool = True, options: Any = None, **settings: Any
    ) -> Iterator[Engine]:
        running = Running(model or tiny_model(), reuse, options or {}, settings)
        try:
            yield running.engine
        finally:
            running.close()
            gc.collect()

    return start
