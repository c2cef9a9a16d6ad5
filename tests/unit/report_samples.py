"""A result file of every kind, small and made up, in the form that the commands write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENGINES = ("prefix", "reordered", "offload", "cacheblend-serial", "cacheblend", "tokendance")


def spread(value: float, width: float = 0.1) -> dict[str, float]:
    return {"median": value, "min": value * (1 - width), "max": value * (1 + width)}


def capacity() -> dict[str, Any]:
    cost = dict(zip(ENGINES, (1.0, 0.5, 0.9, 0.8, 0.55, 0.4)))
    rows = [
        {
            "engine": engine,
            "agents": n,
            "qps": qps,
            "round_s": spread(0.3 + cost[engine] * n * (1 + n / 8) - 0.1 * qps),
            "cpu_s": spread(cost[engine] * n),
            "ttft_s": spread(0.5 * n * cost[engine]),
            "peak_pages": min(128, round(20 * n * cost[engine])),
            "mean_pages": 9.5 * n,
            "preemptions": max(0, n - 6),
        }
        for engine in ENGINES
        for n in (2, 4, 8, 12)
        for qps in (0.0, 1.0)
    ]
    largest = [
        {
            "engine": e,
            "qps": q,
            "agents": min(12, int(4.2 / cost[e])),
            "interpolated": 4.2 / cost[e],
        }
        for e in ENGINES
        for q in (0.0, 1.0)
    ]
    latency = [
        {"kind": kind, "index": i, "latency_s": base + i * slope}
        for kind, base, slope in (("agents", 6.0, 0.05), ("independent", 1.0, 0.2))
        for i in range(30)
    ]
    return {
        "model": "m",
        "trace": "synthetic",
        "pool_pages": 128,
        "page_size": 32,
        "target_s": 10.0,
        "output_tokens": 32,
        "repetitions": 3,
        "rows": rows,
        "largest": largest,
        "latency_by_index": latency,
        "peak_pages_by_kind": {"agents": 128, "independent": 90},
        "skipped": {"offload": "it does not start"},
    }


def collective() -> dict[str, Any]:
    rows = [
        {
            "agents": n,
            "history": 128,
            "shared": 384,
            "backend": backend,
            "seconds": spread(n * 0.5),
            "cpu_s": spread(n * 0.5),
            "serial_cpu_s": spread(n * 0.8),
            "over_serial": spread(gain * (0.6 + n / 12)),
            "over_plain": spread(gain * n / 6),
        }
        for n in (3, 5, 8, 10, 15, 20)
        for backend, gain in (("region", 1.9), ("cacheblend", 1.1))
    ]
    return {"model": "m", "repetitions": 3, "rows": rows}


def similarity() -> dict[str, Any]:
    rows = [
        {
            "trace": f"{size}/{name}",
            "round": index,
            "agents": 8,
            "shared_tokens": share,
            "same_blocks": share - 0.02,
            "k_cosine": None if size == "paper" else 0.998,
            "v_cosine": None if size == "paper" else 0.97,
            "family_ratio": 2.1,
        }
        for size, name, share in (("small", "one", 0.6), ("paper", "two", 0.95))
        for index in range(3)
    ]
    return {"model": "m", "repetitions": 1, "rows": rows}


def fidelity() -> dict[str, Any]:
    first = {"exact": [None, None], "tokendance": [None, 2], "cacheblend-serial": [3, 1]}
    first["tokendance-15"] = [None, 3]
    rows = [
        {
            "engine": engine,
            "trace": trace,
            "seed": 0,
            "rounds": 5,
            "diverged_round": first[engine][i],
            "share_same_outputs": 1.0 if first[engine][i] is None else 0.7,
            "kl_end": 0.004,
            "top1": 0.97,
            "needle_recall": 0.9,
            "judge_agreement": None,
        }
        for engine in first
        for i, trace in enumerate(("1_meet_and_greet", "5_information_outbreak"))
    ]
    return {"model": "m", "repetitions": 1, "rows": rows}


def backends() -> dict[str, Any]:
    methods = (
        ("region", "leader", 0.0, 0.02, 4.6),
        ("naive", "donors", 0.0, 0.11, 5.1),
        ("full", "leader", 1.0, 0.0, 1.0),
        ("legolink", "donors", 0.15, 0.07, 3.4),
        ("cacheblend", "donors", 0.05, 0.06, 3.1),
        ("cacheblend", "donors", 0.15, 0.015, 2.4),
    )
    summary = [
        {
            "over": over,
            "agents": agents,
            "backend": backend,
            "source": source,
            "ratio": ratio,
            "rounds": 5,
            "kl_end": kl,
            "kl_cont": kl / 2,
            "top1": 0.95,
            "rows": 300,
            "changed_blocks": ratio,
            "cpu_ratio_plain": speed,
            "cpu_ratio_serial_cacheblend": speed / 2,
        }
        for over, agents in (("traces", 5), ("towns", 5), ("towns", 16))
        for backend, source, ratio, kl, speed in methods
        if agents == 5 or backend == "region"
    ]
    return {"settings": {"repetitions": 1}, "summary": summary, "rows": []}


def pressure() -> dict[str, Any]:
    rows = [
        {
            "mode": mode,
            "round": index,
            "round_s": 2 + index * cost,
            "cpu_s": 1 + index * cost,
            "rows_computed": round(1000 * cost),
            "rows_stored": 0 if mode == "recompute" else 600,
        }
        for mode, cost in (("recompute", 1.0), ("restore", 0.6))
        for index in range(5)
    ]
    ratios = {"round_ratio": spread(1.5), "cpu_ratio": spread(1.7)}
    return {"model": "m", "repetitions": 2, "pool_pages": 96, "agents": 6, **ratios, "rows": rows}


def overhead() -> dict[str, Any]:
    delays = {"decode_p50_ms": 40.0, "decode_p99_ms": 90.0, "decode_max_ms": 400.0}
    return {
        "model": "m",
        "requests": 8,
        "tokens": 256,
        "repetitions": 3,
        "cpu_ratio": spread(1.01),
        "wall_ratio": spread(0.99),
        "rows": [],
        "bystander": {k: {"plain": v, "tokendance": v * 1.1} for k, v in delays.items()},
    }


def prefill() -> dict[str, Any]:
    state = {"cpu_ratio": spread(5.5), "wall_ratio": spread(5.7), "kl_mean": spread(0.005)}
    trace = {"trace": "paper/5", "agents": 20, "row_bound": 4.1, "cpu_ratio": spread(3.9)}
    return {
        "model": "m",
        "shape": {"agents": 8, "private": 150, "blocks": 8, "block": 149, "task": 12},
        "repetitions": 3,
        "cold": state,
        "warm": state,
        "rows": [],
        "paper": [trace],
        "paper_command": "tokendance bench prefill --paper",
    }


MADE = {
    "capacity": capacity,
    "collective": collective,
    "similarity": similarity,
    "fidelity": fidelity,
    "backends": backends,
    "pressure": pressure,
    "overhead": overhead,
    "prefill": prefill,
}


def write(folder: Path) -> Path:
    """All of them, as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MADE.items():
        head = {"date": "2026-01-02", "machine": {"processor": "P", "cores": 2}, "versions": {}}
        text = json.dumps({**head, "command": f"tokendance bench {name}", **make()})
        (folder / f"{name}.json").write_text(text)
    return folder
