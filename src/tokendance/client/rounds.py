"""RoundClient: sends a whole round to a server and collects everybody's answers (M3)."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tokendance.client.hints import extra_body
from tokendance.prompt.rounds import Round
from tokendance.prompt.separator import SEPARATOR


class RoundError(RuntimeError):
    """A request of the round failed; `agent` is whose, the text is the server's message."""

    def __init__(self, agent: str, message: str) -> None:
        super().__init__(f"{agent}: {message}")
        self.agent = agent


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the server did for a prompt.

    role: "leader", "follower" or "ordinary". reason: why nothing was reused; empty if something
    was. tokens: prompt tokens by where their K/V came from.
    """

    role: str = "ordinary"
    reason: str = "the server says nothing about reuse"
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(count for source, count in self.tokens.items() if source != "computed")


@dataclass(frozen=True, slots=True)
class AgentOutput:
    """One agent's answer."""

    agent: str
    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class RoundResult(Mapping[str, AgentOutput]):
    """Answers by agent, in the order of the round."""

    outputs: Mapping[str, AgentOutput]

    def __getitem__(self, agent: str) -> AgentOutput:
        return self.outputs[agent]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def texts(self) -> list[str]:
        """Everybody's texts: what the next round shares."""
        return [output.text for output in self.outputs.values()]


class _Rounds:
    """What both clients have in common: from a round to requests, from replies to outputs."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        session: str | None = None,
        api_key: str | None = None,
        separator: str = SEPARATOR,
        chat: bool = True,
        backend: str | None = None,
        timeout_s: float = 600.0,
        **sampling: Any,
    ) -> None:
        """Rounds of one session against one server.

        base_url: the address that an OpenAI client would get, ending in /v1.
        model: name of the served model; None asks the server.
        session: name of the session; None makes one up.
        chat: send chat messages; otherwise plain completions.
        backend: recovery backend of every request; None leaves it to the server.
        sampling: sent with every request, for instance max_tokens=64.
        """
        self.session = session or uuid.uuid4().hex
        self._model = model
        self._separator = separator
        self._chat = chat
        self._backend = backend
        self._sampling = sampling
        self._numbers = itertools.count(1)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "headers": headers,
            "timeout": timeout_s,
        }

    @property
    def _path(self) -> str:
        return "/chat/completions" if self._chat else "/completions"

    def _payloads(
        self, round_: Round, system: Mapping[str, str], mode: str | None
    ) -> dict[str, dict[str, Any]]:
        number = next(self._numbers)
        payloads = {}
        for agent in round_.agents:
            text = round_.text(agent, self._separator)
            hints = extra_body(
                session=self.session,
                round=number,
                agent=agent,
                size=len(round_.agents),
                mode=mode,
                backend=self._backend,
            )
            body: dict[str, Any] = {"model": self._model, **self._sampling, **hints}
            if self._chat:
                first = [{"role": "system", "content": system[agent]}] if agent in system else []
                body["messages"] = [*first, {"role": "user", "content": text}]
            else:
                body["prompt"] = text
            payloads[agent] = body
        return payloads

    def _output(self, agent: str, response: httpx.Response) -> AgentOutput:
        if response.is_error:
            raise RoundError(agent, _message(response))
        reply = response.json()
        choice = reply["choices"][0]
        text = choice["message"]["content"] if self._chat else choice["text"]
        outcome = (reply.get("kv_transfer_params") or {}).get("tokendance")
        usage = reply.get("usage") or {}
        return AgentOutput(
            agent=agent,
            text=text or "",
            finish_reason=choice.get("finish_reason") or "",
            prompt_tokens=usage.get("prompt_tokens", 0),
            output_tokens=usage.get("completion_tokens", 0),
            reuse=Reuse(outcome["role"], outcome["reason"], outcome["rows"])
            if outcome
            else Reuse(),
        )


class RoundClient(_Rounds):
    """Sends rounds and waits for them; every agent's request in a thread of its own.

    client = RoundClient("http://localhost:8000/v1", max_tokens=64)
    result = client.round(
        shared=["Maria: the bridge is closed.\\n", "Ali: take the ferry.\\n"],
        private={"maria": ["You are Maria.\\n"], "ali": ["You are Ali.\\n"]},
        task="What do you do next?",
    )
    result["maria"].text, result["maria"].reuse.reused
    """

    def round(
        self,
        shared: Sequence[str],
        private: Mapping[str, Sequence[str]],
        task: str = "",
        *,
        order: Mapping[str, Sequence[int]] | None = None,
        system: Mapping[str, str] | None = None,
        mode: str | None = None,
    ) -> RoundResult:
        """Run one round (see `tokendance.prompt.rounds.Round`). Raises RoundError.

        system: system messages by agent, in chat. mode: "exact" to take no K/V of other requests.
        """
        round_ = Round(shared, private, task, order or {})
        with httpx.Client(**self._options) as http, ThreadPoolExecutor(len(private)) as pool:
            if self._model is None:
                self._model = _first_model(http.get("/models"))
            payloads = self._payloads(round_, system or {}, mode)
            sent = {
                agent: pool.submit(http.post, self._path, json=body)
                for agent, body in payloads.items()
            }
            return RoundResult({a: self._output(a, reply.result()) for a, reply in sent.items()})


class AsyncRoundClient(_Rounds):
    """RoundClient for asyncio."""

    async def round(
        self,
        shared: Sequence[str],
        private: Mapping[str, Sequence[str]],
        task: str = "",
        *,
        order: Mapping[str, Sequence[int]] | None = None,
        system: Mapping[str, str] | None = None,
        mode: str | None = None,
    ) -> RoundResult:
        """Run one round; see RoundClient.round."""
        round_ = Round(shared, private, task, order or {})
        async with httpx.AsyncClient(**self._options) as http:
            if self._model is None:
                self._model = _first_model(await http.get("/models"))
            payloads = self._payloads(round_, system or {}, mode)
            replies = await asyncio.gather(
                *(http.post(self._path, json=body) for body in payloads.values())
            )
        pairs = zip(payloads, replies, strict=True)
        return RoundResult({agent: self._output(agent, reply) for agent, reply in pairs})


def _first_model(response: httpx.Response) -> str:
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"HTTP {response.status_code}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:200]}"
