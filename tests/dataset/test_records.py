"""Rows: Parquet, and conversations of any rows."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.support.tiers import full
from titan.dataset.documents import Skip, Source, Turn
from titan.dataset.schema import Chat
from titan.dataset.sources.local import build_jsonl_source, build_parquet_source
from titan.dataset.sources.records import iterate_batches, open_parquet
from titan.errors import ConfigError

TEXTS = [f"text {i}" for i in range(1000)]


def read(source: Source) -> list[Any]:
    return [document for part in source.parts() for document in source.documents(part)]


def write(path: Path, columns: dict[str, Any], rows_a_group: int = 300) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_a_group)
    return path


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"id": list(range(1000)), "text": TEXTS})
    write(tmp_path / "a.parquet", {"text": ["first", None, " "]})
    source = build_parquet_source(str(tmp_path))
    assert [part.name.rpartition("/")[2] for part in source.parts()] == [
        "a.parquet, row group 0", *(f"b.parquet, row group {i}" for i in range(4))
    ]  # fmt: skip
    where = f"{tmp_path / 'a.parquet'}, row group 0, row"
    assert read(source) == ["first", Skip("empty", f"{where} 1"), Skip("empty", f"{where} 2"), *TEXTS]
    assert all(part.bytes > 0 for part in source.parts())


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_parquet_of_other_kinds_of_text(tmp_path: Path, kind: str) -> None:
    import pyarrow

    types = {
        "large_string": pyarrow.large_string(),
        "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    }
    column = pyarrow.array(TEXTS).cast(types[kind])
    assert read(build_parquet_source(str(write(tmp_path / "x.parquet", {"text": column})))) == TEXTS


def test_text_of_another_encoding_in_parquet(tmp_path: Path) -> None:
    import pyarrow

    column = pyarrow.array([b"one", "grün".encode("latin-1"), b"three"]).view(pyarrow.string())
    file = write(tmp_path / "x.parquet", {"text": column})
    with pytest.raises(ConfigError, match=r"x\.parquet, row group 0, row 1: not UTF-8.*dataset\.on_error=skip"):
        read(build_parquet_source(str(file)))
    where = f"{file}, row group 0, row 1"
    assert read(build_parquet_source(str(file), on_error="skip")) == ["one", Skip("not UTF-8", where), "three"]


@pytest.mark.parametrize("nested", [False, True], ids=["text", "chat"])
def test_a_value_that_parquet_stores_once_is_not_held_for_each_row(nested: bool, tmp_path: Path) -> None:
    import pyarrow as pa

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x" * 1_000_000]))
    chat = pa.ListArray.from_arrays(
        pa.array(range(301), pa.int32()), pa.StructArray.from_arrays([text, text], ["role", "content"])
    )
    file = write(tmp_path / "x.parquet", {"text": chat if nested else text})
    assert file.stat().st_size < 100_000
    with file.open("rb") as stream:
        table, sizes = open_parquet(stream, ("text",)), list[int]()
        before = pa.total_allocated_bytes()
        for batch in islice(iterate_batches(table, 0, ("text",)), 20):
            assert batch.num_rows == 1 and len(str(batch.column(0).to_pylist()[0])) >= 1_000_000
            sizes.append(pa.total_allocated_bytes() - before)
    assert max(sizes) < 20_000_000, "300 MB are in the first batch if it is expanded"


def test_a_row_of_parquet_with_too_much_text_is_rejected(tmp_path: Path) -> None:
    import pyarrow as pa

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["x" * 1_000_000]))
    rows = pa.ListArray.from_arrays(pa.array([0, 200], pa.int32()), text)
    file = write(tmp_path / "x.parquet", {"text": rows})
    with pytest.raises(ConfigError, match=r"row 0: the row has 200,000,000 bytes, more than 134,217,728; split it, or"):
        read(build_parquet_source(str(file)))


def test_parquet_broken_midway_gives_what_comes_before(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", {"text": TEXTS}, 100)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 200] = bytes(200)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"row group \d: not a Parquet file, or a broken or truncated one"):
        read(build_parquet_source(str(file)))
    came = read(build_parquet_source(str(file), on_error="skip"))
    assert TEXTS[0] in came and TEXTS[-1] in came
    assert {d.reason for d in came if isinstance(d, Skip)} == {"broken file"}


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        pytest.param(None, "text", ["x.parquet", "not a Parquet file", "fetch it again"], id="no-parquet"),
        pytest.param({"text": ["a"]}, "body", ["x.parquet", "no column 'body'", "its columns: text"], id="column"),
        pytest.param({"text": [1]}, "text", ["row 0", "'text' is 1, not text", "dataset.field"], id="type"),
    ],
)
def test_bad_parquet_is_refused(tmp_path: Path, content: Any, field: str, words: list[str]) -> None:
    file = tmp_path / "x.parquet"
    if content:
        write(file, content)
    else:
        file.write_bytes(b"hello")
    with pytest.raises(ConfigError) as refusal:
        read(build_parquet_source(str(file), field))
    assert all(word in str(refusal.value) for word in words)
    assert "\n" not in str(refusal.value)


def test_digests_differ_by_what_is_read_and_not_by_place(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "x.parquet", {"text": ["a"]})
    a, b = (build_parquet_source(str(tmp_path / folder)).digest() for folder in "ab")
    assert a == b != build_parquet_source(str(tmp_path / "a"), "body").digest()
    assert a == build_parquet_source(str(tmp_path / "a"), on_error="skip").digest()
    assert a != build_jsonl_source(str(tmp_path / "a" / "x.parquet")).digest()


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello <|eot_id|><|im_end|>\n"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
    {"role": "user", "content": "Still here"},
]
LLAMA3 = [
    "<|start_header_id|>", "system", "<|end_header_id|>\n\n", "Be brief.", "<|eot_id|>",
    "<|start_header_id|>", "user", "<|end_header_id|>\n\n", "Hello <|eot_id|><|im_end|>", "<|eot_id|>",
    "<|start_header_id|>", "assistant", "<|end_header_id|>\n\n", "*Hi.", "*<|eot_id|>",
    "<|start_header_id|>", "user", "<|end_header_id|>\n\n", "Bye", "<|eot_id|>",
    "<|start_header_id|>", "assistant", "<|end_header_id|>\n\n", "*See you.", "*<|eot_id|>",
]  # fmt: skip
CHATML = [
    "<|im_start|>", "system\n", "Be brief.", "<|im_end|>",
    "\n<|im_start|>", "user\n", " Hello <|eot_id|><|im_end|>\n", "<|im_end|>",
    "\n<|im_start|>", "assistant\n", "*Hi.", "*<|im_end|>",
    "\n<|im_start|>", "user\n", "Bye", "<|im_end|>",
    "\n<|im_start|>", "assistant\n", "*See you.", "*<|im_end|>",
]  # fmt: skip
PLAIN = [
    "System:", " Be brief.", "\n", "User:", " Hello <|eot_id|><|im_end|>", "\n", "Assistant:", "* Hi.", "*\n",
    "User:", " Bye", "\n", "Assistant:", "* See you.",
]  # fmt: skip
MARKUP = {"<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "<|im_start|>", "\n<|im_start|>", "<|im_end|>"}


def tokenizer_with(folder: Path, special: Sequence[str]) -> str:
    """A byte-level tokenizer.json with these special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from titan.dataset.tokenizers.train import list_byte_characters

    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(list_byte_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "plain": ["<|endoftext|>"],
}


@pytest.mark.parametrize(("name", "expected"), [("llama3", LLAMA3), ("chatml", CHATML), ("plain", PLAIN)])
def test_templates(tmp_path: Path, name: str, expected: list[str]) -> None:
    """`*` marks what counts in the loss; auto takes what the tokenizer has."""
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    source = Chat(path=str(tmp_path / "x.jsonl"), tokenizer=tokenizer_with(tmp_path, SPECIAL[name])).build()
    (turns,) = read(source)
    assert ["*" * turn.trained + turn.text for turn in turns] == expected
    assert source.masked
    contents = {message["content"].strip() for message in MESSAGES}
    assert all(turn.special == (turn.text in MARKUP) for turn in turns if turn.text.strip() not in contents)
    assert not any(turn.special for turn in turns if turn.text.strip() in contents)


@pytest.mark.parametrize("name", list(SPECIAL))
def test_tokens_of_a_conversation(tmp_path: Path, name: str) -> None:
    from titan.dataset.tokenizers.load import load_tokenizer

    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    tokenizer = load_tokenizer(tokenizer_with(tmp_path, SPECIAL[name]))
    (turns,) = read(Chat(path=str(tmp_path / "x.jsonl"), tokenizer=tokenizer.name).build())
    ids, trained = tokenizer.encode_turns(turns)
    assert len(ids) == len(trained)
    begin = ["<|begin_of_text|>"] if name == "llama3" else []
    end = "<|end_of_text|>" if name == "llama3" else "<|endoftext|>"
    assert tokenizer.decode(ids) == "".join([*begin, *(turn.text for turn in turns), end])
    counted = "".join(turn.text for turn in turns if turn.trained)
    assert tokenizer.decode([i for i, counts in zip(ids, trained, strict=True) if counts]) == counted + end
    tokens = [i for i in ids if i >= 256]
    markup = sum(turn.special for turn in turns)
    assert len(tokens) == markup + len(begin) + 1  # none of what the user wrote


@pytest.mark.parametrize(
    ("given", "row"),
    [
        pytest.param(
            {}, {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, id="messages"
        ),
        pytest.param(
            {"messages": "conversations"},
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            id="conversations",
        ),
        pytest.param({"prompt": "q", "completion": "a"}, {"q": "Q", "a": "A"}, id="prompt-and-completion"),
        pytest.param(
            {"prompt": "q", "completion": "a"},
            {"q": [{"role": "user", "content": "Q"}], "a": [{"role": "assistant", "content": "A"}]},
            id="lists-of-both",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "folder"])
def test_rows_of_each_shape_and_kind(tmp_path: Path, given: dict[str, str], row: dict[str, Any], kind: str) -> None:
    file = tmp_path / ("x.jsonl" if kind == "folder" else f"x.{kind}")
    line = json.dumps(row).encode() + b"\n"
    if kind == "parquet":
        write(file, {key: [value] for key, value in row.items()})
    else:
        file.write_bytes(gzip.compress(line) if kind.endswith("gz") else line)
    place = {"name": str(tmp_path)} if kind == "folder" else {"path": str(tmp_path)}
    assert read(Chat(**given, **place).build()) == [
        (Turn("User:", False), Turn(" Q", False), Turn("\n", False), Turn("Assistant:", False), Turn(" A"))
    ]


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        pytest.param({"messages": MESSAGES[:2]}, "no answer", [], id="nobody-answers"),
        pytest.param({"messages": [{"role": "assistant", "content": " "}]}, "no answer", [], id="empty-answer"),
        pytest.param({"messages": []}, "no answer", [], id="nothing"),
        pytest.param({"chat": []}, "no text", ["no key 'messages'", "its keys: chat", "dataset.messages"], id="no-key"),
        pytest.param({"messages": "x"}, "no text", ["not a list of messages", "dataset.messages"], id="text"),
        pytest.param({"messages": [{"role": "user"}]}, "no text", ["{role:user}", "dataset.messages"], id="no-content"),
    ],
)
def test_rows_without_a_conversation(tmp_path: Path, row: dict[str, Any], reason: str, words: list[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(row))
    assert read(Chat(path=str(file), on_error="skip").build()) == [Skip(reason, f"{file}, line 1")]
    if words:
        with pytest.raises(ConfigError) as refusal:
            read(Chat(path=str(file)).build())
        assert all(word in str(refusal.value) for word in [f"{file}, line 1", *words])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({}, "either dataset.path=FILES or dataset.name=DATASET", id="nothing"),
        pytest.param({"path": "a", "name": "b"}, "either dataset.path", id="both"),
        pytest.param({"path": "a", "prompt": "q"}, "both of dataset.prompt=KEY and dataset.completion=KEY", id="half"),
        pytest.param(
            {"path": "a", "template": "llama3"}, r"titan4k has no special token <\|start_header", id="template"
        ),
        pytest.param({"path": "HERE"}, "select one kind with a glob", id="files-of-both-kinds"),
    ],
)
def test_bad_settings_of_chat(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    for name in ("x.jsonl", "x.parquet"):
        (tmp_path / name).write_text("x")
    given = {key: str(tmp_path) if value == "HERE" else value for key, value in given.items()}
    with pytest.raises(ConfigError, match=words):
        Chat(**given).build()


def test_the_digest_of_a_chat_is_its_layout_too(tmp_path: Path) -> None:
    for folder in ("a", "b", "tokenizer"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    path, tokenizer = str(tmp_path / "a"), tokenizer_with(tmp_path / "tokenizer", SPECIAL["llama3"])
    same = [
        Chat(path=path),
        Chat(path=str(tmp_path / "b")),
        Chat(path=f"{path}/*.jsonl", template="plain", on_error="skip"),
        Chat(path=path, tokenizer=tokenizer, template="plain"),
    ]
    others = [
        Chat(path=path, messages="m"),
        Chat(path=path, prompt="q", completion="a"),
        Chat(path=path, tokenizer=tokenizer),
    ]
    assert len({chat.build().digest() for chat in same}) == 1
    assert len({chat.build().digest() for chat in (same[0], *others)}) == 4


@pytest.mark.parametrize(
    ("count", "kind", "words"),
    [
        full(2**25 + 1, "list", "1 row with 33,554,433 values, more than 33,554,432, in the", id="values"),
        pytest.param(22 * 10**5, "list", "the row has 140,800,000 bytes, more than 134,217,728", id="elements"),
        full(150 * 2**20, "text", "are unpacked to 157,", id="page"),
    ],
)
def test_a_small_file_does_not_take_the_memory(tmp_path: Path, count: int, kind: str, words: str) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "x.parquet"
    if kind == "list":
        offsets = pyarrow.array([0, count], pyarrow.int32())
        values = pyarrow.ListArray.from_arrays(offsets, pyarrow.nulls(count, pyarrow.string()))
    else:
        values = pyarrow.array(["a" * count])
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 20_000
    with pytest.raises(ConfigError, match=re.escape(words)):
        list(build_parquet_source(str(file)).documents(build_parquet_source(str(file)).parts()[0]))
    skipped = build_parquet_source(str(file), on_error="skip")
    assert [skip for part in skipped.parts() for skip in skipped.documents(part)] == [Skip("too long", ANY)]
