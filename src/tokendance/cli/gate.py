"""Measure how reuse changes a model's answers, and keep the verdict for servers.

Runs rounds of a trace on plain vLLM and on TokenDance side by side, then rounds with a needle: a
random fact in a shared text that the agents are asked for. A server that is started with the option
require_gate reuses nothing for a model without a passed verdict.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from tokendance.bench.engine_process import EngineError
from tokendance.bench.measure import BoundCounter, is_follower
from tokendance.bench.needle import Needle, hide, recalled
from tokendance.bench.render import HFTokenizer, Renderer
from tokendance.bench.replay import ModelMissing, Replay, ReplaySettings, RoundReport
from tokendance.bench.trace import Trace, TraceError
from tokendance.config import Config, ConfigError
from tokendance.gate import Limits, Verdict, judge, store

TRACE = Path("benchmarks/workloads/small/1_meet_and_greet.jsonl")


@dataclass(slots=True)
class Found:
    """Followers' figures of all rounds so far."""

    kl: list[float]
    top1: int = 0
    steps: int = 0
    asked: int = 0
    exact: int = 0
    reuse: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="model folder, or a name on the Hugging Face hub")
    add("--revision", help="of a model on the hub, as the server will be told")
    add("--trace", type=Path, help=f"default: {TRACE}")
    add("--rounds", type=int, default=3, help="rounds of the trace; default: %(default)s")
    add("--agents", type=int, default=4, help="agents of the trace; default: %(default)s")
    add("--needles", type=int, default=3, help="rounds with a needle; default: %(default)s")
    add("--seed", type=int, default=0, help="of the needles; default: %(default)s")
    add("--threads", type=int, default=1, help="default: %(default)s")
    add("--tokendance", metavar="JSON", default="{}", help="options of the server to judge")
    for limit in fields(Limits):
        name = f"--{limit.name.replace('_', '-')}"
        add(name, type=float, default=limit.default, help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """0 if the model passes, 1 if it does not, 2 if nothing could be measured."""
    try:
        options = json.loads(args.tokendance)
        config = Config.from_mapping({**options, "require_gate": False})
        verdict = measure(args, config, {**options, "require_gate": False})
    except (ModelMissing, TraceError, EngineError, ConfigError, ValueError, OSError) as error:
        print(f"tokendance gate: {error}", file=sys.stderr)
        return 2
    path = store(verdict, args.model, args.revision, config.backend_options)
    print(
        f"KL {verdict.kl:.4f}, top-1 {verdict.top1:.3f}, needles found "
        f"{verdict.recall_exact:.2f} exact and {verdict.recall_reuse:.2f} with reuse"
    )
    print("passed" if verdict.passed else f"not passed: {'; '.join(verdict.problems)}")
    print(f"kept in {path}")
    return 0 if verdict.passed else 1


def measure(args: argparse.Namespace, config: Config, options: dict[str, Any]) -> Verdict:
    """Run the rounds on both engines (real vLLM) and judge."""
    settings = ReplaySettings(
        trace=args.trace or _default_trace(),
        model=args.model,
        rounds=args.rounds,
        agents=args.agents,
        threads=args.threads,
        connector=options,
    )
    tokenizer = HFTokenizer(args.model)
    replay = Replay(settings, tokenizer)
    rounds = len(replay.prompts)
    needles = _needles(settings, Renderer(tokenizer, replay.header.render), args)
    replay.prompts += [needle.prompts for needle in needles]
    replay.bounds += [BoundCounter().add(needle.prompts) for needle in needles]
    found = Found([])
    for report in replay.run(_say):
        _add(found, report, needles[report.index - rounds] if report.index >= rounds else None)
    if not found.kl:
        raise TraceError(
            "no request took K/V from another, so there is nothing to judge; take more agents or "
            "rounds, or see `tokendance explain`"
        )
    return _verdict(args, config, replay, found)


def _verdict(args: argparse.Namespace, config: Config, replay: Replay, found: Found) -> Verdict:
    asked = found.asked or 1
    kl, exact, reuse = fmean(found.kl), found.exact / asked, found.reuse / asked
    top1 = found.top1 / found.steps
    limits = Limits(**{limit.name: getattr(args, limit.name) for limit in fields(Limits)})
    ready = replay.ready[1] if replay.ready else None
    details = {
        "trace": replay.header.name,
        "agents": replay.agents,
        "answers": len(found.kl),
        "needles": found.asked,
        "limits": {limit.name: getattr(limits, limit.name) for limit in fields(Limits)},
        "vllm": ready and ready.vllm,
        "dtype": ready and ready.dtype,
        "device": ready and ready.device,
    }
    problems = judge(limits, kl=kl, top1=top1, recall_exact=exact, recall_reuse=reuse)
    return Verdict(
        args.model, config.backend, kl, top1, exact, reuse, problems=problems, details=details
    )


def _needles(settings: ReplaySettings, render: Renderer, args: argparse.Namespace) -> list[Needle]:
    trace = Trace(settings.trace)
    *_, last = islice(trace.rounds(), settings.rounds)
    wanted = {agent.id for agent in trace.header.agents[: settings.agents]}
    requests = [request for request in last.requests if request.agent in wanted]
    return [hide(requests, render, args.seed + i) for i in range(args.needles)]


def _add(found: Found, report: RoundReport, needle: Needle | None) -> None:
    followers = [i for i, call in enumerate(report.ours.calls) if is_follower(call)]
    if needle is not None:
        found.asked += len(followers)
        found.exact += recalled(report.plain, needle.answer, followers)
        found.reuse += recalled(report.ours, needle.answer, followers)
        return
    for close in report.followers:
        found.kl.append(close.mean)
        found.top1 += close.top1
        found.steps += close.steps


def _default_trace() -> Path:
    checkout = Path(__file__).resolve().parents[3] / TRACE
    return TRACE if TRACE.exists() or not checkout.exists() else checkout


def _say(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)
