"""What the front end makes of prompts, in a real vLLM with a recording connector."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

from recording_connector import REQUESTS  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402

from tokendance.cli.model import ensure_model  # noqa: E402
from tokendance.config import Config  # noqa: E402
from tokendance.engines.vllm.frontend import FrontEnd  # noqa: E402

PIECES = ["Alpha remembers the storm.\n", "Beta: shelter at noon.\n", "Gamma agrees.\n", "Now act."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(
        str(ensure_model()),
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 1},
        max_model_len=512,
        enforce_eager=True,
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": "TokenDanceConnector",
            "kv_connector_module_path": "recording_connector",
            "kv_role": "kv_both",
        },
    )
    yield engine
    engine.llm_engine.engine_core.engine_core.shutdown()
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def forget() -> None:
    REQUESTS.clear()


def params(**hints: Any) -> SamplingParams:
    extra = {"kv_transfer_params": {"tokendance": hints}} if hints else None
    return SamplingParams(max_tokens=1, temperature=0, extra_args=extra)


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]


def seen() -> list[tuple[list[int], dict[str, Any] | None]]:
    return [(list(r.prompt_token_ids), r.kv_transfer_params) for r in REQUESTS]


def only() -> tuple[list[int], dict[str, Any]]:
    ((ids, transfer),) = seen()
    assert transfer is not None
    return ids, transfer["tokendance"]


def test_separated_text(llm: LLM) -> None:
    (output,) = llm.generate("<TTSEP>".join(PIECES), params(), use_tqdm=False)
    ids, note = only()
    pieces = [ids_of(llm, text) for text in PIECES]
    assert ids == [token for piece in pieces for token in piece] == output.prompt_token_ids
    assert note == {
        "segments": [len(piece) for piece in pieces],
        "marked": True,
        "mode": "auto",
        "salt": "",
    }
    assert output.prompt == "".join(PIECES)


@pytest.mark.parametrize("text", ["Hello there.", "a < TTSEP > b", "<TTSEP", "TTSEP>"])
def test_ordinary_text_is_untouched(llm: LLM, text: str) -> None:
    llm.generate(text, params(), use_tqdm=False)
    assert seen() == [(ids_of(llm, text), None)]


def test_empty_pieces_and_escapes(llm: LLM) -> None:
    llm.generate("<TTSEP>one<TTSEP><TTSEP>t\\<TTSEP>wo\\\\<TTSEP>", params(), use_tqdm=False)
    ids, note = only()
    one, two = ids_of(llm, "one"), ids_of(llm, "t<TTSEP>wo\\")
    assert ids == one + two
    assert (note["segments"], note["marked"]) == ([len(one), len(two)], True)


def test_chat_messages_are_segments(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "You are Maria."},
        {"role": "user", "content": "What now?"},
    ]
    rendered = llm.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    llm.chat(messages, params(), use_tqdm=False)
    ids, note = only()
    assert ids == ids_of(llm, rendered)
    parts = ["<|im_start|>" + part for part in rendered.split("<|im_start|>")[1:]]
    assert note["segments"] == [len(ids_of(llm, part)) for part in parts]
    assert len(parts) == 3
    assert note["marked"] is False


def test_separators_inside_a_chat_message(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "You are Maria."},
        {"role": "user", "content": "<TTSEP>".join(PIECES)},
    ]
    llm.chat(messages, params(), use_tqdm=False)
    ids, note = only()
    bounds = [sum(note["segments"][:i]) for i in range(len(note["segments"]) + 1)]
    segments = [ids[a:b] for a, b in pairwise(bounds)]
    assert bounds[-1] == len(ids)
    assert segments[2:4] == [ids_of(llm, text) for text in PIECES[1:3]]
    assert len(segments) == 6  # system, four pieces, the opening of the answer
    assert note["marked"] is True
    assert "TTSEP" not in llm.get_tokenizer().decode(ids)


def test_hints_travel_and_the_callers_params_stay(llm: LLM) -> None:
    shared = params(session="town", round=3, agent="maria", size=8, mode="exact", backend="full")
    before = repr(shared)
    llm.generate(["one", "two<TTSEP>three"], shared, use_tqdm=False)
    (_, first), (_, second) = seen()
    assert first is not None and second is not None
    for note, count in ((first["tokendance"], 1), (second["tokendance"], 2)):
        assert len(note.pop("segments")) == count
        assert note.pop("marked") == (count == 2)
        assert note == {
            "session": "town",
            "round": "3",
            "agent": "maria",
            "size": 8,
            "mode": "exact",
            "backend": "full",
            "salt": "",
        }
    assert repr(shared) == before


def test_all_samples_of_a_request_carry_the_note(llm: LLM) -> None:
    several = SamplingParams(max_tokens=1, n=2, temperature=1.0)
    llm.generate("one<TTSEP>two", several, use_tqdm=False)
    first, second = seen()
    assert first == second and first[1] is not None


def test_token_ids_with_lengths(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9], "cache_salt": "tenant"}
    llm.generate(prompt, params(segments=[2, 3]), use_tqdm=False)
    ids, note = only()
    assert ids == [5, 6, 7, 8, 9]
    assert (note["segments"], note["marked"], note["salt"]) == ([2, 3], True, "tenant")


@pytest.mark.parametrize(
    ("prompt", "hints", "field"),
    [
        ("hello", {"sizes": 3}, "sizes"),
        ("hello", {"size": 0}, "size"),
        ("hello", {"mode": "fast"}, "mode"),
        ("hello", {"backend": "blend"}, "backend"),
        ({"prompt_token_ids": [5, 6, 7]}, {"segments": [1, 1]}, "segments"),
        ("a<TTSEP>b", {"segments": [1, 1]}, "segments"),
    ],
)
def test_malformed_hints_name_the_field(
    llm: LLM, prompt: Any, hints: dict[str, Any], field: str
) -> None:
    with pytest.raises(VLLMValidationError, match=field) as caught:
        llm.generate(prompt, params(**hints), use_tqdm=False)
    assert caught.value.parameter == f"kv_transfer_params.tokendance.{field}"
    assert seen() == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_clips_segments(llm: LLM, side: str) -> None:
    limits = {"truncate_prompt_tokens": 12, "truncation_side": side}
    llm.generate("<TTSEP>".join(PIECES), params(), use_tqdm=False, tokenization_kwargs=limits)
    ids, note = only()
    pieces = [ids_of(llm, text) for text in PIECES]
    whole = [token for piece in pieces for token in piece]
    assert ids == (whole[-12:] if side == "left" else whole[:12])
    assert sum(note["segments"]) == 12
    owner = [index for index, piece in enumerate(pieces) for _ in piece]
    kept = owner[-12:] if side == "left" else owner[:12]
    assert note["segments"] == [kept.count(index) for index in sorted(set(kept))]


def test_too_long_a_prompt_is_refused_as_ever(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        llm.generate("word <TTSEP>" * 600, params(), use_tqdm=False)


def test_a_kept_separator_stands_between_the_pieces(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    kept = FrontEnd(Config(keep_separator="<|endoftext|>"), tokenizer)
    ids, lengths, text = kept.tokenize("one<TTSEP>two", special=False)
    assert ids == [*ids_of(llm, "one"), 0, *ids_of(llm, "two")]
    assert lengths == [len(ids_of(llm, "one")), 1, len(ids_of(llm, "two"))]
    assert text == tokenizer.decode(ids) == "one<|endoftext|>two"


def test_tokenizers_that_cannot_do_it_refuse_the_separator() -> None:
    with pytest.raises(VLLMValidationError, match="not a Hugging Face tokenizer") as caught:
        FrontEnd(Config(), object()).tokenize("one<TTSEP>two", special=True)
    assert caught.value.parameter == "prompt"
