"""Tokens to text as they come: characters in several tokens, and texts that end a continuation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.dataset.tokenizers.json_file import JsonTokenizer
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.rank_file import RankTokenizer
from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from titan.generation.decode import Detokenizer

BYTES = RankTokenizer({bytes([i]): i for i in range(256)}, [END_OF_TEXT])
"""A token a byte."""
TITAN = load_tokenizer("titan4k")


def metaspace() -> Tokenizer:
    """A tokenizer that marks words and falls back to bytes, like Llama 2's."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<unk>": 256, "▁": 257, "▁so": 258, "▁what": 259, "a": 260}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    decoders = [replace, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), strip]
    backend.decoder = tokenizers.decoders.Sequence(decoders)
    return JsonTokenizer(backend, {})


def pieces(tokenizer: Tokenizer, tokens: list[int], prompt: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What is shown after each token, and at the end."""
    text = Detokenizer(tokenizer, prompt, stop)
    shown = []
    for token in tokens:
        shown.append(text.add_token(token))
        if text.stopped:
            break
    shown.append(text.finish())
    assert "".join(shown) == text.text
    return shown


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", [BYTES, TITAN], ids=["bytes", "titan4k"])
@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
def test_the_pieces_are_the_text(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    shown = pieces(tokenizer, tokenizer.encode(text), tokenizer.encode(prompt))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown).replace("\ufffd", "", text.count("\ufffd"))


def test_a_character_comes_when_it_is_complete() -> None:
    assert pieces(BYTES, list("aé€😀b".encode()), []) == [
        "a", "", "é", "", "", "€", "", "", "", "😀", "b", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        pytest.param([0xC3], ["", "\ufffd"], id="cut-at-the-end"),
        pytest.param([0xC3, 0x41], ["", "\ufffdA", ""], id="broken-by-what-follows"),
    ],
)
def test_what_is_no_character_is_marked(tokens: list[int], shown: list[str]) -> None:
    assert pieces(BYTES, tokens, []) == shown


def test_the_first_word_keeps_its_space() -> None:
    tokenizer = metaspace()
    assert tokenizer.decode([258, 259]) == "so what"
    assert pieces(tokenizer, [259, 260, 0xC3, 0xA9], [257, 258]) == [" what", "a", "", "é", ""]


@pytest.mark.parametrize(
    ("text", "stop", "given", "stopped"),
    [
        pytest.param("one. two", (".",), "one", True, id="a-character"),
        pytest.param("one\n\ntwo", ("\n\n",), "one", True, id="over-two-tokens"),
        pytest.param("one\ntwo", ("\n\n",), "one\ntwo", False, id="only-its-beginning"),
        pytest.param("one\n", ("\n\n",), "one\n", False, id="its-beginning-at-the-end"),
        pytest.param("aab", ("ab",), "a", True, id="begun-twice"),
        pytest.param("one two three", ("three", "two"), "one ", True, id="the-first-of-several"),
        pytest.param("abc", ("bcd", "c"), "ab", True, id="one-inside-another's-beginning"),
        pytest.param("abc", ("",), "abc", False, id="nothing"),
        pytest.param("one😀two", ("😀",), "one", True, id="of-several-bytes"),
    ],
)
def test_stop_texts(text: str, stop: tuple[str, ...], given: str, stopped: bool) -> None:
    whole = Detokenizer(BYTES, [], stop)
    for byte in text.encode():
        if not whole.stopped:
            whole.add_token(byte)
    whole.finish()
    assert (whole.text, whole.stopped) == (given, stopped)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    shown = "".join(pieces(BYTES, list(text.encode()), [], tuple(stop)))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    if not ends:
        assert shown == text
    else:  # by the token that completes one; of two that it completes the longer is taken away
        assert shown == text[: min(text.find(s, 0, ends[0]) for s in stop if s in text[: ends[0]])]
    assert not any(s in shown for s in stop)
