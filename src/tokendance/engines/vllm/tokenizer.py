"""Start-up self-test of a tokenizer and its chat template. Imports transformers, not vLLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tokendance.prompt.messages import probe_message_starts
from tokendance.prompt.separator import PieceTokenizer, probe_tokenizer


def piece_tokenizer(tokenizer: Any, keep_separator: str = "") -> PieceTokenizer:
    """How to tokenise pieces with `tokenizer`; the result's `problem` says if it cannot be done."""

    def encode(text: str, special: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        name = type(tokenizer).__name__
        return PieceTokenizer(encode, problem=f"{name} is not a Hugging Face tokenizer")
    special = functools.partial(encode, special=True)
    return probe_tokenizer(encode, special, tokenizer.decode, keep_separator)


def message_starts(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that begin a chat message; empty if there are none to rely on."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return frozenset()

    def render(messages: Sequence[Mapping[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))

    return probe_message_starts(render, tokenizer.get_added_vocab())
