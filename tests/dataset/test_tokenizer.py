"""Tokenizers: exact round trips, special tokens, files of each kind and files of none."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import full
from titan.dataset.documents import Turn
from titan.dataset.tokenizers.load import LLAMA3_RANKS, cut_spaces, list_llama3_special, load_tokenizer, write_ranks
from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from titan.dataset.tokenizers.train import list_byte_characters, main, train_vocabulary
from titan.errors import ConfigError

BYTES = [bytes([byte]) for byte in range(256)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\r\t'sé漢🙂"))


@cache
def titan4k() -> Tokenizer:
    return load_tokenizer("titan4k")


@pytest.mark.parametrize("kind", ["titan4k", "json"])
@given(text=TEXT)
def test_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "json" / "tokenizer.json"
    made = load_tokenizer(str(file)) if file.exists() else byte_level_json(file.parent)
    tokenizer = titan4k() if kind == "titan4k" else made
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.count_token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.encode_batch([text, "x", text]) == [ids, tokenizer.encode("x"), ids]


def test_titan4k_is_complete() -> None:
    tokenizer = titan4k()
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos) == (4096, 4095, None)
    assert tokenizer.count_token_bytes().dtype == np.uint16
    assert (tokenizer.count_token_bytes() == 0).nonzero()[0].tolist() == [4095]
    assert len(tokenizer.encode("def __init__(self, name: str) -> None:\n    return self.name\n")) < 20


def test_documents_end_and_special_text_is_ordinary() -> None:
    tokenizer = titan4k()
    assert tokenizer.encode_document("hello") == [*tokenizer.encode("hello"), 4095]
    assert 4095 not in tokenizer.encode(f"a {END_OF_TEXT} b")
    assert tokenizer.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT == tokenizer.decode([4095])


def test_broken_utf8_decodes_to_replacement_characters(tmp_path: Path) -> None:
    write_ranks(tmp_path / "a.tiktoken", BYTES)
    assert load_tokenizer(str(tmp_path / "a.tiktoken")).decode([97, 0xC3, 98, 0xFF]) == "a\ufffdb\ufffd"


@pytest.mark.full
@pytest.mark.parametrize("blank", [" ", "\n \t"], ids=["spaces", "mixed"])
def test_endless_white_space_is_no_trap(blank: str) -> None:
    text = "a" + blank * 1_000_000 + "b"
    assert titan4k().decode(titan4k().encode(text)) == text


def test_only_endless_white_space_is_cut() -> None:
    assert cut_spaces("a " * 50_000) == ["a " * 50_000]
    parts = cut_spaces("x" * 20_000 + " " * 40_000 + "y")
    assert len(parts) == 3
    assert "".join(parts) == "x" * 20_000 + " " * 40_000 + "y"


@pytest.mark.parametrize("ids", [[4096], [-1], [0, 10**9]])
def test_ids_of_another_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="0 to 4095"):
        titan4k().decode(ids)


def ranks(folder: Path) -> Tokenizer:
    write_ranks(folder / "x.tiktoken", [*BYTES, b"ab"])
    return load_tokenizer(str(folder / "x.tiktoken"))


def llama3(folder: Path) -> Tokenizer:
    write_ranks(folder / "x.model", [*BYTES, *(b"%06d" % i for i in range(LLAMA3_RANKS - 256))])
    return load_tokenizer(str(folder / "x.model"))


def test_a_rank_file_gets_an_end(tmp_path: Path) -> None:
    tokenizer = ranks(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos) == (258, 257, None)
    assert tokenizer.encode_document("abc") == [256, 99, 257]


@pytest.mark.full
def test_128000_ranks_are_llama3s(tmp_path: Path) -> None:
    tokenizer = llama3(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (128_256, 128_000, 128_001)
    assert tokenizer.encode_document("a") == [128_000, 97, 128_001]
    assert (
        tokenizer.decode([128_006, 128_009, 128_255]) == "<|start_header_id|><|eot_id|><|reserved_special_token_250|>"
    )
    assert len(set(list_llama3_special())) == 256


def test_the_fingerprint_is_the_content(tmp_path: Path) -> None:
    write_ranks(tmp_path / "a.tiktoken", [*BYTES, b"ab"])
    write_ranks(tmp_path / "b.tiktoken", [*BYTES, b"ab"])
    write_ranks(tmp_path / "c.tiktoken", [*BYTES, b"ba"])
    a, b, c = (load_tokenizer(str(tmp_path / f"{name}.tiktoken")).fingerprint for name in "abc")
    assert a == b != c


def _lines(*lines: tuple[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in lines)


RANKS = _lines(*((byte, rank) for rank, byte in enumerate(BYTES)))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        pytest.param("titan8k", None, ["titan8k", "did you mean 'titan4k'?"], id="unknown-name"),
        pytest.param("x.tiktoken", None, ["x.tiktoken", "no such"], id="missing-file"),
        pytest.param("x.bin", b"abc", ["x.bin", "unknown file type"], id="unknown-kind"),
        pytest.param("", b"", ["folder", "tokenizer.json"], id="folder"),
        pytest.param("x.tiktoken", b"", ["single byte"], id="empty"),
        pytest.param("x.tiktoken", RANKS + b"oops\n", ["line 257"], id="line-without-rank"),
        pytest.param("x.tiktoken", RANKS + b"!! 256\n", ["line 257"], id="line-without-base64"),
        pytest.param("x.tiktoken", RANKS + _lines((b"ab", 300)), ["n - 1"], id="gap-in-ranks"),
        pytest.param("x.tiktoken", RANKS + _lines((b"ab", 5)), ["n - 1"], id="rank-twice"),
        pytest.param("x.tiktoken", _lines((b"a", 0), (b"b", 1)), ["single byte"], id="missing-bytes"),
        pytest.param("x.tiktoken", RANKS[:-3], ["n - 1"], id="cut-short"),
        pytest.param("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0", ["SentencePiece"], id="sentencepiece"),
        pytest.param("tokenizer.json", b"{oops", ["tokenizer.json"], id="json-broken"),
        pytest.param("tokenizer.json", b"{}", ["tokenizer.json"], id="json-of-another-kind"),
    ],
)
def test_bad_tokenizers_are_refused(tmp_path: Path, file: str, content: bytes | None, words: list[str]) -> None:
    if content is not None and file:
        (tmp_path / file).write_bytes(content)
    name = file if file == "titan8k" else str(tmp_path / file)
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(name)
    assert all(word in str(refusal.value) for word in ["dataset.tokenizer=", *words])
    assert "\n" not in str(refusal.value)


def byte_level_json(folder: Path, config: dict[str, object] | None = None) -> Tokenizer:
    """A byte-level tokenizer.json: the bytes, "ab", and two special tokens; it truncates, pads and adds specials."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocabulary = {character: byte for byte, character in enumerate(list_byte_characters())} | {"ab": 256}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    backend.enable_truncation(3)
    backend.enable_padding(length=12)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder / "tokenizer.json"))


def test_a_tokenizer_json_with_a_huge_id_is_refused(tmp_path: Path) -> None:
    byte_level_json(tmp_path / "x")
    content = json.loads((tmp_path / "x/tokenizer.json").read_text())
    content["model"]["vocab"]["ab"] = 4_000_000_000
    (tmp_path / "x/tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="has the id 4000000000, and ids must be below"):
        load_tokenizer(str(tmp_path / "x/tokenizer.json"))


def test_tokenizer_json_adds_only_what_is_asked(tmp_path: Path) -> None:
    tokenizer = byte_level_json(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (259, 257, 258)
    assert tokenizer.encode("abcab") == [256, 99, 256]
    assert tokenizer.encode_document("ab") == [257, 256, 258]
    assert not {257, 258} & set(tokenizer.encode("<s>ab</s>"))
    assert tokenizer.decode([256, 258]) == "ab</s>"
    assert tokenizer.count_token_bytes()[255:].tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        pytest.param({"bos_token": None, "eos_token": "</s>"}, None, 258, id="no-bos"),
        pytest.param({"bos_token": {"content": "</s>"}, "eos_token": "<s>"}, 258, 257, id="named-in-full"),
        pytest.param({"bos_token": "</s>", "eos_token": "</s>"}, None, 258, id="one-for-both"),
    ],
)
def test_tokenizer_config_names_the_ends(tmp_path: Path, config: dict[str, object], bos: int, eos: int) -> None:
    tokenizer = byte_level_json(tmp_path, config)
    assert (tokenizer.bos, tokenizer.eos) == (bos, eos)


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
def test_a_tokenizer_config_of_another_vocabulary_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"tokenizer_config.json names the {key} '<none>', which the vocabulary lacks"
    ):
        byte_level_json(tmp_path, {key: "<none>"})


def test_a_broken_tokenizer_config_is_refused(tmp_path: Path) -> None:
    byte_level_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_bytes_of_a_sentencepiece_like_tokenizer_json(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab={"<0x0A>": 0, "▁": 1, "é": 2, "▁é": 3}, merges=[("▁", "é")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).count_token_bytes().tolist() == [1, 1, 2, 3]


SPECIAL = ["<|end_of_text|>", "<|end", "a b", "\r\n", "  ", "\u3000", "é🙂", "x" * 50]


@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(max_size=20)), max_size=8), threads=st.integers(1, 2))
@pytest.mark.full
def test_arrays_hold_the_same_ids(parts: list[str], threads: int) -> None:
    tokenizer = load_tokenizer("titan4k")
    tokenizer.threads = threads
    texts, encode = ["".join(parts), *parts], tokenizer._encoding.encode_ordinary  # type: ignore[attr-defined]
    expected = [[i for piece in cut_spaces(text) for i in encode(piece)] for text in texts]
    assert [found.tolist() for found in tokenizer.encode_arrays(texts)] == expected


@pytest.mark.full
@pytest.mark.parametrize("count", [16_383, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("before", [0, 1, 8_191, 8_192, 8_193, 16_384, 20_000])
def test_long_spaces_are_found_wherever_they_are(before: int, count: int) -> None:
    text = "x" * before + " " * count + "y"
    pieces = cut_spaces(text)
    assert "".join(pieces) == text
    assert len(pieces) == -(-count // 16_384)
    assert titan4k().decode(titan4k().encode(text)) == text


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda folder: titan4k(), "titan4k", id="built-in"),
        full(ranks, "tokenizer.tiktoken", id="ranks"),
        pytest.param(llama3, "tokenizer.model", id="llama3"),
        pytest.param(byte_level_json, "tokenizer.json", id="json"),
        pytest.param(
            lambda f: byte_level_json(f, {"eos_token": "<s>", "bos_token": None}), "tokenizer.json", id="config"
        ),
    ],
)
def test_what_is_saved_is_the_same(tmp_path: Path, make: Callable[[Path], Tokenizer], name: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    tokenizer = make(tmp_path)
    assert tokenizer.save(folder) == name
    again = load_tokenizer(name if name == "titan4k" else str(folder / name))
    assert (again.fingerprint, again.eos, again.bos) == (tokenizer.fingerprint, tokenizer.eos, tokenizer.bos)
    assert again.encode_document("abc <s>") == tokenizer.encode_document("abc <s>")
    assert bool(list(folder.iterdir())) == (name != "titan4k")


def test_notes(tmp_path: Path) -> None:
    assert titan4k().notes() == ["titan4k: 4,096 ids; documents end with <|end_of_text|>, begin without a token"]
    tokenizer = byte_level_json(tmp_path)
    assert tokenizer.notes() == [f"{tokenizer.name}: 259 ids; documents end with </s>, begin with <s>"]
    endless = byte_level_json(tmp_path, {"eos_token": None}).notes()
    assert endless[1:] == [f"warning: {tokenizer.name} has no end-of-document token: documents are not separated"]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 270
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").unlink()
    gaps = load_tokenizer(tokenizer.name).notes()
    assert gaps[0].startswith(f"{tokenizer.name}: 271 ids")
    assert gaps[1] == f"warning: {tokenizer.name}: 11 ids are unused, the first is 257"


MARKUP = Turn("<s>", trained=False, special=True)


@pytest.mark.parametrize(
    ("turns", "ids", "trained"),
    [
        pytest.param((), [257, 258], "01", id="nothing"),
        pytest.param((Turn("ab", False), Turn("ab")), [257, 256, 256, 258], "0011", id="framed"),
        pytest.param((MARKUP, Turn("ab")), [257, 256, 258], "011", id="bos-of-the-template"),
        pytest.param((Turn("c", False), Turn("</s>", True, True)), [257, 99, 258], "001", id="eos-of-the-template"),
        pytest.param(
            (Turn("c"), MARKUP, Turn("</s>c", False, True)), [257, 99, 257, 258, 99, 258], "010001", id="inside"
        ),
    ],
)
@pytest.mark.parametrize("threads", [None, 1])
def test_turns(tmp_path: Path, turns: tuple[Turn, ...], ids: list[int], trained: str, threads: int | None) -> None:
    tokenizer = byte_level_json(tmp_path)
    tokenizer.threads = threads
    assert tokenizer.encode_turns(turns) == (ids, [mark == "1" for mark in trained])


@pytest.mark.parametrize("make", [llama3, byte_level_json], ids=["ranks", "json"])
def test_content_gives_no_special_tokens(tmp_path: Path, make: Callable[[Path], Tokenizer]) -> None:
    tokenizer = make(tmp_path)
    name = tokenizer.decode([tokenizer.bos or 0])
    assert tokenizer.has_special(name) and not tokenizer.has_special("ab") and not tokenizer.has_special("<none>")
    ids, trained = tokenizer.encode_turns((Turn(f"x{name}", False), Turn(f"{name}y", special=True)))
    frame = [tokenizer.bos, *tokenizer.encode(f"x{name}"), tokenizer.bos, *tokenizer.encode("y"), tokenizer.eos]
    assert ids == frame and tokenizer.bos not in tokenizer.encode(f"x{name}")
    assert trained == [False] * (len(ids) - 3) + [True] * 3


@pytest.mark.parametrize("threads", [1, 2, None])
def test_any_number_of_threads_gives_the_same(tmp_path: Path, threads: int | None) -> None:
    for tokenizer in (load_tokenizer("titan4k"), byte_level_json(tmp_path)):
        tokenizer.threads = threads
        texts = [f"ab {i} abc" for i in range(20)]
        assert tokenizer.encode_batch(texts) == [titan4k().encode(t) if tokenizer.name == "titan4k" else
                                                 tokenizer.encode(t) for t in texts]  # fmt: skip


TEXTS = ["the cat sat on the mat, the cat's 1234 hats\n" * 3, "  häßlich 漢字 the\r\n", "theatre then"]


def test_training_is_deterministic_and_complete() -> None:
    tokens = train_vocabulary(TEXTS, 280)
    assert tokens == train_vocabulary(TEXTS, 280)
    assert len(set(tokens)) == 280
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    assert b"the" in tokens or b" the" in tokens


def test_byte_characters_are_distinct_and_those_of_byte_level_bpe() -> None:
    from tokenizers import pre_tokenizers

    assert sorted(list_byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert list_byte_characters()[ord("a")] == "a"
    assert list_byte_characters()[ord(" ")] == "Ġ"


def test_the_command_writes_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(TEXTS) * 20)
    out = tmp_path / "out.tiktoken"
    assert main([str(tmp_path / "corpus.txt"), f"to={out}", "ranks=270"]) == 0
    tokenizer = load_tokenizer(str(out))
    assert tokenizer.vocab_size == 271
    text = "a theatre of 漢字 cats"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" the")) < 4


@pytest.mark.parametrize(
    ("arguments", "shown", "ids"),
    [
        pytest.param([], "reads       1 file of .txt, 844 bytes|leaves out  1 file of .jsonl, ", 2, id="text alone"),
        pytest.param(["field=body"], "reads       1 file of .jsonl, |; 1 file of .txt, 844 bytes", 1, id="field"),
    ],
)
def test_it_says_what_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], shown: str, ids: int
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the theatre, " * 60 + "end of the text\n" * 4)
    (folder / "b.jsonl").write_text((json.dumps({"body": "für über"}) + "\n") * 60)
    assert main([str(folder), f"to={tmp_path}/o.tiktoken", "ranks=266", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in shown.split("|"))
    assert len(load_tokenizer(str(tmp_path / "o.tiktoken")).encode("ü")) == ids
    assert main([str(folder), f"to={tmp_path}/o.tiktoken", "ranks=258"]) == 2
    assert "there is such a file; give another file, or delete this one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["{}/c.txt", "to={}/o.tiktoken", "ranks=255"], "ranks=255: the 256 single bytes", id="fewer-than-bytes"
        ),
        pytest.param(["{}/c.txt", "to={}/o.tiktoken", "ranks=9999"], "fewer ranks", id="more-than-the-text-gives"),
        pytest.param(["{}/c.txt", "to={}/o.txt", "ranks=257"], ".tiktoken", id="another-suffix"),
        pytest.param(["{}/c.txt", "to={}/gone/o.tiktoken", "ranks=257"], "there is no directory", id="no-such-place"),
        pytest.param(["{}/r.jsonl", "to={}/o.tiktoken"], "give field=KEY", id="records"),
        pytest.param(["{}/r.jsonl", "to={}/o.tiktoken", "field=a"], "the right key in field.", id="another-key"),
        pytest.param(["{}/gone.txt", "to={}/o.tiktoken"], "no such file", id="no-such-corpus"),
    ],
)
def test_the_command_refuses_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "c.txt").write_text("".join(TEXTS))
    (tmp_path / "r.jsonl").write_text('{"text": "a"}')
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
