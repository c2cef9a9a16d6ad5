"""`tokendance bench restore`, `storage` and `churn`: what they write, at the smallest sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tokendance.bench.commands.common import shown_command
from tokendance.cli import main

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"


class Words:
    """A tokenizer of which every word is one token."""

    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [crc32(word.encode()) % 50_000 for word in text.split()]

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "\n".join(f"{m['role']} : {m['content']}" for m in messages)


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "results" / "out.json"
    assert main(["bench", *words, "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"date", "machine", "versions", "command", "repetitions"} <= result.keys()
    assert str(tmp_path) not in out.read_text()
    return result


def test_restore_counts_what_it_moves(tmp_path: Path) -> None:
    words = ["--quick", "--rows", "128", "--shape", "2", "2", "16", "--sweep"]
    rows = bench(tmp_path, "restore", *words)["rows"]
    assert [row["mirrors"] for row in rows] == [1, 5, 9, *[5] * 5]
    for row in rows:
        placed = row["mirrors"] + row["with_master"]
        assert row["bytes"]["written"] == placed * 128 * 2 * 2 * 2 * 16 * 2
        assert row["loaded_masters"] <= row["allowed_masters"]


def test_storage_stays_below_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("tokendance.bench.render.HFTokenizer", lambda folder: Words())
    trace = WORKLOADS / "5_information_outbreak.jsonl"
    rows = bench(tmp_path, "storage", str(trace), "--model", str(tmp_path))["rows"]
    assert {row["method"] for row in rows} == {"region", "tokens", "blocks"}
    assert all(1 <= row["family_ratio"] <= row["bound"] * 1.001 for row in rows)
    assert max(row["family_ratio"] for row in rows) > 1.5


def test_storage_without_a_model_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "storage", "--model", str(tmp_path / "none")]) == 1
    assert "`tokendance model` makes one" in capsys.readouterr().err


def test_churn_writes_its_samples(tmp_path: Path) -> None:
    result = bench(tmp_path, "churn", "--rounds", "40", "--budget", "150000")
    assert result["wrong"] == 0 and result["checked"] > 50
    assert [s["round"] for s in result["samples"]][-1] == 40
    assert all(s["held"] <= 150_000 for s in result["samples"])


def test_the_shown_command_is_what_decides_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["x", "bench", "backends", "/a/b c.jsonl", "--resume", "--out", "/t/r.json", "-n", "8"]
    monkeypatch.setattr(sys, "argv", typed)
    assert shown_command("backends") == "tokendance bench backends 'b c.jsonl' -n 8"
