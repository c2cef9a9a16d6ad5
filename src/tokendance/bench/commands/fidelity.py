"""`tokendance bench fidelity`: agents that quote each other's live answers (figure 14).

Greedy decoding on the reference engine, in synthetic towns and, with --trace, in the settings of
traces: their first prompts, with the live answers in place of the stored ones. Compared are exact
computation, TokenDance, TokenDance with 15 % computed again, and serial CacheBlend. Finished
scenarios are kept beside the result; with --resume an interrupted run goes on there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokendance.bench.commands.common import (
    BenchError,
    add_usual,
    need_model,
    say,
    shown_command,
    traces,
    write_result,
)
from tokendance.bench.partial import append_line, close_partial, open_partial, read_lines

if TYPE_CHECKING:
    from tokendance.bench.cast import Cast

TEXT = "answers fed back for some rounds: exact, TokenDance, serial CacheBlend"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_usual(parser, "model", "threads", out="fidelity.json")
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="towns to make; default: %(default)s")
    add("--trace", type=Path, nargs="+", default=[], help="settings to play besides the towns")
    add("--agents", type=int, default=4, help="default: %(default)s")
    add("--rounds", type=int, default=4, help="default: %(default)s")
    add("--tokens", type=int, default=32, help="of an answer, at most; default: %(default)s")
    add("--window", type=int, default=2, help="past rounds in a prompt; default: %(default)s")
    add("--texts", type=int, default=4, help="shared texts at the start; default: %(default)s")
    add("--needles", type=int, default=2, help="after the last round; default: %(default)s")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quick", action="store_true", help="one town, 3 agents, 2 rounds, short answers")


def run(args: argparse.Namespace) -> int:
    import torch

    from tokendance.bench.fidelity import Settings, measure, summary
    from tokendance.bench.render import HFTokenizer
    from tokendance.engines.reference.model import Model

    need_model(args.model)
    settings = _settings(args)
    play = Settings(**settings["play"])
    partial = open_partial(args.out, settings, args.resume)
    done = {line["key"]: line["rows"] for line in read_lines(partial)}
    torch.set_num_threads(args.threads)
    tokenizer, model, keys = HFTokenizer(args.model), Model.load(args.model), []
    for name, seed, cast in _scenarios(args, settings, tokenizer):
        keys.append(name)
        if name not in done:
            done[name] = measure(name, seed, cast, model, play, say)
            append_line(partial, {"key": name, "rows": done[name]})
    rows = [row for key in keys for row in done[key]]
    result = {**settings, "repetitions": len(keys), "summary": summary(rows), "rows": rows}
    write_result(args.out, shown_command("fidelity"), result)
    close_partial(partial)
    _print(result["summary"])
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What has to be equal for a run to be resumed; it stands in the result."""
    from tokendance.bench.fidelity import Settings

    small = args.quick
    play = Settings(2, 6, 1) if small else Settings(args.rounds, args.tokens, args.needles)
    settings = {
        "model": args.model.name,
        "dtype": "float32",
        "threads": args.threads,
        "seeds": 1 if small else args.seeds,
        "traces": [path.stem for path in args.trace],
        "agents": 3 if small else args.agents,
        "window": args.window,
        "texts": 1 if small else args.texts,
        "play": asdict(play),
    }
    if min(play.rounds, play.tokens, args.window, args.texts) < 1 or play.needles < 0:
        raise BenchError("rounds, tokens, window and texts have to be above zero")
    if settings["seeds"] < 1 and not args.trace:
        raise BenchError("there is nothing to play: give --seeds or --trace")
    return settings


def _scenarios(
    args: argparse.Namespace, settings: dict[str, Any], tokenizer: Any
) -> Iterator[tuple[str, int, Cast]]:
    """Name, seed (-1 for a trace) and agents of every scenario."""
    from tokendance.bench.cast import Cast, town_requests
    from tokendance.bench.render import Renderer
    from tokendance.bench.town import SEGMENTS, sentences, write_town
    from tokendance.bench.trace import Trace

    stop, agents = _stop(args.model), settings["agents"]

    def cast(trace: Trace, requests: Any) -> Cast:
        names = {agent.id: agent.name for agent in trace.header.agents}
        render = Renderer(tokenizer, trace.header.render)
        called = tuple(names[request.agent] for request in requests)
        return Cast(tuple(requests), called, render, args.window, stop)

    pool = sentences(traces())
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(settings["seeds"]):
            path, size = Path(folder) / f"{seed}.jsonl", max(agents, SEGMENTS)
            town = Trace(
                write_town(path, pool, seed, lambda text: len(tokenizer.encode(text)), size)
            )
            *_, last = town.rounds()
            requests = town_requests(last.requests[:agents], settings["texts"])
            yield town.header.name, seed, cast(town, requests)
    for path in args.trace:
        trace = Trace(path)
        yield path.stem, -1, cast(trace, next(trace.rounds()).requests[:agents])


def _stop(folder: Path) -> frozenset[int]:
    """The tokens that end an answer."""
    found = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    return frozenset([found] if isinstance(found, int) else found or ())


def _print(found: dict[str, Any]) -> None:
    names = list(next(iter(found["means"].values())))
    print(f"{'':18}" + "".join(f"{name:>20}" for name in names))
    for engine, means in found["means"].items():
        print(f"{engine:18}" + "".join(f"{means[name]:20.4f}" for name in names))
    for engine, worse in found["worse_than_serial_cacheblend"].items():
        print(f"{engine} is worse than serial CacheBlend in: {', '.join(worse) or 'nothing'}")
