"""`tokendance bench capacity` from end to end on real vLLM, and vLLM's own reader of an export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokendance.bench.baselines import NAMES
from tokendance.bench.bystander import bench_bystander
from tokendance.bench.prefill import RoundShape, Words
from tokendance.cli import main

pytestmark = pytest.mark.engine

WORKLOADS = Path(__file__).parents[2] / "benchmarks/workloads/small"


def test_quick_run(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "capacity.json"
    command = ["bench", "capacity", "--quick", "--model", str(tiny_model()), "--out", str(out)]
    assert main([*command, "--pool-pages", "24", "--clock", "cpu"]) == 0
    result = json.loads(out.read_text())
    assert list(tmp_path.iterdir()) == [out]
    skipped = result["skipped"]
    assert set(skipped) <= {"offload"}  # vLLM's offloading wants a GPU
    assert all("Offloading" in why for why in skipped.values())

    rows = {(row["engine"], row["agents"]): row for row in result["rows"]}
    assert set(rows) == {(name, n) for name in NAMES if name not in skipped for n in (2, 4)}
    for row in rows.values():
        ends = [row[name]["median"] for name in ("ttft_s", "latency_s", "round_s")]
        assert 0 < ends[0] < ends[1] <= ends[2]
        assert row["round_s"]["median"] == pytest.approx(row["cpu_s"]["median"], abs=0.02)
        assert 0 < row["mean_pages"] <= row["peak_pages"] <= 24
    # Four prompts have 96 tokens in common, which are three pages where they come first; 32 tokens
    # of every history are in the prefix cache where it comes first.
    computed = {engine: rows[engine, 4]["computed"] for engine, n in rows if n == 4}
    assert computed["reordered"] == computed["prefix"] + 4 * 32 - 3 * 96
    assert computed["tokendance"] <= computed["prefix"] - 3 * 96
    for engine in ("cacheblend", "cacheblend-serial"):
        assert computed["tokendance"] < computed[engine] < computed["prefix"] - 2 * 96
    assert rows["reordered", 4]["peak_pages"] < rows["prefix", 4]["peak_pages"]

    assert {(f["engine"], f["qps"]) for f in result["largest"]} == {(e, 0.0) for e, n in rows}
    kinds = [row["kind"] for row in result["latency_by_index"]]
    assert kinds == ["agents"] * 4 + ["independent"] * 4


def test_bystander(tiny_model: Callable[..., Path]) -> None:
    words = Words([100 + 7 * i % 40000 for i in range(5000)], 0)
    shape = RoundShape(3, private=40, blocks=3, block=40)
    found = bench_bystander(str(tiny_model()), shape, words, 1, 1, 2048, "cpu", print)
    for name in ("plain", "tokendance"):
        p50, p99, largest = (found[f"decode_{p}_ms"][name] for p in ("p50", "p99", "max"))
        assert 0 < p50 <= p99 <= largest
        assert found["alone_p50_ms"][name] < largest  # the round takes its share of some step


def test_export_is_read_by_vllm(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import CustomDataset

    trace = WORKLOADS / "5_information_outbreak.jsonl"
    out, model = tmp_path / "dataset.jsonl", str(tiny_model())
    assert main(["bench", "export", str(trace), "--out", str(out), "--model", model]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    samples = CustomDataset(dataset_path=str(out), disable_shuffle=True).sample(
        tokenizer, num_requests=0, output_len=-1, skip_chat_template=True
    )
    assert [s.prompt for s in samples] == [line["prompt"] for line in written]
    assert [s.expected_output_len for s in samples] == [line["output_tokens"] for line in written]
    assert len(samples) == 8 * 4
