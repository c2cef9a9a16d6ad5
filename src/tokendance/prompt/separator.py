r"""The separator in a prompt's text: where it cuts, how it is escaped, what remains (M1).

A separator cuts the text. Backslashes directly before a separator are special there and nowhere
else: each pair stands for one backslash, and an odd one takes the separator's meaning away.

    a<TTSEP>b       two pieces, "a" and "b"
    a\<TTSEP>b      one piece, "a<TTSEP>b"
    a\\<TTSEP>b     two pieces, "a\" and "b"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SEPARATOR = "<TTSEP>"

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens around it."""


class SeparatorError(ValueError):
    """A separator that cannot be used, or text that it cannot carry."""


def split_text(text: str, separator: str = SEPARATOR) -> list[str]:
    """Cut `text` at its separators and resolve the escapes; some pieces may be empty."""
    pieces = [""]
    end = 0
    for match in _pattern(separator).finditer(text):
        slashes = len(match[1])
        pieces[-1] += text[end : match.start()] + "\\" * (slashes // 2)
        if slashes % 2:
            pieces[-1] += separator
        else:
            pieces.append("")
        end = match.end()
    pieces[-1] += text[end:]
    return pieces


def join_pieces(pieces: Sequence[str], separator: str = SEPARATOR) -> str:
    """The text that `split_text` cuts into exactly these pieces.

    Raises SeparatorError for a separator that can overlap with itself in these pieces.
    """
    text = separator.join(
        escape(piece, separator, before_separator=index + 1 < len(pieces))
        for index, piece in enumerate(pieces)
    )
    if split_text(text, separator) != list(pieces or [""]):
        raise SeparatorError(f"the separator {separator!r} is ambiguous beside these texts")
    return text


def escape(text: str, separator: str = SEPARATOR, *, before_separator: bool = False) -> str:
    """Write `text` so that separators in it are content.

    before_separator: a separator will follow directly, so backslashes at the end are escaped too.
    """
    text = _pattern(separator).sub(lambda m: "\\" * (2 * len(m[1]) + 1) + separator, text)
    slashes = len(text) - len(text.rstrip("\\"))
    return text + "\\" * slashes if before_separator else text


def _pattern(separator: str) -> re.Pattern[str]:
    return re.compile(r"(\\*)" + re.escape(separator))


@dataclass(frozen=True, slots=True)
class PieceTokenizer:
    """Tokenises the pieces of a prompt one by one, so that equal pieces have equal ids anywhere.

    prefix, suffix: what the tokenizer puts around a whole text, such as BOS.
    anchor: text put before a piece while it is tokenised, and its ids, for tokenizers that would
        otherwise put a space before every piece. Empty if not needed.
    keep: ids that take a separator's place; empty removes it.
    problem: why this tokenizer cannot tokenise pieces; empty if it can.
    """

    encode: Encode
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    anchor: str = ""
    anchor_ids: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    problem: str = field(default="")

    def piece(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids of one piece; the first piece of a prompt is tokenised as any text is."""
        if not text:
            return []
        if first or not self.anchor:
            return list(self.encode(text))
        ids = list(self.encode(self.anchor + text))
        head = len(self.anchor_ids)
        return ids[head:] if tuple(ids[:head]) == self.anchor_ids else list(self.encode(text))

    def prompt(self, pieces: Sequence[str], *, special: bool) -> tuple[list[int], list[int]]:
        """Token ids of a prompt and the lengths of its segments, empty ones left out.

        special: put `prefix` and `suffix` around it; they belong to the first and last segment.
        """
        segments: list[list[int]] = []
        for index, text in enumerate(pieces):
            if index and self.keep:
                segments.append(list(self.keep))
            if ids := self.piece(text, first=not segments):
                segments.append(ids)
        if special and (self.prefix or self.suffix):
            segments = segments or [[]]
            segments[0] = [*self.prefix, *segments[0]]
            segments[-1] = [*segments[-1], *self.suffix]
        return [i for ids in segments for i in ids], [len(ids) for ids in segments]


ANCHOR = "\n"
PROBES = ("Alpha round.\n", "beta: 12 apples", " gamma, delta\n\n", "Epsilon")


def probe_tokenizer(
    encode: Encode,
    encode_special: Encode,
    decode: Callable[[Sequence[int]], str],
    keep_separator: str = "",
) -> PieceTokenizer:
    """Learn how a tokenizer treats pieces, by trying it (start-up self-test).

    encode, encode_special: text to ids without and with special tokens. decode: ids to text.
    The result's `problem` names the probe that failed if pieces do not decode to their texts.
    """
    around = _around(encode, encode_special)
    if around is None:
        return PieceTokenizer(encode, problem="special tokens change the tokens of a text")
    prefix, suffix = around
    keep = tuple(encode(keep_separator)) if keep_separator else ()
    plain = PieceTokenizer(encode, prefix, suffix, keep=keep)
    anchored = PieceTokenizer(encode, prefix, suffix, ANCHOR, tuple(encode(ANCHOR)), keep=keep)
    for candidate in (plain, anchored):
        if _round_trips(candidate, encode, decode):
            return candidate
    return PieceTokenizer(
        encode, prefix, suffix, keep=keep, problem="pieces do not decode to their own text"
    )


def _around(
    encode: Encode, encode_special: Encode
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that special tokens add before and after a text; None if they change the text's."""
    bare, full = list(encode(PROBES[0])), list(encode_special(PROBES[0]))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return None


def _round_trips(
    pieces: PieceTokenizer, encode: Encode, decode: Callable[[Sequence[int]], str]
) -> bool:
    """Pieces in any order must read as their texts joined, up to what one whole text does."""
    texts = list(PROBES)
    for turn in range(len(texts)):
        order = texts[turn:] + texts[:turn]
        ids: list[int] = []
        for index, text in enumerate(order):
            ids += pieces.piece(text, first=index == 0)
        if decode(ids) != decode(encode("".join(order))):
            return False
    return True
