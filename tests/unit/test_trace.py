"""The trace reader, rendering and the row bound, against the shipped traces and small models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendance.bench.engine_process import CallResult, EngineSettings
from tokendance.bench.measure import BoundCounter, kl_divergence, rows_by_source
from tokendance.bench.render import Piece, Prompt, Renderer, chat_texts, messages
from tokendance.bench.trace import Part, Segment, Trace, TraceError

WORKLOADS = Path(__file__).parents[2] / "benchmarks" / "workloads"
FILES = sorted(WORKLOADS.glob("*/*.jsonl"))


class Words:
    """A tokenizer for tests: words and single marks, numbered as they come."""

    bos: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [
            self.ids.setdefault(t, len(self.ids)) for t in re.findall(r"\w{1,5}|\s|[^\w\s]", text)
        ]

    def chat(self, messages: list[dict[str, str]]) -> str:
        body = "".join(f"<{m['role']}>{m['content'].strip()}</>" for m in messages)
        return f"[{body}<assistant>"


HEADER = {
    "type": "trace",
    "format": "allgather-trace/1",
    "name": "t",
    "scenario": "s",
    "size": "small",
    "framework": "f",
    "agents": [{"id": "a", "name": "A"}, {"id": "b", "name": "B"}],
    "rounds": 2,
    "history_rounds": 1,
    "render": "concat",
}


def _segment(name: str, text: str = "Some text.\n") -> dict[str, Any]:
    return {"type": "segment", "id": name, "author": "a", "origin": "agent", "text": text}


def _request(round_: int, agent: str, *ids: str, output: str | None = None) -> dict[str, Any]:
    segments = [{"kind": "shared", "id": name} for name in ids]
    request = {"type": "request", "round": round_, "agent": agent, "arrival_ms": 0}
    return request | {"segments": segments} | ({"output": output} if output else {})


def _valid() -> list[dict[str, Any]]:
    return [
        dict(HEADER),
        _segment("env"),
        _request(0, "a", "env", output="out.a"),
        _segment("out.a"),
        _request(0, "b", "env"),
        _request(1, "b", "env", "out.a"),
    ]


def _write(tmp_path: Path, lines: list[Any]) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_trace_reads_completely(path: Path) -> None:
    raw = [json.loads(line) for line in path.read_text().splitlines()]
    texts = {x["id"]: x["text"] for x in raw if x["type"] == "segment"}
    wanted = [x for x in raw if x["type"] == "request"]
    rounds = list(Trace(path).rounds())
    assert [r.index for r in rounds] == list(range(raw[0]["rounds"]))
    requests = [request for r in rounds for request in r.requests]
    assert len(requests) == len(wanted)
    for got, want in zip(requests, wanted):
        assert (got.round, got.agent) == (want["round"], want["agent"])
        assert [p.segment.text for p in got.parts] == [texts[s["id"]] for s in want["segments"]]
        assert [p.kind for p in got.parts] == [s["kind"] for s in want["segments"]]
        answer = texts[want["output"]] if "output" in want else None  # an agent may stay silent
        assert (got.output.text if got.output else None) == answer


def test_a_fault_in_round_one_does_not_hold_back_round_zero(tmp_path: Path) -> None:
    lines: list[Any] = _valid()
    lines.append("{broken")
    rounds = Trace(_write(tmp_path, lines)).rounds()
    assert next(rounds).index == 0
    with pytest.raises(TraceError, match=r"line 7: not JSON"):
        next(rounds)


Edit = Callable[[list[Any]], Any]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda x: x.clear(), "the file is empty"),
        (lambda x: x.__setitem__(0, x[0] | {"format": "other/2"}), r"line 1: not a trace"),
        (lambda x: x[0].pop("rounds"), r"line 1: the field 'rounds' is missing"),
        (lambda x: x[0].__setitem__("rounds", "2"), r"'rounds' has to be int, it is '2'"),
        (lambda x: x[0].__setitem__("rounds", True), r"'rounds' has to be int, it is True"),
        (lambda x: x[0].__setitem__("rounds", -1), r"'rounds' must not be negative"),
        (lambda x: x[0].__setitem__("rounds", 0), r"at least one round"),
        (lambda x: x[0].__setitem__("rounds", 3), r"ends in round 1, the header promises 3"),
        (lambda x: x[0].__setitem__("rounds", 1), r"line 6: round 1, but the header promises 1"),
        (lambda x: x[0].__setitem__("agents", []), r"'agents' is empty"),
        (lambda x: x[0].__setitem__("agents", ["a"]), r"has to hold objects"),
        (lambda x: x[0]["agents"].append({"id": "a", "name": "C"}), r"two agents have the same id"),
        (lambda x: x[0].__setitem__("render", "xml"), r"one of concat, chat, it is 'xml'"),
        (lambda x: x[0].__setitem__("note", None), r"'note' is null"),
        (lambda x: x.__setitem__(1, "[1]"), r"line 2: a list; every line has to be a JSON object"),
        (lambda x: x[1].__setitem__("type", "text"), r"one of segment, request, it is 'text'"),
        (lambda x: x[2].__setitem__("ouput", "o"), r"line 3: unknown field 'ouput'.*'output'"),
        (lambda x: x.insert(2, x[1]), r"line 3: a second segment with the id 'env'"),
        (lambda x: x[1].__setitem__("text", " blank\n"), r"line 2: the text of 'env' has to begin"),
        (lambda x: x[1].__setitem__("text", ""), r"line 2: the text of 'env' has to begin"),
        (lambda x: x[1].__setitem__("text", "no newline"), r"exactly one newline"),
        (lambda x: x[1].__setitem__("text", "two\n\n"), r"exactly one newline"),
        (lambda x: x[2].__setitem__("agent", "z"), r"line 3: unknown agent 'z'"),
        (lambda x: x[2].__setitem__("segments", []), r"line 3: 'segments' is empty"),
        (lambda x: x[2]["segments"][0].__setitem__("id", "later"), r"unknown segment 'later'"),
        (lambda x: x[2]["segments"][0].__setitem__("kind", "own"), r"private, shared, task"),
        (lambda x: x.pop(3), r"line 3: the output 'out.a' of 'a' is not defined"),
        (lambda x: x[5].__setitem__("round", 2), r"line 6: a request of round 2 follows round 0"),
        (lambda x: x[2].__setitem__("round", 1), r"line 3: a request of round 1 follows round 0"),
        (lambda x: x[0].__setitem__("render", "chat"), r"begin with a role"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, edit: Edit, message: str) -> None:
    lines: list[Any] = json.loads(json.dumps(_valid()))
    edit(lines)
    with pytest.raises(TraceError, match=message):
        list(Trace(_write(tmp_path, lines)).rounds())


def test_a_private_text_has_one_reader(tmp_path: Path) -> None:
    lines = json.loads(json.dumps(_valid()))
    for index in (2, 4):
        lines[index]["segments"][0]["kind"] = "private"
    with pytest.raises(TraceError, match=r"line 5: 'env' is private for 'a' and for 'b'"):
        list(Trace(_write(tmp_path, lines)).rounds())


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot open the trace"):
        Trace(tmp_path / "none.jsonl")
    (tmp_path / "x").write_bytes(b"\xff\xfe\n")
    with pytest.raises(TraceError, match="line 1: the text is not UTF-8"):
        Trace(tmp_path / "x")


def test_the_valid_example_is_valid(tmp_path: Path) -> None:
    first, second = Trace(_write(tmp_path, _valid())).rounds()
    assert [r.output.id if r.output else None for r in first.requests] == ["out.a", None]
    assert [p.segment.id for p in second.requests[0].parts] == ["env", "out.a"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_rendering_by_segment_equals_rendering_the_joined_text(path: Path) -> None:
    words = Words()
    render = Renderer(words)
    for round_ in islice(Trace(path).rounds(), 3):
        for request in round_.requests:
            prompt = render(request)
            assert list(prompt.ids) == words.encode("".join(p.segment.text for p in request.parts))
            assert sum(prompt.lengths) == len(prompt.ids)


def test_a_bos_is_a_piece_of_its_own() -> None:
    words = Words()
    words.bos = (99,)
    request = next(Trace(FILES[0]).rounds()).requests[0]
    prompt = Renderer(words)(request)
    assert prompt.pieces[0] == Piece("task", (99,))
    assert prompt.ids[1:] == Renderer(Words())(request).ids


def _part(text: str, role: str | None = None) -> Part:
    return Part("shared", Segment(text, "a", "agent", text), role)


def test_chat_is_cut_at_the_segments() -> None:
    parts = [_part("Rules.\n", "system"), _part("Hello.\n", "user"), _part("More.\n")]
    assert messages(parts) == [
        {"role": "system", "content": "Rules.\n"},
        {"role": "user", "content": "Hello.\nMore.\n"},
    ]
    texts = chat_texts(parts, Words())
    assert (
        "".join(text for _, text in texts) == "[<system>Rules.</><user>Hello.\nMore.</><assistant>"
    )
    assert [t for k, t in texts if k == "shared"] == ["Rules.", "Hello.\n", "More."]


def test_a_template_that_drops_a_text_is_an_error() -> None:
    class Dropping(Words):
        def chat(self, messages: list[dict[str, str]]) -> str:
            return "nothing"

    with pytest.raises(TraceError, match="drops or changes the text"):
        chat_texts([_part("Hello.\n", "user")], Dropping())


_PIECES = st.lists(
    st.tuples(
        st.sampled_from(["private", "shared", "task"]), st.lists(st.integers(0, 1), max_size=6)
    ),
    min_size=1,
    max_size=5,
).filter(lambda pieces: any(ids for _, ids in pieces))


@settings(max_examples=80)
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), _PIECES, min_size=1), min_size=1, max_size=4)
)
def test_the_bound_counts_like_marking_rows_one_by_one(rounds: list[dict[str, Any]]) -> None:
    block = 4
    counter = BoundCounter(block)
    earlier: dict[str, list[int]] = {}
    for members in rounds:
        prompts = [
            Prompt(agent, tuple(Piece(k, tuple(ids)) for k, ids in pieces), ())
            for agent, pieces in members.items()
        ]
        plain = own = 0
        shared = []
        for prompt in prompts:
            rows = [kind for kind, ids in prompt.pieces for _ in ids]
            known = earlier.get(prompt.agent, [])
            cached = 0
            while (
                cached + block < len(rows)
                and list(prompt.ids[: cached + block]) == known[: cached + block]
            ):
                cached += block
            earlier[prompt.agent] = list(prompt.ids)
            plain += len(rows[cached:])
            own += sum(kind != "shared" for kind in rows[cached:])
            shared.append(sum(kind == "shared" for kind in rows[cached:]))
        assert counter.add(prompts) == (plain, own + max(shared))


def test_kl_against_the_definition() -> None:
    rng = np.random.default_rng(0)
    p = rng.normal(size=(3, 50)).astype(np.float32) * 4
    q = p + rng.normal(size=(3, 50)).astype(np.float32)
    a = np.exp(p.astype(np.float64)) / np.exp(p.astype(np.float64)).sum(-1, keepdims=True)
    b = np.exp(q.astype(np.float64)) / np.exp(q.astype(np.float64)).sum(-1, keepdims=True)
    np.testing.assert_allclose(kl_divergence(p, q), (a * np.log(a / b)).sum(-1), rtol=1e-4)
    assert (kl_divergence(p, p) == 0).all()


def _result(cached: int, outcome: dict[str, Any] | None) -> CallResult:
    return CallResult("x", 0.0, 0.0, (1,), 100, cached, outcome, slice(0, 0))


def test_rows_by_source_add_up_to_the_prompt() -> None:
    assert rows_by_source(_result(32, None)) == {"prefix": 32, "computed": 68}
    reported = {
        "tokendance": {"role": "follower", "rows": {"prefix": 32, "sibling": 40, "computed": 27}}
    }
    assert rows_by_source(_result(99, reported)) == {"prefix": 32, "sibling": 40, "computed": 28}
    ordinary = {"tokendance": {"role": "ordinary", "rows": {}, "reason": "alone"}}
    assert rows_by_source(_result(32, ordinary)) == {"prefix": 32, "computed": 68}


def test_the_two_sides_differ_in_the_connector_alone() -> None:
    plain, ours = (
        EngineSettings("m", tokendance=side, connector={"mode": "auto"}) for side in (0, 1)
    )
    arguments = ours.engine_arguments()
    assert arguments.pop("kv_transfer_config")["kv_connector"] == "TokenDanceConnector"
    assert plain.engine_arguments() == arguments
    environment = plain.environment()
    assert environment.pop("VLLM_PLUGINS") == ""
    assert ours.environment() == environment
