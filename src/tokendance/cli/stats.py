"""Show what a running server reuses, stores and restores.

Reads the Prometheus page of a vLLM server, the figures of all its engines added up. Ratios are of
rank 0: every tensor-parallel rank keeps its own part of the same entries.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

PREFIX = "tokendance:"


class StatsError(RuntimeError):
    """The server cannot be read; the text says what to do."""


class Sample(NamedTuple):
    """name: without the prefix. label: value of its one label of ours, "" without one."""

    name: str
    label: str
    value: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://localhost:8000", help="of the server; default: %(default)s")
    add("--every", type=float, metavar="SECONDS", help="repeat until interrupted")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        while True:
            figures = summary(read(args.url))
            print(json.dumps(figures) if args.json else text(figures), flush=True)
            if not args.every:
                return 0
            time.sleep(args.every)
    except StatsError as error:
        print(f"tokendance stats: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def read(url: str) -> list[Sample]:
    """Our samples of the server's /metrics. Raises StatsError."""
    page = url.rstrip("/") + "/metrics"
    try:
        with urllib.request.urlopen(page, timeout=10) as answer:
            samples = list(parse(answer.read().decode()))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise StatsError(f"{page} cannot be read ({error}); is the server up?") from error
    if not samples:
        raise StatsError(
            f"{page} has no figures of TokenDance: start the server with `tokendance serve`, "
            "without --disable-log-stats"
        )
    return samples


def parse(page: str) -> Iterator[Sample]:
    """Our samples of a page in Prometheus' text format."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise StatsError("needs prometheus-client, which comes with vLLM") from error
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                own = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
                yield Sample(sample.name.removeprefix(PREFIX), "".join(own), sample.value)


def summary(samples: list[Sample]) -> dict[str, dict[str, float]]:
    """Figures by group. Groups without anything to say are left out."""

    def by_label(name: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for sample in samples:
            if sample.name == name:
                values[sample.label] = values.get(sample.label, 0.0) + sample.value
        return values

    def one(name: str) -> float:
        return sum(by_label(name).values())

    held = by_label("store_bytes")
    moved = by_label("restore_bytes_total")
    seconds, speed = one("restore_seconds_total"), one("copy_bytes_per_second")
    restored = {
        "rows": one("restored_rows_total"),
        "bytes_loaded": moved.get("loaded", 0.0),
        "bytes_written": moved.get("written", 0.0),
        "seconds": seconds,
    }
    if seconds and speed:
        restored["share_of_copy_bandwidth"] = moved.get("written", 0.0) / seconds / speed
    groups = {
        "rows": by_label("rows_total"),
        "requests": by_label("requests_total"),
        "reused nothing": by_label("declined_total"),
        "passes": {"number": one("passes_total"), "seconds": one("pass_seconds_total")},
        "failures": by_label("pass_failures_total"),
        "stored bytes": held,
        "stored entries": by_label("store_entries"),
        "stored, dense over held": by_label("store_ratio"),
        "saved": {**by_label("saved_total"), "seconds": one("save_seconds_total")},
        "restored": restored,
    }
    return {name: group for name, group in groups.items() if any(group.values())}


def text(figures: dict[str, dict[str, float]]) -> str:
    """A table for people."""
    lines = []
    for name, group in figures.items():
        lines.append(name)
        lines += [f"  {label or 'all':<36}{_number(value):>16}" for label, value in group.items()]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
