"""A replay as numbers: one JSON object with everything that is needed to read it later."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any

from tokendance.bench.engine_process import RoundResult
from tokendance.bench.measure import Closeness
from tokendance.bench.replay import Replay, RoundReport

Figure = Callable[[RoundResult], float]


def summarise(replay: Replay, reports: Sequence[RoundReport]) -> dict[str, Any]:
    """Everything that was measured, as plain data.

    Ratios are plain vLLM over TokenDance, so above 1 is a gain; seconds are sums over rounds of
    medians over repetitions. KL and top-1 are the followers', whose K/V is approximate; kl_max is
    the largest mean of one answer, exact_kl_max that of all others. Tokens are of one repetition.
    row_bound counts what the trace marks as shared; agents may have more in common, such as the
    same task, so that computed_ratio, which is measured, can be larger.
    """
    first = [r for r in reports if r.repetition == 0]
    later = [r for r in reports if r.index > 0]
    followers = [c for r in first for c in r.followers]
    exact = [c for r in first for c in r.exact]
    computed = [sum(r.plain_computed for r in first), sum(r.sources["computed"] for r in first)]
    return {
        "trace": replay.header.name,
        "agents": replay.agents,
        "rounds": len(first),
        "repetitions": len({r.repetition for r in reports}),
        "prefill_cpu_ratio": ratio(reports, _prefill_cpu),
        "prefill_cpu_ratio_steady": ratio(later, _prefill_cpu),
        "prefill_wall_ratio": ratio(reports, _prefill_wall),
        "round_wall_ratio": ratio(reports, _total_wall),
        "row_bound": _bound(first),
        "row_bound_steady": _bound([r for r in first if r.index > 0]),
        **_closeness(followers),
        "exact_kl_max": max((c.mean for c in exact), default=None),
        "computed_tokens": computed[1],
        "plain_computed_tokens": computed[0],
        "computed_ratio": round(computed[0] / computed[1], 3),
        "tokens_by_source": dict(sum((r.sources for r in first), Counter[str]())),
        "prefill_cpu_s": seconds(reports, _prefill_cpu),
        "round_wall_s": seconds(reports, _total_wall),
        "peak_pages": [
            max(r.plain.peak_pages for r in reports),
            max(r.ours.peak_pages for r in reports),
        ],
        "by_round": [round_figures(reports, r.index) for r in first],
        "machine": _machine(replay),
    }


def round_figures(reports: Sequence[RoundReport], index: int) -> dict[str, Any]:
    """One round, as a row of the table. Pairs are [plain vLLM, TokenDance]."""
    same = [r for r in reports if r.index == index]
    first = same[0]
    return {
        "round": index,
        "computed": [first.plain_computed, first.sources["computed"]],
        "row_bound": round(first.bound.ratio, 2),
        "prefill_cpu_s": seconds(same, _prefill_cpu),
        "prefill_cpu_ratio": ratio(same, _prefill_cpu),
        "round_wall_s": seconds(same, _total_wall),
        "round_wall_ratio": ratio(same, _total_wall),
        "tokens_by_source": dict(first.sources),
        **_closeness(first.followers),
    }


def seconds(reports: Iterable[RoundReport], figure: Figure) -> list[float]:
    """[plain vLLM, TokenDance]: the sum over rounds of the median over repetitions."""
    rounds: dict[int, list[RoundReport]] = {}
    for report in reports:
        rounds.setdefault(report.index, []).append(report)
    return [
        round(sum(median(figure(r.plain) for r in rs) for rs in rounds.values()), 4),
        round(sum(median(figure(r.ours) for r in rs) for rs in rounds.values()), 4),
    ]


def ratio(reports: Sequence[RoundReport], figure: Figure) -> float | None:
    """Plain vLLM over TokenDance; None without rounds."""
    plain, ours = seconds(reports, figure)
    return round(plain / ours, 3) if ours else None


def _prefill_cpu(result: RoundResult) -> float:
    return result.prefill_cpu_s


def _prefill_wall(result: RoundResult) -> float:
    return result.prefill_wall_s


def _total_wall(result: RoundResult) -> float:
    return result.total_wall_s


def _bound(reports: Sequence[RoundReport]) -> float | None:
    region = sum(r.bound.region for r in reports)
    return round(sum(r.bound.plain for r in reports) / region, 3) if region else None


def _closeness(calls: Sequence[Closeness]) -> dict[str, float | None]:
    if not calls:
        return dict.fromkeys(("kl_mean", "kl_max", "kl_end", "kl_cont", "top1"))
    cont = [kl for call in calls for kl in call.cont]
    return {
        "kl_mean": round(fmean(call.mean for call in calls), 6),
        "kl_max": round(max(call.mean for call in calls), 6),
        "kl_end": round(fmean(call.end for call in calls), 6),
        "kl_cont": round(fmean(cont), 6) if cont else None,
        "top1": round(sum(call.top1 for call in calls) / sum(call.steps for call in calls), 4),
    }


def _machine(replay: Replay) -> dict[str, Any]:
    ready = replay.ready
    return {
        "device": ready[0].device if ready else None,
        "dtype": ready[0].dtype if ready else None,
        "vllm": ready[0].vllm if ready else None,
        "python": platform.python_version(),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": replay.settings.threads,
        "model": replay.settings.model,
    }
