"""The reference engine against transformers' own forward."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendance.engines.reference.engine import ReferenceEngine
from tokendance.engines.reference.model import Model, UnsupportedModel
from tokendance.engines.reference.paged import OutOfPages, PagedKV
from tokendance.reuse.base import PassHooks, RowBatch
from tokendance.types import Rows

MODELS = [(family, "default") for family in ("llama", "qwen2", "qwen3")] + [
    ("llama", "linear"),
    ("llama", "dynamic"),
    ("qwen2", "yarn"),
    ("qwen3", "yarn"),
    ("llama", "llama3"),
]


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(tiny.VOCAB), k=count)


@pytest.mark.parametrize(("family", "rope"), MODELS)
def test_prefill_and_continuation_equal_transformers(family: str, rope: str) -> None:
    engine = tiny.engine(family, rope)
    prompts = [ids(1, 1), ids(37, 2), ids(120, 3)]
    tail = ids(9, 4)
    with engine.streams(prompts, room=len(tail)) as streams:
        logits = engine.prefill(streams)
        for prompt, got in zip(prompts, logits):
            torch.testing.assert_close(
                got, tiny.oracle(prompt, family, rope)[-1], atol=1e-4, rtol=0
            )
        for prompt, stream in zip(prompts, streams):
            want = tiny.oracle(prompt + tail, family, rope)[len(prompt) :]
            torch.testing.assert_close(engine.score(stream, tail), want, atol=1e-4, rtol=0)
    assert engine.kv.free_pages == engine.kv.num_pages


@pytest.mark.parametrize("rope", list(tiny.ROPES))
def test_cached_keys_move_with_the_rotary_of_the_model(rope: str) -> None:
    """Layer 0 keys depend on token and position only: rotated, they are the other place's."""
    engine = tiny.engine("llama", rope)
    prompt = ids(20)
    with engine.streams([prompt, ids(33, 9) + prompt]) as streams:
        engine.prefill(streams)
        keys = []
        for stream, start in zip(streams, (0, 33)):
            batch = engine.batch([(stream, [Rows(start, start + 20)])])
            keys.append(engine.kv.read(0, batch.slots)[0])
    torch.testing.assert_close(engine.rotary.rotate(keys[0], 33), keys[1], atol=1e-5, rtol=0)


def test_greedy_decode_equals_transformers() -> None:
    prompts = [ids(5, 1), ids(40, 2), ids(23, 3)]
    got = tiny.engine("qwen2").generate(prompts, 12)
    for prompt, tokens in zip(prompts, got):
        want = list(prompt)
        for _ in range(12):
            want.append(int(tiny.oracle(want, "qwen2")[-1].argmax()))
        assert tokens == want[len(prompt) :]


def test_a_stop_token_ends_one_stream_only() -> None:
    prompts = [ids(5, 1), ids(40, 2)]
    free = tiny.engine().generate(prompts, 10)
    stop = free[0][3]
    cut = tiny.engine().generate(prompts, 10, frozenset([stop]))
    for whole, part in zip(free, cut):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert part == whole[:end]
    assert len(cut[0]) <= 4


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    length = draw(st.integers(2, 60))
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=12))
    return ids(length, draw(st.integers(0, 99))), sorted({0, length} | cuts)


@given(splits(), splits())
@settings(max_examples=40, deadline=None)
def test_any_split_into_runs_gives_the_same(
    a: tuple[list[int], list[int]], b: tuple[list[int], list[int]]
) -> None:
    """Runs of two requests in one pass, each cut anywhere, are the prompts' ordinary prefill."""
    engine = tiny.engine("qwen3")
    with engine.streams([a[0], b[0]]) as streams:
        work = [
            (stream, [Rows(lo, hi) for lo, hi in pairwise(cuts)])
            for stream, (_, cuts) in zip(streams, (a, b))
        ]
        got = engine.model.logits(engine.hidden(engine.batch(work)))
    want = torch.cat([tiny.oracle(prompt, "qwen3") for prompt, _ in (a, b)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_request_keeps_its_bits_in_any_batch(first: int, second: int, seed: int) -> None:
    engine = tiny.engine("qwen2")
    prompts = [ids(first, seed), ids(second, seed + 1)]
    with engine.streams([prompts[0]]) as alone:
        want = engine.prefill(alone)[0]
    with engine.streams(prompts) as both:
        got = engine.prefill(both)[0]
    assert torch.equal(got, want)


def test_check_layer_narrows_the_batch() -> None:
    """From the check layer on only the kept rows are computed and written."""
    engine = tiny.engine()
    prompt, kept = ids(24), torch.tensor([0, 1, 2, 10, 23])
    with engine.streams([prompt, prompt]) as (full, narrow):
        engine.prefill([full])
        batch = engine.batch([(narrow, [Rows(0, 24)])])
        seen: list[torch.Tensor] = []

        def on_check(k: torch.Tensor, v: torch.Tensor) -> tuple[RowBatch, torch.Tensor]:
            seen.extend((k, v))
            return engine.batch([(narrow, [Rows(0, 3), Rows(10, 11), Rows(23, 24)])]), kept

        layers: list[int] = []
        rows = engine.hidden(batch, PassHooks(layers.append, check_layer=1, on_check=on_check))
        assert layers == [0, 1, 2]
        assert rows.shape[0] == 5
        whole = engine.batch([(full, [Rows(0, 24)])])
        for layer in range(3):
            wanted = engine.kv.read(layer, whole.slots)
            got = engine.kv.read(layer, batch.slots)
            for fresh, old, shown in zip(got, wanted, seen):
                # Rows 0..2 see only kept rows, so they are exact in every layer.
                torch.testing.assert_close(fresh[:3], old[:3])
                if layer == 0:
                    torch.testing.assert_close(fresh, old)
                if layer == 1:
                    torch.testing.assert_close(shown, old)
                    assert fresh[3:10].abs().max() == 0
                    torch.testing.assert_close(fresh[kept], old[kept])


def test_bf16_stays_near_fp32() -> None:
    prompts = [ids(60, seed) for seed in range(4)]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = Model.from_hf(copy.deepcopy(tiny.hf_model("qwen3", "yarn")).to(dtype))
        engine = ReferenceEngine(model, num_pages=64, page_size=4)
        with engine.streams(prompts) as streams:
            results.append(engine.prefill(streams).log_softmax(-1))
    kl = (results[0].exp() * (results[0] - results[1])).sum(-1)
    assert 0 < kl.max() < 0.02


def test_a_checkpoint_folder_loads(tmp_path: Any) -> None:
    tiny.hf_model("qwen2").save_pretrained(tmp_path)
    engine = ReferenceEngine.load(tmp_path, num_pages=16, page_size=4)
    prompt = ids(17)
    with engine.streams([prompt]) as streams:
        logits = engine.prefill(streams)[0]
    torch.testing.assert_close(logits, tiny.oracle(prompt, "qwen2")[-1], atol=1e-4, rtol=0)


def test_models_it_would_compute_wrongly_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="full attention"):
        Model.from_hf(
            tiny.hf_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
        )
    with pytest.raises(UnsupportedModel, match="activation 'gelu'"):
        Model.from_hf(tiny.hf_model("llama", hidden_act="gelu"))


def test_dynamic_ntk_is_refused_where_its_frequencies_change() -> None:
    engine = tiny.engine("llama", "dynamic")
    with engine.streams([ids(257)]) as streams, pytest.raises(UnsupportedModel, match="dynamic"):
        engine.prefill(streams)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40))
@settings(deadline=None)
def test_pages_have_one_owner(steps: list[tuple[bool, int]]) -> None:
    kv = PagedKV(1, 12, 4, 1, 2)
    held: list[tuple[int, ...]] = []
    for take, number in steps:
        if take:
            free = kv.free_pages
            try:
                held.append(kv.allocate(number))
            except OutOfPages:
                assert number > 4 * free
                assert kv.free_pages == free
        elif held:
            kv.release(held.pop(number % len(held)))
        used = [page for pages in held for page in pages]
        assert len(used) == len(set(used)) == 12 - kv.free_pages
    for pages in held:
        kv.release(pages)
        if pages:
            with pytest.raises(ValueError, match="not all in use"):
                kv.release(pages)
