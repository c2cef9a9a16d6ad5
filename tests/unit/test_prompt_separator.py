"""The separator: cutting, escaping, and tokenising pieces alone, against small oracles."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokendance.prompt.separator import (
    SEPARATOR,
    PieceTokenizer,
    SeparatorError,
    escape,
    join_pieces,
    probe_tokenizer,
    split_text,
)

# Text that is full of separators, halves of them, and backslashes.
nasty = st.lists(
    st.one_of(
        st.just(SEPARATOR),
        st.just("\\"),
        st.sampled_from([SEPARATOR[:n] for n in range(len(SEPARATOR) + 1)]),
        st.sampled_from([SEPARATOR[n:] for n in range(len(SEPARATOR) + 1)]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


def split_slowly(text: str) -> list[str]:
    """Character by character, straight from the definition."""
    pieces, i = [""], 0
    while i < len(text):
        slashes = 0
        while text[i + slashes : i + slashes + 1] == "\\":
            slashes += 1
        if text.startswith(SEPARATOR, i + slashes):
            pieces[-1] += "\\" * (slashes // 2)
            if slashes % 2:
                pieces[-1] += SEPARATOR
            else:
                pieces.append("")
            i += slashes + len(SEPARATOR)
        else:
            pieces[-1] += text[i : i + max(slashes, 1)]
            i += max(slashes, 1)
    return pieces


@given(nasty)
@example("")
@example(SEPARATOR)
@example("\\" * 3 + SEPARATOR + SEPARATOR)
def test_split_is_its_definition(text: str) -> None:
    assert split_text(text) == split_slowly(text)


@given(st.lists(nasty, min_size=1, max_size=5))
def test_split_undoes_join(pieces: list[str]) -> None:
    assert split_text(join_pieces(pieces)) == pieces


@given(nasty)
def test_escaped_text_is_one_piece(text: str) -> None:
    assert split_text(escape(text)) == [text]


@pytest.mark.parametrize("length", range(len(SEPARATOR) + 2))
def test_texts_as_short_as_the_separator(length: int) -> None:
    text = (SEPARATOR + "x")[:length]
    expected = {len(SEPARATOR): ["", ""], len(SEPARATOR) + 1: ["", "x"]}
    assert split_text(text) == expected.get(length, [text])


def test_the_three_forms_of_the_definition() -> None:
    assert split_text("a<TTSEP>b") == ["a", "b"]
    assert split_text("a\\<TTSEP>b") == ["a<TTSEP>b"]
    assert split_text("a\\\\<TTSEP>b") == ["a\\", "b"]


def test_a_separator_that_overlaps_with_the_text_is_refused() -> None:
    with pytest.raises(SeparatorError, match="ambiguous"):
        join_pieces(["a", ""], separator="aa")


def encode_bytes(text: str) -> list[int]:
    return list(text.encode())


pieces_of_text = st.lists(st.text(max_size=6), min_size=1, max_size=6)


@given(pieces_of_text, st.booleans())
def test_prompt_is_its_pieces_in_a_row(pieces: list[str], special: bool) -> None:
    tokenizer = PieceTokenizer(encode_bytes, prefix=(1000,), suffix=(1001, 1002))
    ids, lengths = tokenizer.prompt(pieces, special=special)
    bare = [i for text in pieces for i in encode_bytes(text)]
    assert ids == ([1000, *bare, 1001, 1002] if special else bare)
    sizes = [len(encode_bytes(text)) for text in pieces if text]
    if special:
        sizes = sizes or [0]
        sizes[0] += 1
        sizes[-1] += 2
    assert lengths == sizes


@given(pieces_of_text)
def test_kept_separator_stands_between_pieces(pieces: list[str]) -> None:
    tokenizer = PieceTokenizer(encode_bytes, keep=(7000, 7001))
    ids, lengths = tokenizer.prompt(pieces, special=False)
    assert ids.count(7000) == len(pieces) - 1
    assert sum(lengths) == len(ids)
    gaps: list[list[int]] = [[]]
    for token in ids:
        if token == 7000:
            gaps.append([])
        elif token != 7001:
            gaps[-1].append(token)
    assert gaps == [encode_bytes(text) for text in pieces]


# -- real tokenizer machinery ------------------------------------------------------------------


def hf_tokenizer(kind: str):
    """Byte-level BPE without BOS, the same with BOS and EOS, or SentencePiece-like with spaces."""
    tokenizers = pytest.importorskip("tokenizers")
    corpus = ["Alpha round. beta: 12 apples gamma, delta\n\nEpsilon writes to beta.\n"] * 20
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=kind == "metaspace"))
    if kind == "metaspace":
        raw.normalizer = tokenizers.normalizers.Sequence(
            [
                tokenizers.normalizers.Prepend("\u2581"),
                tokenizers.normalizers.Replace(" ", "\u2581"),
            ]
        )
        raw.decoder = tokenizers.decoders.Sequence(
            [
                tokenizers.decoders.Replace("\u2581", " "),
                tokenizers.decoders.ByteFallback(),
                tokenizers.decoders.Fuse(),
                tokenizers.decoders.Strip(content=" ", left=1),
            ]
        )
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=200,
            special_tokens=["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))],
            show_progress=False,
        )
    else:
        raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    raw.train_from_iterator(corpus, trainer)
    if kind == "bos":
        raw.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return raw


def probe(raw) -> PieceTokenizer:
    return probe_tokenizer(
        lambda text: raw.encode(text, add_special_tokens=False).ids,
        lambda text: raw.encode(text).ids,
        lambda ids: raw.decode(list(ids), skip_special_tokens=False),
    )


@pytest.mark.parametrize("kind", ["plain", "bos", "metaspace"])
def test_pieces_of_real_tokenizers(kind: str) -> None:
    raw = hf_tokenizer(kind)
    pieces = probe(raw)
    assert pieces.problem == ""
    assert (pieces.prefix, pieces.suffix) == (((0,), (1,)) if kind == "bos" else ((), ()))
    texts = ["Alpha writes.\n", "beta: 12", " apples\n", "Epsilon"]
    ids, lengths = pieces.prompt(texts, special=False)
    assert raw.decode(ids) == "".join(texts)
    # A piece has the same ids wherever it stands.
    swapped, swapped_lengths = pieces.prompt([texts[0], *texts[:0:-1]], special=False)
    assert ids[lengths[0] : lengths[0] + lengths[1]] == swapped[-swapped_lengths[-1] :]


def test_bos_stands_only_in_front() -> None:
    pieces = probe(hf_tokenizer("bos"))
    ids, _ = pieces.prompt(["Alpha", "beta", "gamma"], special=True)
    assert ids.count(0) == ids.count(1) == 1
    assert (ids[0], ids[-1]) == (0, 1)


def test_anchor_is_used_only_where_needed() -> None:
    assert probe(hf_tokenizer("plain")).anchor == ""
    assert probe(hf_tokenizer("metaspace")).anchor == "\n"


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    def forgetful(text: str) -> list[int]:
        return [len(text)]

    found = probe_tokenizer(forgetful, forgetful, lambda ids: str(list(ids)))
    assert "do not decode" in found.problem
