"""The round client against a small server that answers with what it was sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tokendance.client import AsyncRoundClient, RoundClient, RoundError, extra_body
from tokendance.prompt.hints import HintError
from tokendance.prompt.rounds import Round
from tokendance.prompt.separator import split_text

SHARED = ["Maria: closed.\n", "Ali: ferry <TTSEP> taken.\n"]
PRIVATE = {"maria": ["You are Maria.\n"], "ali": ["You are Ali.\n", "You waited.\n"]}


class Server(ThreadingHTTPServer):
    """Holds every request until `members` of them are there: a round must be concurrent."""

    def __init__(self, members: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.barrier = threading.Barrier(members)
        self.bodies: dict[str, dict[str, Any]] = {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        hints = body["kv_transfer_params"]["tokendance"]
        self.server.bodies[hints["agent"]] = body
        self.server.barrier.wait(timeout=20)
        if body.get("user") == "fail":
            error = {"message": "size: takes 1 to 9", "code": 400}
            return self._reply(400, {"error": error})
        text = f"{hints['agent']} acts.\n"
        chat = self.path.endswith("chat/completions")
        choice = {"message": {"content": text}} if chat else {"text": text}
        outcome = {"role": "follower", "reason": "", "rows": {"sibling": 7, "computed": 3}}
        self._reply(
            200,
            {
                "choices": [{**choice, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 2},
                "kv_transfer_params": {"tokendance": outcome} if chat else None,
            },
        )

    def _reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(members=2)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def check(server: Server, result: Any) -> None:
    assert list(result) == ["maria", "ali"]
    assert result.texts == ["maria acts.\n", "ali acts.\n"]
    assert result["ali"].reuse.reused == 7
    assert result["ali"].reuse.role == "follower"
    maria, ali = server.bodies["maria"], server.bodies["ali"]
    assert maria["model"] == "tiny" and maria["max_tokens"] == 5
    assert maria["messages"][0] == {"role": "system", "content": "Be brief."}
    assert split_text(maria["messages"][-1]["content"]) == [*PRIVATE["maria"], *SHARED, "Act."]
    assert split_text(ali["messages"][-1]["content"]) == [*PRIVATE["ali"], SHARED[1], "Act."]
    hints = ali["kv_transfer_params"]["tokendance"]
    assert hints == {"session": "town", "round": 1, "agent": "ali", "size": 2}


def test_a_round(server: Server) -> None:
    client = RoundClient(url(server), session="town", max_tokens=5)
    result = client.round(
        SHARED, PRIVATE, "Act.", order={"ali": [1]}, system={"maria": "Be brief."}
    )
    check(server, result)
    client.round(SHARED, PRIVATE, mode="exact")
    hints = server.bodies["maria"]["kv_transfer_params"]["tokendance"]
    assert (hints["round"], hints["mode"]) == (2, "exact")


def test_a_round_in_asyncio(server: Server) -> None:
    client = AsyncRoundClient(url(server), session="town", max_tokens=5)
    result = asyncio.run(
        client.round(SHARED, PRIVATE, "Act.", order={"ali": [1]}, system={"maria": "Be brief."})
    )
    check(server, result)


def test_plain_completions_and_a_server_without_reuse(server: Server) -> None:
    result = RoundClient(url(server), model="m", chat=False).round(SHARED, PRIVATE)
    assert split_text(server.bodies["ali"]["prompt"]) == [*PRIVATE["ali"], *SHARED]
    assert result["maria"].text == "maria acts.\n"
    assert result["maria"].reuse.reused == 0
    assert result["maria"].reuse.role == "ordinary"


def test_a_refusal_names_the_agent_and_the_reason(server: Server) -> None:
    client = RoundClient(url(server), model="m", user="fail")
    with pytest.raises(RoundError, match=r"maria: HTTP 400: size: takes 1 to 9") as caught:
        client.round(SHARED, PRIVATE)
    assert caught.value.agent == "maria"


def test_extra_body() -> None:
    assert extra_body(round=3, agent="maria", size=8) == {
        "kv_transfer_params": {"tokendance": {"round": 3, "agent": "maria", "size": 8}}
    }
    with pytest.raises(HintError, match="size"):
        extra_body(round=3, agent="maria", size=0)


@pytest.mark.parametrize(
    ("private", "order", "says"),
    [
        ({}, {}, "at least one agent"),
        ({"a": []}, {"b": [0]}, "'b', who is not"),
        ({"a": []}, {"a": [0, 2]}, r"blocks \[2\] of 2"),
    ],
)
def test_rounds_that_make_no_sense(private: Any, order: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Round(SHARED, private, order=order)
