"""Training a vocabulary: deterministic, complete, and loadable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.train import list_byte_characters, main, train_vocabulary
from titan.errors import ConfigError

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
        pytest.param(["{}/c.txt", "to={}/o.tiktoken", "ranks=100"], "256 or more", id="fewer-than-bytes"),
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


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks=255"):
        train_vocabulary(TEXTS, 255)
