"""What `tokendance doctor` finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tokendance.cli import doctor, main


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_type": "yarn"}}, ""),
        ({"layer_types": None}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"rope_parameters": {"mrope_section": [16, 24, 24]}}, "M-RoPE"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {}}, "vision or audio"),
    ],
)
def test_models_outside_the_scope(config: dict[str, object], says: str) -> None:
    problem = doctor.config_problem(SimpleNamespace(**config))
    assert bool(problem) == bool(says)
    assert says in problem


@pytest.mark.parametrize(("found", "status"), [("0.32.1", 0), ("0.31.0", 1), (None, 1)])
def test_status_follows_the_installed_vllm(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: str | None,
    status: int,
) -> None:
    ok = doctor.Finding("ok", "plugin", "")
    monkeypatch.setattr(doctor, "installed_version", lambda: found)
    monkeypatch.setattr(doctor, "version", lambda package: "1")
    for name in ("_plugin", "_device"):
        monkeypatch.setattr(doctor, name, lambda: ok)
    assert main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("no") for line in lines) == status
    assert all(line.split()[0] in ("ok", "note", "no") for line in lines)


def test_a_plugin_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [SimpleNamespace(name="tokendance")]
    monkeypatch.setattr(doctor, "entry_points", lambda group: known)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert doctor._plugin().level == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other,tokendance")
    assert doctor._plugin().level == "ok"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves tokendance out" in doctor._plugin().text
    known.clear()
    assert "install the package" in doctor._plugin().text
