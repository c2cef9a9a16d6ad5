"""Agents that come late or one after another, and prompts that nobody has marked (M4, M25, M26)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from audit import audited  # noqa: E402
from small_engine import Engine, make_round, outcome, tokens, words  # noqa: E402

OPTIONS = {"min_shared_tokens": 16, "round_timeout_ms": 300.0, "keep_leaders": 2}


@pytest.fixture(scope="module")
def shared_engine(start_engine: Callable[..., Any]) -> Iterator[Engine]:
    with start_engine(options=OPTIONS, num_gpu_blocks_override=96) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    shared_engine.forget()
    with audited(shared_engine):
        yield shared_engine
    assert len(shared_engine.book) == 0
    assert shared_engine.book.kept <= 2


def role(output: Any) -> str:
    return str(outcome(output).get("role"))


def unmarked(seed: int, agents: int) -> list[list[int]]:
    """Prompts of one round as an unchanged framework sends them: nothing but token ids."""
    return [member.prompt for member in make_round(seed, agents)]


def test_late_member_takes_the_region_of_a_leader_that_has_finished(engine: Engine) -> None:
    members = make_round(1, 4)
    early = engine.answers([engine.add(*member) for member in members[:3]])
    assert sorted(role(o) for o in early) == ["follower", "follower", "leader"]
    late = engine.ask(*members[3])
    assert role(late) == "follower"
    assert outcome(late)["rows"]["sibling"] >= 200


def test_agents_asked_one_after_another_form_a_round(engine: Engine) -> None:
    outputs = [engine.ask(*member._replace()) for member in make_round(2, 4, size=1)]
    assert [role(o) for o in outputs[1:]] == ["follower"] * 3


def test_unmarked_prompts_find_one_another_by_content(engine: Engine) -> None:
    prompts = unmarked(3, 4)
    outputs = engine.answers([engine.add(prompt) for prompt in prompts])
    assert sorted(role(o) for o in outputs) == [*["follower"] * 3, "leader"]
    assert sum(outcome(o)["rows"].get("sibling", 0) for o in outputs) >= 3 * 200


def test_unmarked_prompts_one_after_another(engine: Engine) -> None:
    outputs = [engine.ask(prompt) for prompt in unmarked(4, 3)]
    assert outputs[0].kv_transfer_params is None  # a stranger, as far as anybody knew
    assert [role(o) for o in outputs[1:]] == ["follower"] * 2


def test_a_quotation_with_other_tokens_at_its_edges(engine: Engine) -> None:
    random = Random(5)
    text = words(random, 120)
    quoted = [*words(random, 2), *text[2:-2], *words(random, 2)]
    engine.ask([*words(random, 40), *text, *words(random, 9)])
    output = engine.ask([*words(random, 47), *quoted, *words(random, 9)])
    assert outcome(output)["rows"]["sibling"] == len(text) - 4


def test_exact_requests_take_nothing_from_a_kept_leader(engine: Engine) -> None:
    members = make_round(6, 3)
    engine.answers([engine.add(*member) for member in members[:2]])
    exact = members[2].hints | {"mode": "exact"}
    first = engine.ask(members[2].prompt, exact, logprobs=5)
    engine.forget()
    alone = engine.ask(members[2].prompt, exact, logprobs=5)
    assert tokens(first) == tokens(alone)
    assert first.outputs[0].logprobs == alone.outputs[0].logprobs
    assert first.kv_transfer_params is None


def test_pages_that_the_engine_has_given_away_are_no_source(engine: Engine) -> None:
    members = make_round(7, 3)
    engine.answers([engine.add(*member) for member in members[:2]])
    random = Random(8)
    for _ in range(4):  # 4 x 32 pages through a pool of 96
        engine.ask(words(random, 1000), {"mode": "exact"})
    late = engine.ask(*members[2])
    assert role(late) == "ordinary" and "rows" not in outcome(late)


def test_another_tenant_finds_nothing(engine: Engine) -> None:
    prompts = unmarked(9, 2)
    engine.ask(prompts[0], salt="a")
    assert engine.ask(prompts[1], salt="b").kv_transfer_params is None
    assert role(engine.ask(prompts[1], salt="a")) == "follower"


def test_the_same_round_again_is_a_round_of_its_own(engine: Engine) -> None:
    for seed in (10, 11):
        members = make_round(seed, 3, session="again")
        outputs = engine.answers([engine.add(*member) for member in members])
        assert sorted(role(o) for o in outputs) == ["follower", "follower", "leader"]
