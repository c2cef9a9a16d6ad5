"""vLLM's general plugin: makes the connector known by name and keeps the model object.

vLLM calls `register` in every process, before it has imported most of itself. Nothing is imported
here: each hook runs right after vLLM itself imports the module concerned, and each does nothing in
an engine that was not configured with the TokenDance connector.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tokendance.engines.vllm.support import (
    CONNECTOR,
    CONNECTOR_MODULE,
    installed_version,
    is_ours,
    version_problem,
)

Hook = Callable[[ModuleType], None]

_captured_model: Any = None


def captured_model() -> Any:
    """The model (torch.nn.Module) that this process's vLLM worker loaded; None before that."""
    return _captured_model


def register() -> None:
    """Entry point `vllm.general_plugins`; may be called any number of times in a process."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, hook in HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])


class _AfterImport(MetaPathFinder):
    """Runs a hook on a module right after its first import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = HOOKS.get(fullname)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, hook)
                return spec
        return None


def _run_after(loader: Any, hook: Hook) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        hook(module)

    loader.exec_module = exec_module


def _register_connector(module: ModuleType) -> None:
    factory = module.KVConnectorFactory
    if CONNECTOR in factory._registry:
        return
    refused = version_problem(installed_version())
    where = "tokendance.engines.vllm.support" if refused else CONNECTOR_MODULE
    factory.register_connector(CONNECTOR, where, CONNECTOR)


def _keep_model(module: ModuleType) -> None:
    worker = module.Worker
    if hasattr(worker.load_model, "tokendance"):
        return
    load_model = worker.load_model

    @functools.wraps(load_model)
    def load_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _captured_model
        result = load_model(self, *args, **kwargs)
        if is_ours(self.vllm_config):
            _captured_model = self.get_model()
        return result

    load_and_keep.tokendance = True  # type: ignore[attr-defined]
    worker.load_model = load_and_keep


def _read_prompts(module: ModuleType) -> None:
    if version_problem(installed_version()):
        return
    from tokendance.engines.vllm.frontend import install

    install(module)


HOOKS: dict[str, Hook] = {
    "vllm.distributed.kv_transfer.kv_connector.factory": _register_connector,
    "vllm.v1.worker.gpu_worker": _keep_model,
    "vllm.v1.engine.input_processor": _read_prompts,
    "vllm.renderers.online_renderer": _read_prompts,
}
