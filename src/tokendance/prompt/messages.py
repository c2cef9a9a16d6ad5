"""Where chat messages begin: learned from a chat template by rendering with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]
"""Messages to text, without the opening of an answer."""

PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "qAlphaq"},
    {"role": "assistant", "content": "qBetaq"},
    {"role": "user", "content": "qGammaq"},
)


def probe_message_starts(render: Render, tokens: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens that begin a chat message; empty if the template has none.

    tokens: the tokenizer's added tokens (text to id). Such a token is never merged with its
    neighbours, so the text from it on tokenises in the same way wherever the message stands.
    """
    try:
        texts = [render(PROBE[: count + 1]) for count in range(len(PROBE))]
    except Exception:  # a template may refuse any conversation, in its own way
        return frozenset()
    starts = set()
    for index in range(len(PROBE) - 1):
        content, following = PROBE[index]["content"], PROBE[index + 1]["content"]
        tail = _tokens_in(texts[index].partition(content)[2], tokens)
        gap = _tokens_in(texts[-1].partition(content)[2].partition(following)[0], tokens)
        if gap[: len(tail)] == tail and len(gap) > len(tail):
            starts.add(tokens[gap[len(tail)]])
    return frozenset(starts)


def message_cuts(token_ids: Sequence[int], starts: Collection[int]) -> list[int]:
    """Positions where a message begins."""
    if not starts:
        return []
    return [position for position, token in enumerate(token_ids) if token in starts]


def _tokens_in(text: str, tokens: Collection[str]) -> list[str]:
    if not tokens:
        return []
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.findall("|".join(map(re.escape, longest_first)), text)
