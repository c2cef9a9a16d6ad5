"""The command line: dispatch, and what `tokendance serve` makes of its arguments."""

from __future__ import annotations

import json

import pytest

from tokendance.cli import COMMANDS, main, serve
from tokendance.engines.vllm import launch


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that vLLM's command line would be started with."""
    words: list[str] = []
    monkeypatch.setattr(serve, "check_version", lambda: None)
    monkeypatch.setattr(launch, "run_vllm", words.extend)
    return words


def serve_with(*words: str) -> None:
    assert main(["serve", *words]) == 0


def test_serve_passes_everything_on_in_order(executed: list[str]) -> None:
    serve_with("--port", "8000", "org/model", "--td-linger-ms", "7", "--api-key", "k", "-tp=2")
    assert executed[:-2] == ["serve", "--port", "8000", "org/model", "--api-key", "k", "-tp=2"]
    assert executed[-2] == "--kv-transfer-config"
    assert json.loads(executed[-1]) == {
        "kv_connector": "TokenDanceConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"linger_ms": 7.0},
    }


def test_serve_options_of_every_type(executed: list[str]) -> None:
    serve_with(
        "m",
        "--tokendance",
        '{"quorum": 0.5, "mode": "exact"}',
        "--td-mode=auto",
        "--td-require-reuse",
        "true",
        "--td-pass-tokens",
        "none",
        "--td-min-shared-tokens",
        "32",
    )
    assert json.loads(executed[-1])["kv_connector_extra_config"] == {
        "quorum": 0.5,
        "mode": "auto",
        "require_reuse": True,
        "pass_tokens": None,
        "min_shared_tokens": 32,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--td-mode", "fast"], "mode must be"),
        (["--td-quorum", "much"], "'quorum' takes float"),
        (["--td-require-reuse", "perhaps"], "'require_reuse' takes bool"),
        (["--tokendance", "[1]"], "takes a JSON object"),
        (["--tokendance", "{"], "takes a JSON object"),
        (["--tokendance", '{"lingerms": 1}'], "did you mean linger_ms"),
        (["--kv-transfer-config", "{}"], "is what `tokendance serve` sets"),
        (["--kv-transfer-config.kv_role=kv_both"], "is what `tokendance serve` sets"),
    ],
)
def test_serve_refuses(
    executed: list[str], capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["serve", "m", *words]) == 2
    assert says in capsys.readouterr().err
    assert executed == []


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)
    assert main(["dance"]) == 2
    assert "no command 'dance'" in capsys.readouterr().err
