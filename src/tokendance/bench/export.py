"""A trace as a custom dataset of `vllm bench serve`: one JSON object per request.

Such a client knows no rounds: it sends the requests in this order, at the rate it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokendance.bench.render import Tokenizer, chat_texts
from tokendance.bench.trace import Request, Trace

USAGE = (
    "vllm bench serve --dataset-name custom --dataset-path {path} "
    "--skip-chat-template --disable-shuffle --custom-output-len -1 --num-prompts {count}"
)
"""How to replay it: prompts as they are, in order, with the lengths of the stored answers."""


def export(trace: Path, out: Path, tokenizer: Tokenizer, output_tokens: int) -> int:
    """Write the requests of a trace; how many. Raises TraceError.

    output_tokens: for a request whose answer the trace does not have.
    """
    lines = [json.dumps(line) + "\n" for line in _lines(Trace(trace), tokenizer, output_tokens)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def _lines(trace: Trace, tokenizer: Tokenizer, output_tokens: int) -> Iterator[dict[str, Any]]:
    chat = trace.header.render == "chat"
    for round_ in trace.rounds():
        for request in round_.requests:
            yield {
                "prompt": _prompt(request, tokenizer, chat),
                "output_tokens": (
                    len(tokenizer.encode(request.output.text)) if request.output else output_tokens
                ),
            }


def _prompt(request: Request, tokenizer: Tokenizer, chat: bool) -> str:
    if chat:
        return "".join(text for _, text in chat_texts(request.parts, tokenizer))
    return "".join(part.segment.text for part in request.parts)
