"""Content matching against a brute-force oracle."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tokendance.plan.match import WINDOW, Tokens, common_runs

texts = st.lists(st.integers(0, 3), min_size=0, max_size=60)  # few symbols: many repeats


def stands_in(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


@given(st.lists(st.one_of(texts, st.integers(0, 3).map(lambda i: [i] * 20)), max_size=5), texts)
@settings(max_examples=200, deadline=None)
def test_matches_are_real_disjoint_and_complete(pieces: list[list[int]], noise: list[int]) -> None:
    source = [t for piece in pieces for t in piece]
    target = [t for piece in reversed(pieces) for t in (*noise, *piece)]
    runs = common_runs(Tokens(target), Tokens(source), WINDOW)
    position = 0
    for start, there, length in runs:
        assert start >= position and length >= WINDOW
        assert target[start : start + length] == source[there : there + length]
        position = start + length
    covered = {i for start, _, length in runs for i in range(start, start + length)}
    for start in range(len(target) - WINDOW + 1):
        window = target[start : start + WINDOW]
        if stands_in(window, source):  # some token of every shared window is part of a match
            assert covered & set(range(start, start + WINDOW))


@given(st.lists(st.integers(0, 50000), min_size=40, max_size=80, unique=True), st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_a_quoted_text_is_found_whole_at_any_offset(text: list[int], offset: int) -> None:
    target = [60000 + i for i in range(offset)] + text + [70000]
    source = [80000, *text, 80001]
    assert common_runs(Tokens(target), Tokens(source), 32) == [(offset, 1, len(text))]


def test_retokenised_edge_is_left_out() -> None:
    generated = list(range(100, 160))
    quoted = [7, *generated[1:-1], 8]  # the tokenizer merged the first and the last token
    assert common_runs(Tokens(quoted), Tokens(generated), 32) == [(1, 1, 58)]


def test_rows_before_start_are_not_looked_at() -> None:
    text = list(range(64))
    assert common_runs(Tokens(text), Tokens(text), 32, start=20) == [(20, 20, 44)]


def test_shorter_than_a_window() -> None:
    assert common_runs(Tokens([1] * (WINDOW - 1)), Tokens([1] * 40), WINDOW) == []
    assert common_runs(Tokens([1] * 40), Tokens([]), WINDOW) == []


def test_shared_texts_share_fingerprints_and_strangers_do_not() -> None:
    text = [(i * 7919) % 49152 for i in range(400)]
    a, b = Tokens([*range(300), *text]), Tokens([*text, *range(50000, 50300)])
    assert len(a.fingerprints & b.fingerprints) >= 20
    stranger = Tokens([(i * 104729 + 5) % 49152 for i in range(400)])
    assert not a.fingerprints & stranger.fingerprints


def test_twenty_thousand_tokens_take_milliseconds() -> None:
    source = [(i * i * 31 + i) % 49152 for i in range(20_000)]
    target = source[5000:15000] + [7] * 50 + source[:5000]
    begin = time.process_time()
    runs = common_runs(Tokens(target), Tokens(source), 32)
    assert time.process_time() - begin < 0.5  # measured: 0.01 s
    assert sum(run.length for run in runs) >= 14_900
