"""`tokendance serve` as a real server: hints, errors and separators over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from http_server import running_server  # noqa: E402

from tokendance.client import RoundClient  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("serve"), "--td-linger-ms", "20") as url:
        yield url


def chat(url: str, content: str, hints: Any = None, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    if hints is not None:
        body["kv_transfer_params"] = {"tokendance": hints}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, **more}, timeout=120)


def complete(url: str, prompt: Any, hints: Any = None, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    if hints is not None:
        body["kv_transfer_params"] = {"tokendance": hints}
    return httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("hints", "field", "says"),
    [
        ({"sise": 2}, "sise", "did you mean size"),
        ({"size": "two"}, "size", "takes an integer"),
        ({"segments": [1]}, "segments", "the prompt has"),
    ],
)
def test_malformed_hints_are_http_400(
    server: str, stream: bool, hints: Any, field: str, says: str
) -> None:
    for response in (
        chat(server, "hello", hints, stream=stream),
        complete(server, "hello there", hints, stream=stream),
    ):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == f"kv_transfer_params.tokendance.{field}"
        assert says in error["message"]


def test_the_separator_does_not_reach_the_model(server: str) -> None:
    pieces = ["Alpha remembers.\n", "Beta waits."]
    prompt = "<TTSEP>".join(pieces)
    separated = complete(server, prompt, return_token_ids=True).json()
    alone = [complete(server, text, return_token_ids=True).json() for text in pieces]
    ids = [reply["choices"][0]["prompt_token_ids"] for reply in alone]
    assert separated["choices"][0]["prompt_token_ids"] == ids[0] + ids[1]
    echoed = complete(server, prompt, echo=True).json()
    assert echoed["choices"][0]["text"].startswith("".join(pieces))
    assert separated["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])


def test_a_prompt_up_to_the_limit_is_not_shortened_by_separators(server: str) -> None:
    piece = "one two three four five six seven eight\n"
    size = complete(server, piece).json()["usage"]["prompt_tokens"]
    count = 1020 // size
    reply = complete(server, "<TTSEP>".join([piece] * count), max_tokens=1024 - count * size)
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == count * size


def test_batches_and_samples(server: str) -> None:
    reply = complete(server, ["a<TTSEP>b", "plain", "c<TTSEP>d"], n=2, temperature=1.0)
    assert reply.status_code == 200
    assert len(reply.json()["choices"]) == 6


def test_a_round_from_the_client(server: str) -> None:
    shared = [f"Agent {i} saw the water rise near bridge {i * 7} at noon.\n" * 8 for i in range(3)]
    private = {name: [f"You are {name} and you keep a diary.\n" * 3] for name in ("ali", "maria")}
    client = RoundClient(f"{server}/v1", max_tokens=3, temperature=0)
    result = client.round(shared, private, "What now?")
    assert set(result) == {"ali", "maria"}
    assert all(output.output_tokens == 3 for output in result.values())
    exact = client.round(shared, private, "What now?", mode="exact")
    assert all(output.reuse.tokens.get("sibling", 0) == 0 for output in exact.values())
