"""`tokendance serve` as a real server: hints, errors and separators over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from tokendance.cli.model import ensure_model  # noqa: E402
from tokendance.client import RoundClient  # noqa: E402

START_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    flags = ["--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}']
    flags += ["--max-model-len", "1024", "--enforce-eager", "--port", str(port)]
    flags += ["--served-model-name", "tiny", "--td-linger-ms", "20"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("tokendance"), "serve", str(ensure_model()), *flags],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail("the server did not start:\n" + log.read_text()[-4000:])


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
