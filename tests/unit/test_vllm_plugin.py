"""The plugin's hooks and version gate, without vLLM."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokendance.engines.vllm import plugin, support


def test_registering_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from tokendance.engines.vllm.plugin import register, captured_model;"
        "register(); register(); assert captured_model() is None;"
        "print(*sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A module `late_module` with a hook; the list shows the hook's calls."""
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    calls: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(plugin, "HOOKS", {"late_module": lambda module: calls.append(module.VALUE)})
    return calls


def test_hook_runs_after_a_later_import(hooked: list[str]) -> None:
    plugin.register()
    plugin.register()
    assert hooked == []
    importlib.import_module("late_module")
    importlib.import_module("late_module")
    assert hooked == [1]


def test_hook_runs_at_once_on_an_imported_module(hooked: list[str]) -> None:
    importlib.import_module("late_module")
    plugin.register()
    assert hooked == [1]


def config(connector: str | None, **extra: object) -> SimpleNamespace:
    if connector is None:
        return SimpleNamespace(kv_transfer_config=None)
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


def test_only_engines_that_name_the_connector_are_ours() -> None:
    child = {"kv_connector": "TokenDanceConnector", "kv_connector_extra_config": {"mode": "exact"}}
    multi = config("MultiConnector", connectors=[{"kv_connector": "Other"}, child])
    assert support.is_ours(config("TokenDanceConnector"))
    assert support.is_ours(multi)
    assert support.connector_options(multi.kv_transfer_config) == {"mode": "exact"}
    assert not support.is_ours(config(None))
    assert not support.is_ours(config("OffloadingConnector"))
    assert not support.is_ours(config("MultiConnector", connectors=[{"kv_connector": "Other"}]))


def worker_module(config: SimpleNamespace) -> SimpleNamespace:
    class Worker:
        vllm_config = config

        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            return f"loaded {load_dummy_weights}"

        def get_model(self) -> str:
            return "the model"

    return SimpleNamespace(Worker=Worker)


@pytest.mark.parametrize(("connector", "kept"), [("TokenDanceConnector", "the model"), ("X", None)])
def test_the_model_is_kept_for_our_engines_only(
    monkeypatch: pytest.MonkeyPatch, connector: str, kept: str | None
) -> None:
    monkeypatch.setattr(plugin, "_captured_model", None)
    module = worker_module(config(connector))
    plugin._keep_model(module)
    wrapped = module.Worker.load_model
    plugin._keep_model(module)
    assert module.Worker.load_model is wrapped
    assert module.Worker().load_model(load_dummy_weights=True) == "loaded True"
    assert plugin.captured_model() == kept


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("0.32.0", ""),
        ("0.32.4.post1+cpu", ""),
        ("0.31.9", "supports vLLM 0.32.x, installed is 0.31.9"),
        ("0.33.0rc1", "installed is 0.33.0rc1"),
        ("1.32.0", "installed is 1.32.0"),
        ("dev", "installed is dev"),
        (None, "none is installed"),
    ],
)
def test_versions(found: str | None, says: str) -> None:
    problem = support.version_problem(found)
    assert bool(problem) == bool(says)
    assert says in problem
    assert "\n" not in problem


def test_an_unsupported_vllm_is_refused_when_the_connector_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: dict[str, str] = {}

    class Factory:
        _registry = registered

        @classmethod
        def register_connector(cls, name: str, module: str, class_name: str) -> None:
            registered[name] = module

    for module in (plugin, support):
        monkeypatch.setattr(module, "installed_version", lambda: "0.31.0")
    plugin._register_connector(SimpleNamespace(KVConnectorFactory=Factory))
    target = importlib.import_module(registered["TokenDanceConnector"])
    with pytest.raises(support.UnsupportedVLLM, match=r"installed is 0\.31\.0"):
        target.TokenDanceConnector  # noqa: B018
