"""Message starts, learned from templates in the manner of well known models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tokendance.prompt.messages import Message, message_cuts, probe_message_starts


def chatml(messages: Sequence[Message]) -> str:
    system = "<|im_start|>system\nYou help.<|im_end|>\n"
    return system + "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages
    )


def llama3(messages: Sequence[Message]) -> str:
    return "<|begin_of_text|>" + "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>"
        for m in messages
    )


def phi(messages: Sequence[Message]) -> str:
    return "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages)


def mistral(messages: Sequence[Message]) -> str:
    text = "<s>"
    for m in messages:
        text += f"[INST] {m['content']} [/INST]" if m["role"] == "user" else f" {m['content']}</s>"
    return text


def llama2(messages: Sequence[Message]) -> str:
    text = ""
    for m in messages:
        user = m["role"] == "user"
        text += f"<s>[INST] {m['content']} [/INST]" if user else f" {m['content']} </s>"
    return text


def alternating(messages: Sequence[Message]) -> str:
    if len(messages) > 1:
        raise ValueError("one message only")
    return chatml(messages)


def bare(messages: Sequence[Message]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


TOKENS = {
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|begin_of_text|>": 3,
    "<|start_header_id|>": 4,
    "<|end_header_id|>": 5,
    "<|eot_id|>": 6,
    "<|user|>": 7,
    "<|assistant|>": 8,
    "<|end|>": 9,
    "<s>": 10,
    "</s>": 11,
    "[INST]": 12,
    "[/INST]": 13,
}
WITHOUT_INST = {text: i for text, i in TOKENS.items() if "INST" not in text}


@pytest.mark.parametrize(
    ("render", "tokens", "starts"),
    [
        (chatml, TOKENS, {1}),
        (llama3, TOKENS, {4}),
        (phi, TOKENS, {7, 8}),
        (mistral, TOKENS, {12}),
        (llama2, WITHOUT_INST, {10}),
        (alternating, TOKENS, set()),
        (bare, TOKENS, set()),
        (chatml, {}, set()),
    ],
)
def test_message_starts(render, tokens, starts) -> None:
    assert probe_message_starts(render, tokens) == starts


def test_cuts_are_where_the_tokens_stand() -> None:
    assert message_cuts([1, 50, 2, 1, 51, 2, 7], {1, 7}) == [0, 3, 6]
    assert message_cuts([1, 50, 2], frozenset()) == []
