"""From the texts of a trace to token ids, segment by segment.

Every segment is tokenised alone and the prompt is the concatenation, so that the same text has the
same ids in every prompt, and a server that is told the lengths knows the boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokendance.bench.trace import Kind, Part, Request, TraceError


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    bos: tuple[int, ...]
    """Ids that the tokenizer puts before every prompt; often none."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, nothing put before or after it."""
        ...

    def chat(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation, ending where the model is to answer."""
        ...


class HFTokenizer:
    """The tokenizer of a Hugging Face model folder."""

    def __init__(self, model: str | Path) -> None:
        from transformers import AutoTokenizer  # a slow import that traces alone do not need

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
        self.bos = tuple(self._tokenizer("", add_special_tokens=True)["input_ids"])[:1]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat(self, messages: list[dict[str, str]]) -> str:
        if not self._tokenizer.chat_template:
            raise TraceError("the trace needs a chat template and the model's tokenizer has none")
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )


class Piece(NamedTuple):
    """One segment of a rendered prompt. What a chat template adds is a piece of kind `task`."""

    kind: Kind
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids with its segment boundaries, and the stored answer's ids."""

    agent: str
    pieces: tuple[Piece, ...]
    output: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment, in order; their sum is the length of the prompt."""
        return tuple(len(piece.ids) for piece in self.pieces)


class Renderer:
    """Renders the requests of one trace; the ids of a text are computed once."""

    def __init__(self, tokenizer: Tokenizer, render: str = "concat") -> None:
        self.tokenizer = tokenizer
        self.render = render
        self._ids: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: Request) -> Prompt:
        if self.render == "chat":
            texts = chat_texts(request.parts, self.tokenizer)
        else:
            texts = [(part.kind, part.segment.text) for part in request.parts]
        pieces = [Piece(kind, self._encode(text)) for kind, text in texts]
        if self.render == "concat" and self.tokenizer.bos:
            pieces.insert(0, Piece("task", self.tokenizer.bos))
        output = self._encode(request.output.text) if request.output else ()
        return Prompt(request.agent, tuple(pieces), output)

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = tuple(self.tokenizer.encode(text))
        return ids


def messages(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The chat messages of a request: a role opens one, texts without a role continue it."""
    result: list[dict[str, str]] = []
    for part in parts:
        if part.role is not None:
            result.append({"role": part.role, "content": ""})
        result[-1]["content"] += part.segment.text
    return result


def chat_texts(parts: Sequence[Part], tokenizer: Tokenizer) -> list[tuple[Kind, str]]:
    """The rendered conversation cut at the segments; the template's own text lies between them.

    The texts joined are exactly what the template gives for the whole conversation.
    """
    rendered = tokenizer.chat(messages(parts))
    texts: list[tuple[Kind, str]] = []
    position = 0
    for part in parts:
        text = part.segment.text
        start = rendered.find(text, position)
        if start < 0:  # templates may trim the end of a message
            text = text.rstrip("\n")
            start = rendered.find(text, position)
        if start < 0:
            raise TraceError(f"the chat template drops or changes the text {part.segment.id!r}")
        if start > position:
            texts.append(("task", rendered[position:start]))
        texts.append((part.kind, text))
        position = start + len(text)
    if position < len(rendered):
        texts.append(("task", rendered[position:]))
    return texts
