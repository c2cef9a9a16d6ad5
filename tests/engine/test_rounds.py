"""Rounds on a real vLLM: who waits, who leads, what is reused and what the response says.

Every pass is audited (see audit.py): a row that does not hold what it should fails the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from audit import Audit, audited  # noqa: E402
from small_engine import BLOCK, Engine, Member, make_round, outcome, tokens, words  # noqa: E402

OPTIONS = {"min_shared_tokens": 16, "round_timeout_ms": 300.0, "linger_ms": 50.0}
SHARED = 70 + 50 + 90 + 8
"""Rows of make_round's blocks and of its tail but the last, which vLLM computes itself."""


@pytest.fixture(scope="module")
def shared_engine(start_engine: Callable[..., Any]) -> Iterator[Engine]:
    with start_engine(
        options=OPTIONS, disable_log_stats=False, scheduling_policy="priority"
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine, with nothing in it before and after."""
    shared_engine.forget()
    shared_engine.counters()
    free = shared_engine.free_blocks
    yield shared_engine
    shared_engine.run()
    assert shared_engine.free_blocks == free
    assert len(shared_engine.book) == 0


@pytest.fixture
def audit(engine: Engine) -> Iterator[Audit]:
    with audited(engine) as audit:
        yield audit


def send(engine: Engine, members: list[Member], **options: Any) -> list[str]:
    return [engine.add(*member, **options) for member in members]


def roles(outputs: list[Any]) -> list[str]:
    return [outcome(output).get("role", "-") for output in outputs]


def exact_tokens(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    """What vLLM answers on its ordinary path, with an empty cache."""
    engine.forget()
    return tokens(engine.ask_exactly(prompt, **options))


# -- who waits -------------------------------------------------------------------------------------


def test_announced_round_waits_for_its_members(engine: Engine, audit: Audit) -> None:
    members = make_round(1, 4)
    first = send(engine, members[:3])
    engine.steps(3)
    assert audit.members == 0
    outputs = engine.answers([*first, *send(engine, members[3:])])
    assert roles(outputs) == ["leader", *["follower"] * 3]
    for member, output in zip(members[1:], outputs[1:]):
        told = outcome(output)
        private = len(member.prompt) - 1 - SHARED
        assert told["rows"] == {"sibling": SHARED, "computed": private}
        assert told["confirmed"] is True and told["reason"] == ""
    assert outcome(outputs[0])["rows"] == {"computed": len(members[0].prompt) - 1}
    assert [len(plan.members) for plan in audit.plans] == [4]
    assert tokens(outputs[0]) == exact_tokens(engine, members[0].prompt)


def test_a_member_that_never_comes_does_not_hold_the_others(engine: Engine, audit: Audit) -> None:
    members = make_round(2, 4)
    started = time.monotonic()
    outputs = engine.answers(send(engine, members[:3]))
    assert time.monotonic() - started >= OPTIONS["round_timeout_ms"] / 1000
    assert roles(outputs) == ["leader", "follower", "follower"]


def test_requests_outside_a_round_are_not_delayed(engine: Engine, audit: Audit) -> None:
    waiting = send(engine, make_round(3, 2)[:1])
    exact = make_round(4, 2, mode="exact")
    strangers = [engine.add(words(Random(5), 90), max_tokens=3), *send(engine, exact[:1])]
    for _ in range(5):
        engine.step()
    assert set(strangers) <= set(engine.finished)
    assert waiting[0] not in engine.finished
    assert roles(engine.answers([*strangers, *waiting])) == ["-", "-", "ordinary"]


def test_late_joiner_takes_from_a_live_leader(engine: Engine, audit: Audit) -> None:
    members = make_round(6, 4, size=3)
    early = send(engine, members[:3], max_tokens=60)
    engine.steps(4)
    assert audit.members == 3
    (late,) = engine.answers(send(engine, members[3:]))
    assert audit.members == 4 and not set(early) & set(engine.finished)
    assert outcome(late)["role"] == "follower"
    assert outcome(late)["rows"]["sibling"] == SHARED


def test_whoever_comes_after_the_round_starts_at_once(engine: Engine, audit: Audit) -> None:
    members = make_round(7, 3, size=2)
    engine.answers(send(engine, members[:2]))
    (late,) = send(engine, members[2:], max_tokens=1)
    started = time.monotonic()
    engine.answers([late])
    assert time.monotonic() - started < OPTIONS["round_timeout_ms"] / 1000


# -- rounds without hints --------------------------------------------------------------------------


def marked(members: list[Member]) -> list[Member]:
    return [Member(m.prompt, {"segments": m.hints["segments"]}) for m in members]


def test_marked_segments_form_a_round(engine: Engine, audit: Audit) -> None:
    members = marked(make_round(8, 3))
    outputs = engine.answers(send(engine, members))
    assert sorted(roles(outputs)) == ["follower", "follower", "leader"]
    assert [len(plan.members) for plan in audit.plans] == [3]


def test_separated_text_forms_a_round(engine: Engine, audit: Audit) -> None:
    said = [f"Agent {i} reports: " + "the river rises, bring sandbags. " * 6 for i in range(3)]
    texts = [
        "<TTSEP>".join([f"You are agent {i}. " * (4 + i), *said, "Now act."]) for i in range(3)
    ]
    outputs = engine.answers([engine.add(text) for text in texts])
    assert sorted(roles(outputs)) == ["follower", "follower", "leader"]
    tokenizer = engine.llm.get_tokenizer()
    assert [tokenizer.decode(o.prompt_token_ids) for o in outputs] == [
        text.replace("<TTSEP>", "") for text in texts
    ]
    assert all(outcome(o)["rows"]["sibling"] > 100 for o in outputs if outcome(o)["role"][0] == "f")


def test_marked_request_alone_goes_on_after_a_moment(engine: Engine, audit: Audit) -> None:
    (output,) = engine.answers(send(engine, marked(make_round(9, 1))))
    assert audit.members == 0
    assert outcome(output)["role"] == "ordinary" and outcome(output)["reason"]
    assert tokens(output) == exact_tokens(engine, make_round(9, 1)[0].prompt)


def test_unrelated_marked_requests_stay_apart(engine: Engine, audit: Audit) -> None:
    members = [marked(make_round(seed, 1))[0] for seed in (10, 11, 12)]
    outputs = engine.answers(send(engine, members))
    assert audit.members == 0
    assert roles(outputs) == ["ordinary"] * 3


def test_chats_without_hints(engine: Engine, audit: Audit) -> None:
    heard = [{"role": "user", "content": f"Agent {i}: " + "we meet at noon. " * 12} for i in (1, 2)]
    chats = [
        [{"role": "system", "content": f"You are agent {i}. " + "Be kind. " * i}, *heard]
        for i in range(3)
    ]
    params = engine.params(None, max_tokens=4)
    outputs = engine.llm.chat(chats, params, use_tqdm=False)
    assert sorted(roles(outputs)) == ["follower", "follower", "leader"]
    leader = next(o for o in outputs if outcome(o)["role"] == "leader")
    assert tokens(leader) == exact_tokens(engine, list(leader.prompt_token_ids))


# -- odd members -----------------------------------------------------------------------------------


def test_several_samples_per_request(engine: Engine, audit: Audit) -> None:
    members = make_round(13, 3)
    outputs = engine.answers(send(engine, members, n=2, temperature=0.7, seed=5))
    assert all(len(output.outputs) == 2 for output in outputs)
    (plan,) = audit.plans
    assert len({member.agent for member in plan.members}) == 3
    assert sum(bool(member.copies) for member in plan.members) >= 4


def test_equal_prompts_of_two_agents(engine: Engine, audit: Audit) -> None:
    members = make_round(14, 3)
    twin = Member(members[1].prompt, {**members[2].hints, "segments": members[1].hints["segments"]})
    outputs = engine.answers(send(engine, [members[0], members[1], twin], max_tokens=6))
    assert tokens(outputs[1]) == tokens(outputs[2])
    leader = roles(outputs).index("leader")
    prompt = outputs[leader].prompt_token_ids
    assert tokens(outputs[leader]) == exact_tokens(engine, prompt, max_tokens=6)


def test_all_prompts_equal(engine: Engine, audit: Audit) -> None:
    """Nothing is approximate, so everybody gets the exact answer."""
    (first, *_) = make_round(15, 3)
    members = [Member(first.prompt, {**first.hints, "agent": f"a{i}"}) for i in range(3)]
    outputs = engine.answers(send(engine, members))
    wanted = exact_tokens(engine, first.prompt)
    assert [tokens(output) for output in outputs] == [wanted] * 3


@pytest.mark.parametrize("length", [1, 2, 3, BLOCK, BLOCK + 1])
def test_short_prompts(engine: Engine, audit: Audit, length: int) -> None:
    hints = {"session": "short", "round": f"r{length}", "size": 3}
    prompt = words(Random(length), length)
    outputs = engine.answers([engine.add(prompt, {**hints, "agent": str(i)}) for i in range(3)])
    wanted = exact_tokens(engine, prompt)
    assert [tokens(output) for output in outputs] == [wanted] * 3


def test_private_history_from_the_prefix_cache(engine: Engine, audit: Audit) -> None:
    members = make_round(16, 3, private=100)
    for member in members:
        engine.ask_exactly(member.prompt[:100], max_tokens=1)
    outputs = engine.answers(send(engine, members))
    assert [outcome(o)["rows"]["prefix"] for o in outputs] == [96, 96, 96]
    assert outcome(outputs[2])["rows"] == {"prefix": 96, "sibling": SHARED, "computed": 10}


@pytest.mark.parametrize("cached", [0, 1, 2])
def test_whole_prompt_in_the_prefix_cache(engine: Engine, audit: Audit, cached: int) -> None:
    """One member, the leader or a follower, finds all its rows in the prefix cache."""
    members = make_round(17, 3, private=38)
    members = [Member(m.prompt[: len(m.prompt) // BLOCK * BLOCK + 1], m.hints) for m in members]
    members = [Member(m.prompt, cut_segments(m)) for m in members]
    wanted = tokens(engine.ask_exactly(members[cached].prompt))
    outputs = engine.answers(send(engine, members))
    assert tokens(outputs[cached]) == wanted
    assert sorted(roles(outputs)).count("follower") >= 1


def cut_segments(member: Member) -> dict[str, Any]:
    lengths, left = [], len(member.prompt)
    for length in member.hints["segments"]:
        if left:
            lengths.append(min(length, left))
            left -= lengths[-1]
    return {**member.hints, "segments": lengths}


def test_prompt_logprobs_take_the_ordinary_path(engine: Engine, audit: Audit) -> None:
    """vLLM computes every row of such a prompt, so that reuse has nothing to offer."""
    members = make_round(18, 3)
    names = [engine.add(*members[0]), engine.add(*members[1], prompt_logprobs=0)]
    outputs = engine.answers([*names, engine.add(*members[2])])
    assert outcome(outputs[1])["role"] == "ordinary"
    assert tokens(outputs[1]) == exact_tokens(engine, members[1].prompt)
    assert len(outputs[1].prompt_logprobs) == len(members[1].prompt)
    assert outcome(outputs[2])["role"] == "follower"


def test_one_output_token(engine: Engine, audit: Audit) -> None:
    members = make_round(19, 3)
    outputs = engine.answers(send(engine, members, max_tokens=1))
    assert roles(outputs) == ["leader", "follower", "follower"]
    assert [outcome(o)["confirmed"] for o in outputs] == [False] * 3
    assert tokens(outputs[0]) == exact_tokens(engine, members[0].prompt, max_tokens=1)


def test_tenants_share_nothing(engine: Engine, audit: Audit) -> None:
    members = make_round(20, 2)
    names = [engine.add(*member, salt=f"tenant{i}") for i, member in enumerate(members)]
    outputs = engine.answers(names)
    assert audit.members == 0
    assert roles(outputs) == ["ordinary", "ordinary"]


def test_priorities(engine: Engine, audit: Audit) -> None:
    """vLLM asks for the urgent request first, whoever came first."""
    members = make_round(21, 4)
    names = [engine.add(*m, priority=4 - i) for i, m in enumerate(members)]
    stranger = engine.add(words(Random(3), 80), priority=0)
    outputs = engine.answers([*names, stranger])
    assert sorted(roles(outputs)) == ["-", "follower", "follower", "follower", "leader"]


# -- leaders ---------------------------------------------------------------------------------------


def next_round(members: list[Member], outputs: list[Any], number: int) -> list[Member]:
    """Everybody reads what everybody said, after their own history."""
    said = [tokens(output) for output in outputs]
    following = []
    for member in members:
        segments = [len(member.prompt), *map(len, said)]
        prompt = member.prompt + [token for text in said for token in text]
        hints = {**member.hints, "round": str(number), "segments": segments}
        following.append(Member(prompt, hints))
    return following


def test_the_leader_stays_from_round_to_round(engine: Engine, audit: Audit) -> None:
    members = make_round(22, 3)
    for number in (2, 3, 4):
        outputs = engine.answers(send(engine, members, max_tokens=40))
        leaders = [m.hints["agent"] for m, o in zip(members, outputs) if "leader" in roles([o])]
        assert leaders == ["a0"]
        members = next_round(members, outputs, number)[::-1]


def test_leader_behind_a_follower_with_the_same_first_page(engine: Engine, audit: Audit) -> None:
    """The leader's prefix hit is a page that a follower has yet to compute in the same pass."""
    members = make_round(23, 3, system=2 * BLOCK)
    engine.answers(send(engine, members))
    engine.forget()
    again = [Member(m.prompt, {**m.hints, "round": "2"}) for m in members[::-1]]
    outputs = engine.answers(send(engine, again))
    assert roles(outputs) == ["follower", "follower", "leader"]
    assert tokens(outputs[2]) == exact_tokens(engine, members[0].prompt)


def test_two_rounds_with_the_same_first_page(engine: Engine, audit: Audit) -> None:
    """Members of two rounds alternate, each round's first page is computed by the other one."""
    one = make_round(24, 3, system=2 * BLOCK)
    two = make_round(25, 3, system=2 * BLOCK)
    system = one[0].prompt[: 2 * BLOCK]
    two = [Member(system + m.prompt[2 * BLOCK :], m.hints) for m in two]
    for left, right in ((one, two), (two[::-1], one)):
        names = send(engine, [left[0], *right[:2], *left[1:], right[2]])
        engine.answers(names)
        engine.forget()
    assert audit.members >= 8


def test_leader_whose_prompt_a_stranger_computes_in_the_same_step(
    engine: Engine, audit: Audit
) -> None:
    """The leader's rows are all in the prefix cache, but their pages are still empty."""
    members = make_round(26, 3)
    prompt = members[0].prompt[: len(members[0].prompt) // BLOCK * BLOCK + 1]
    leader = Member(prompt, cut_segments(Member(prompt, members[0].hints)))
    stranger = engine.add(prompt, priority=-1)
    outputs = engine.answers([stranger, *send(engine, [leader, *members[1:]])])
    assert tokens(outputs[1]) == tokens(outputs[0]) == exact_tokens(engine, prompt)


# -- numbers ---------------------------------------------------------------------------------------


def test_counters_add_up(engine: Engine, audit: Audit) -> None:
    members = make_round(27, 4)
    engine.ask_exactly(members[3].prompt[:BLOCK], max_tokens=1)
    lonely = make_round(28, 1)
    outputs = engine.answers([*send(engine, members), *send(engine, lonely)])
    counted = engine.counters()
    rows = {k.split("/")[1]: v for k, v in counted.items() if k.startswith("tokendance:rows_total")}
    assert sum(rows.values()) == sum(len(m.prompt) - 1 for m in members)
    told: dict[str, int] = {}
    for output in outputs[:4]:
        for source, count in outcome(output)["rows"].items():
            told[source] = told.get(source, 0) + count
    assert rows == told and rows["sibling"] == 3 * SHARED
    assert counted["tokendance:requests_total/leader"] == 1
    assert counted["tokendance:requests_total/follower"] == 3
    assert counted["tokendance:requests_total/ordinary"] == 1
    declined = {k: v for k, v in counted.items() if k.startswith("tokendance:declined_total")}
    assert declined == {f"tokendance:declined_total/{outcome(outputs[4])['reason']}": 1}
    assert counted["tokendance:passes_total"] == 1
    assert 0 < counted["tokendance:pass_seconds_total"] < 60
    assert not any("failures" in name for name in counted)


def test_nothing_is_counted_for_ordinary_requests(engine: Engine, audit: Audit) -> None:
    output = engine.ask(words(Random(29), 100))
    assert output.kv_transfer_params is None
    assert engine.counters() == {}
