"""A real server under concurrent rounds, aborts, missing members and mixed load, over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from http_server import running_server  # noqa: E402

TIMEOUT_S = 240
POOL_PAGES = 160


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--block-size", "32", "--num-gpu-blocks-override", str(POOL_PAGES)]
    flags += ["--td-round-timeout-ms", "1500"]
    with running_server(folder, *flags) as url:
        yield url


WORDS = [f"{a}{b}" for a in ("ri", "mo", "ta", "ke", "lu") for b in ("ver", "on", "sk", "lin")]


def words(random: Random, count: int) -> str:
    return " ".join(random.choice(WORDS) for _ in range(count)) + "\n"


def round_texts(seed: int, agents: int) -> list[list[str]]:
    """Per agent: history, shared blocks, task."""
    random = Random(seed)
    shared = [words(random, 25) for _ in range(3)]
    return [[words(random, 15 + 2 * i), *shared, "And now?"] for i in range(agents)]


def body(pieces: list[str], hints: Any = None, *, is_chat: bool, **more: Any) -> dict[str, Any]:
    text = "<TTSEP>".join(pieces)
    payload: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0, **more}
    payload |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    if hints is not None:
        payload["kv_transfer_params"] = {"tokendance": hints}
    return payload


async def ask(client: httpx.AsyncClient, payload: dict[str, Any]) -> dict[str, Any]:
    """One call, streaming or not: its text and what the server says about reuse."""
    path = "/v1/chat/completions" if "messages" in payload else "/v1/completions"
    if not payload.get("stream"):
        response = await client.post(path, json=payload)
        assert response.status_code == 200, response.text
        reply = response.json()
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "messages" in payload else choice["text"]
        return {"text": text, **((reply["kv_transfer_params"] or {}).get("tokendance") or {})}
    text = ""
    async with client.stream("POST", path, json=payload) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return {"text": text}


def together(server: str, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All calls at once."""

    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server, timeout=TIMEOUT_S, limits=limits) as client:
            return list(await asyncio.gather(*(ask(client, payload) for payload in payloads)))

    return asyncio.run(run())


def metric(server: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels."""
    total = 0.0
    for line in httpx.get(f"{server}/metrics").text.splitlines():
        match = re.match(r"([\w:]+)(?:\{(.*)\})? (\S+)$", line)
        if match and match[1] == name:
            wanted = (f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            total += float(match[3]) if all(wanted) else 0.0
    return total


def idle(server: str) -> None:
    """Nothing is running or waiting, and no page is held."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if all(metric(server, f"vllm:{name}") == 0 for name in names):
            return
        # The counters move only with a step.
        together(server, [body(["tick"], is_chat=False, max_tokens=1)])
        time.sleep(0.2)
    pytest.fail("requests or pages are left over")


def hints(seed: int, agent: int, size: int) -> dict[str, Any]:
    return {"session": f"s{seed}", "round": 1, "agent": f"a{agent}", "size": size}


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("hinted", [True, False])
def test_a_round_reuses_and_answers(server: str, is_chat: bool, hinted: bool) -> None:
    seed = 10 + 2 * is_chat + hinted
    texts = round_texts(seed, 5)
    payloads = [
        body(pieces, hints(seed, i, 5) if hinted else None, is_chat=is_chat)
        for i, pieces in enumerate(texts)
    ]
    replies = together(server, payloads)
    assert sum(reply.get("role") == "follower" for reply in replies) == 4
    for payload, reply in zip(payloads, replies):
        if reply["role"] == "leader":  # exact: what the server answers without reuse
            payload["kv_transfer_params"] = {"tokendance": {"mode": "exact"}}
            assert together(server, [payload])[0]["text"] == reply["text"]
    idle(server)


def test_streaming_members_join_too(server: str) -> None:
    before = metric(server, "tokendance:rows_total", source="sibling")
    texts = round_texts(20, 4)
    payloads = [
        body(pieces, hints(20, i, 4), is_chat=True, stream=True) for i, pieces in enumerate(texts)
    ]
    assert all(reply["text"] for reply in together(server, payloads))
    assert metric(server, "tokendance:rows_total", source="sibling") - before > 3 * 50
    idle(server)


def test_a_member_that_never_comes_holds_nobody_for_long(server: str) -> None:
    texts = round_texts(30, 3)
    started = time.monotonic()
    replies = together(
        server, [body(p, hints(30, i, 4), is_chat=False) for i, p in enumerate(texts)]
    )
    assert 1.4 < time.monotonic() - started < 60
    assert sum(reply.get("role") == "follower" for reply in replies) == 2
    idle(server)


def test_a_client_that_hangs_up_in_the_middle_of_a_round(server: str) -> None:
    texts = round_texts(40, 4)

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server, timeout=TIMEOUT_S) as client:
            payloads = [
                body(p, hints(40, i, 5), is_chat=False, max_tokens=20) for i, p in enumerate(texts)
            ]
            tasks = [asyncio.create_task(ask(client, payload)) for payload in payloads]
            await asyncio.sleep(0.5)  # the fifth never comes: all four still wait
            tasks[0].cancel()
            return list(await asyncio.gather(*tasks[1:]))

    replies = asyncio.run(run())
    assert len(replies) == 3 and all(reply["text"] for reply in replies)
    assert sum(reply.get("role") == "follower" for reply in replies) == 2
    idle(server)


def test_two_hundred_mixed_requests_at_once(server: str) -> None:
    """Rounds with and without hints, strangers, exact and streaming requests, a scarce pool."""
    random = Random(50)
    payloads: list[dict[str, Any]] = []
    for seed in range(60, 80):
        size = random.randrange(2, 9)
        for agent, pieces in enumerate(round_texts(seed, size)):
            note: Any = random.choice((None, hints(seed, agent, size), {"mode": "exact"}))
            is_chat, stream = random.random() < 0.5, random.random() < 0.2
            payloads.append(body(pieces, note, is_chat=is_chat, stream=stream))
    while len(payloads) < 200:
        payloads.append(body([words(random, random.randrange(1, 60))], is_chat=False))
    random.shuffle(payloads)
    replies = together(server, payloads[:200])
    exact = [
        (payload, reply)
        for payload, reply in zip(payloads, replies)
        if reply.get("role") != "follower" and not payload.get("stream")
    ]
    assert len(exact) >= 40
    for payload, reply in random.sample(exact, 12):
        again = payload | {"kv_transfer_params": {"tokendance": {"mode": "exact"}}}
        assert together(server, [again])[0]["text"] == reply["text"]
    assert metric(server, "tokendance:pass_failures_total") == 0
    idle(server)
