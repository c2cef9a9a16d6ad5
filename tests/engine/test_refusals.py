"""Real engines on which nothing may be reused: served on the ordinary path, or not started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from small_engine import make_round, outcome, tokens  # noqa: E402

from tokendance import gate  # noqa: E402
from tokendance.engines.vllm import connector  # noqa: E402

OPTIONS = {"min_shared_tokens": 16, "round_timeout_ms": 2000.0}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the connector warns of."""
    said: list[str] = []
    monkeypatch.setattr(
        connector.logger, "warning", lambda text, *values, **_: said.append(text % values)
    )
    return said


@pytest.fixture(scope="module")
def sliding_model(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny Llama as a Mistral with a window of 64 tokens."""
    folder = tmp_path_factory.mktemp("sliding") / "model"
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_sliding_window_is_served_on_the_ordinary_path(
    start_engine: Callable[..., Any], sliding_model: Path, warnings: list[str]
) -> None:
    members = make_round(1, 3)
    with start_engine(sliding_model, options=OPTIONS) as engine:
        outputs = engine.answers([engine.add(*member) for member in members])
        assert [outcome(output) for output in outputs] == [{}] * 3
        alone = [tokens(engine.ask(member.prompt)) for member in members]
    assert [tokens(output) for output in outputs] == alone
    (said,) = warnings
    assert said == (
        "TokenDance serves every request on the ordinary path: "
        "sliding windows and chunked attention are not supported; full attention is"
    )


def test_a_server_that_requires_reuse_does_not_start(
    start_engine: Callable[..., Any], sliding_model: Path
) -> None:
    with (
        pytest.raises(ValueError, match="require_reuse is set: sliding windows"),
        start_engine(sliding_model, options={"require_reuse": True}),
    ):
        pass


def test_the_gate_keeps_a_model_without_a_verdict_from_reuse(
    start_engine: Callable[..., Any],
    tiny_model: Callable[..., Path],
    warnings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options, model = {**OPTIONS, "require_gate": True}, tiny_model()
    members = make_round(2, 3)
    with start_engine(options=options) as engine:
        outputs = engine.answers([engine.add(*member) for member in members])
        assert [outcome(output) for output in outputs] == [{}] * 3
    (said,) = warnings
    assert "there is no verdict on" in said and "run `tokendance gate`" in said

    gate.store(gate.Verdict(str(model), "region", 0.0, 1.0, 1.0, 1.0, ()), str(model), None, {})
    with start_engine(options=options) as engine:
        outputs = engine.answers([engine.add(*member) for member in members])
        assert [outcome(o)["role"] for o in outputs].count("follower") == 2
        other = make_round(3, 3, backend="naive")
        outputs = engine.answers([engine.add(*member) for member in other])
        assert [outcome(output) for output in outputs] == [{}] * 3
    assert len(warnings) == 1
