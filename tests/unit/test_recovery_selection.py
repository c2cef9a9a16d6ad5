"""Which rows a backend chooses, against plain Python."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokendance.plan.reuse_plan import Copy, Member
from tokendance.reuse.deviation import least, most_deviating, squared_distance, totals
from tokendance.reuse.recovery import Check, RecoveryError, create, names
from tokendance.reuse.recovery.base import Recovery, common_check_layer, register, without
from tokendance.types import AgentId, RequestId, Rows


@st.composite
def groups(draw: st.DrawFn) -> list[tuple[int, int, int, float]]:
    """Rows of a group: member, unit, row of the unit, deviation; members may be missing."""
    rows, unit = [], 0
    for member in sorted(draw(st.sets(st.integers(0, 5), max_size=4))):
        for _ in range(draw(st.integers(1, 4))):
            for row in range(draw(st.integers(1, 5))):
                rows.append((member, unit, row, draw(st.integers(0, 6)) / 4))
            unit += 1
    return rows


@given(groups(), st.sampled_from((0.0, 0.15, 0.3, 0.5, 1.0)))
def test_units_that_deviate_most_are_taken_up_to_the_ratio(
    rows: list[tuple[int, int, int, float]], ratio: float
) -> None:
    want = set()
    for member, own in groupby(rows, key=lambda r: r[0]):
        mine = list(own)
        units = [list(unit) for _, unit in groupby(mine, key=lambda r: r[1])]
        units.sort(key=lambda unit: -sum(r[3] for r in unit) / len(unit))
        taken = 0
        for unit in units:
            if taken < math.ceil(ratio * len(mine) - 1e-9):
                want |= {(member, r[1]) for r in unit}
                taken += len(unit)
    columns = list(zip(*rows)) or [(), (), (), ()]
    got = most_deviating(
        torch.tensor(columns[3], dtype=torch.float32),
        torch.tensor(columns[0], dtype=torch.int64),
        torch.tensor(columns[1], dtype=torch.int64),
        ratio,
    )
    assert got.tolist() == [(r[0], r[1]) in want for r in rows]


def check_of(rows: list[tuple[int, int, int]], k: list[float], v: list[float]) -> Check:
    """A check over (member, piece, offset) rows with the given distances of K and V."""
    member, piece, offset = (torch.tensor(column) for column in zip(*rows))
    zero = torch.zeros(len(rows), 1, 1)
    fresh_k, fresh_v = (torch.tensor(d).sqrt()[:, None, None] for d in (k, v))
    return Check(member, offset, piece, offset, fresh_k, fresh_v, zero, zero)


def test_cacheblend_compares_keys_or_values() -> None:
    rows = [(0, 0, i) for i in range(4)] + [(2, 1, i) for i in range(4)]
    k, v = [0, 1, 9, 2, 5, 0, 0, 0], [3, 1, 0, 0, 0, 0, 0, 7]
    check = check_of(rows, [float(x) for x in k], [float(x) for x in v])
    by_key = create("cacheblend", {"ratio": 0.25}).select(check)
    by_value = create("cacheblend", {"ratio": 0.25, "of": "v"}).select(check)
    assert by_key.nonzero()[:, 0].tolist() == [2, 4]
    assert by_value.nonzero()[:, 0].tolist() == [0, 7]


def test_cacheblend_blocks_are_counted_from_the_start_of_a_piece() -> None:
    """Pieces of 5 and 3 rows in blocks of 4, the first piece cut so that it begins at its row 2."""
    rows = [(0, 0, i) for i in range(2, 7)] + [(0, 1, i) for i in range(3)]
    deviation = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    blocks = [[0, 1], [2, 3, 4], [5, 6, 7]]
    check = check_of(rows, deviation, deviation)
    for ratio, want in ((0.1, blocks[2]), (0.5, blocks[1] + blocks[2]), (1.0, list(range(8)))):
        chosen = create("cacheblend", {"ratio": ratio, "block": 4}).select(check)
        assert chosen.nonzero()[:, 0].tolist() == want


MEMBER = Member(
    RequestId("r"),
    AgentId("a"),
    0,
    tuple(range(100)),
    0,
    99,
    (Copy(1, 0, 0, 10, True), Copy(1, 40, 30, 3), Copy(2, 5, 33, 20), Copy(1, 60, 70, 29)),
)


def test_static_backends() -> None:
    every = tuple(copy.rows for copy in MEMBER.copies)
    first = (Rows(30, 33), Rows(33, 38), Rows(70, 75))
    assert create("full").static(MEMBER) == every
    assert create("legolink", {"tokens": 5}).static(MEMBER) == first
    for name in ("region", "naive", "cacheblend"):
        assert create(name).static(MEMBER) == ()


@given(st.lists(st.tuples(st.integers(0, 98), st.integers(0, 30)), max_size=6))
def test_what_is_left_of_copies_keeps_its_source(cuts: list[tuple[int, int]]) -> None:
    rows = [Rows(start, start + length) for start, length in sorted(cuts)]
    gone = {row for cut in rows for row in range(*cut)}

    def origin(copies: tuple[Copy, ...]) -> dict[int, tuple[int, int, bool]]:
        return {
            c.start + i: (c.source, c.source_start + i, c.exact)
            for c in copies
            for i in range(c.length)
        }

    want = {row: src for row, src in origin(MEMBER.copies).items() if row not in gone}
    left = without(MEMBER.copies, rows)
    assert origin(left) == want
    assert all(copy.length > 0 for copy in left)


def test_names_and_options_that_do_not_hold_say_what_does() -> None:
    assert {"region", "cacheblend", "legolink", "naive", "full"} <= set(names())
    for name, options, text in (
        ("cachblend", {}, "there is cacheblend"),
        ("cacheblend", {"ration": 0.1}, "there is ratio"),
        ("cacheblend", {"ratio": 1.5}, r"ratio must be in \[0, 1\], not 1.5"),
        ("cacheblend", {"ratio": "high"}, "'<=' not supported"),
        ("cacheblend", {"check_layer": 0}, "check_layer must be at least 1"),
        ("cacheblend", {"of": "q"}, "'of' must be 'k' or 'v'"),
        ("cacheblend", {"block": 0}, "block must be at least 1"),
        ("legolink", {"tokens": -1}, "tokens must not be negative"),
        ("region", {"ratio": 0.1}, "has no option 'ratio'"),
    ):
        with pytest.raises(RecoveryError, match=text):
            create(name, options)


def test_a_taken_name_is_an_error() -> None:
    with pytest.raises(RecoveryError, match="exists already"):
        register("region")(type(create("full")))
    with pytest.raises(RecoveryError, match="dataclass"):
        register("plain")(Recovery)


def test_a_group_has_one_check_layer() -> None:
    two, three = (create("cacheblend", {"check_layer": n}) for n in (2, 3))
    assert common_check_layer([two, create("region"), two], 4) == 2
    assert common_check_layer([create("region"), create("full")], 4) is None
    with pytest.raises(RecoveryError, match=r"layers \[2, 3\]"):
        common_check_layer([two, three], 4)
    with pytest.raises(RecoveryError, match="layers 0 to 2"):
        common_check_layer([three], 3)


def test_deviations() -> None:
    fresh = torch.tensor([[[1.0, 2.0], [0.0, 2.0]], [[0.0, 0.0], [1.0, 0.0]]])
    assert squared_distance(fresh, torch.zeros_like(fresh)).tolist() == [9.0, 1.0]
    values, member = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2])
    assert totals(values, member, 4) == [1.0, 0.0, 6.0, 0.0]
    assert least([None, 2.0, 1.0, 1.0]) == 2
    assert least([None]) is None
