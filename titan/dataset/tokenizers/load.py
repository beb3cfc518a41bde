"""Load a tokenizer by name: built in, a tiktoken rank file, a tokenizer.json, or a repository of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from titan.config.optional import import_optional
from titan.config.settings import suggest_nearest
from titan.dataset.sources.hub import fetch_tokenizer
from titan.dataset.tokenizers.rank_file import BUILT_IN, load_ranks
from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, read_tokenizer_file
from titan.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers


MOST_IDS = 10**7
"""The largest accepted vocabulary, as that of models."""
_EOS_NAMES = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]", "[SEP]")
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|begin▁of▁sentence|>", "[BOS]", "[CLS]")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's `tokenizers`; the `tokenizer_config.json` beside it names its eos and bos.

    Without that file they are found by their usual names. A bos that is also the eos counts as none. The bytes of a
    token are exact for byte-level and byte-fallback vocabularies, unless the tokenizer normalises text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], name: str = "tokenizer.json") -> None:
        """Take the vocabulary of `backend` and the special tokens that `config` names.

        Raises:
            ConfigError: when `config` names a token that is not in the vocabulary.
        """
        self.name = name
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self.vocab_size = max(self._vocab.values()) + 1
        if self.vocab_size > MOST_IDS:
            raise ConfigError(
                f"dataset.tokenizer={name}: has the id {self.vocab_size - 1}, and ids must be below {MOST_IDS:,}; "
                "correct the file."
            )
        self.eos = self._find_special_id(config, "eos_token", _EOS_NAMES)
        bos = self._find_special_id(config, "bos_token", _BOS_NAMES)
        self.bos = None if bos == self.eos else bos
        content = json.dumps([json.loads(backend.to_str()), self.eos, self.bos], sort_keys=True)
        self.fingerprint = blake2b(content.encode(), digest_size=32).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        if self.threads == 1:
            return [self._backend.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def encode_markup(self, text: str) -> list[int]:
        """Return the ids of `text`; names of special tokens in it become special tokens."""
        ids: list[int] = self._markup.encode(text, add_special_tokens=False).ids
        return ids

    def has_special(self, token: str) -> bool:
        """Return whether there is a special token of this name."""
        return self._vocab.get(token) in self._special

    def save(self, folder: Path) -> str:
        """Write tokenizer.json and tokenizer_config.json, which names eos and bos."""
        names = {"eos_token": self.eos, "bos_token": self.bos}
        config = {key: None if i is None else self._backend.id_to_token(i) for key, i in names.items()}
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
        return "tokenizer.json"

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with the names of special tokens, and U+FFFD for bytes that are not UTF-8."""
        return self._backend.decode(self._check_ids(ids), skip_special_tokens=False)

    def count_token_bytes(self) -> NDArray[np.uint16]:
        """Return the number of bytes of UTF-8 of each id, 0 for special tokens: uint16 [vocab_size]."""
        content = json.loads(self._backend.to_str())
        byte_level = '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["decoder"]])
        out = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, i in self._vocab.items():
            if i not in self._special:
                out[i] = len(token) if byte_level else _count_plain_bytes(token)
        return out

    @cached_property
    def _markup(self) -> tokenizers.Tokenizer:
        """The same tokenizer with special tokens recognised in text."""
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def _list_unused_ids(self) -> list[int]:
        return sorted({*range(self.vocab_size)} - {*self._vocab.values()})

    def _find_special_id(self, config: dict[str, Any], key: str, usual: Sequence[str]) -> int | None:
        if key not in config:
            return next((self._vocab[name] for name in usual if name in self._vocab), None)
        entry = config[key]
        name = entry.get("content") if isinstance(entry, dict) else entry
        if name is not None and name not in self._vocab:
            raise ConfigError(
                f"dataset.tokenizer={self.name}: its tokenizer_config.json names the {key} {name!r}, which the "
                f"vocabulary lacks; correct the name, or give null for none."
            )
        return None if name is None else self._vocab[name]


def load_json(path: Path, name: str) -> JsonTokenizer:
    """Load the tokenizer.json at `path`; messages call it `name`.

    Raises:
        ConfigError: when it is not a tokenizer.json.
    """
    tokenizers = import_optional("tokenizers", f"dataset.tokenizer={name}")
    text = read_tokenizer_file(path).decode("utf-8", "replace")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        if not backend.get_vocab_size():
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"dataset.tokenizer={name}: is not a tokenizer.json ({error}); give a complete one."
        ) from error
    return JsonTokenizer(backend, _load_config(path.with_name("tokenizer_config.json")), name)


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_tokenizer_file(path))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); correct it, or remove it.") from error
    return config if isinstance(config, dict) else {}


def _count_plain_bytes(token: str) -> int:
    """Return the bytes of a token of a vocabulary that isn't byte-level, as SentencePiece and WordPiece write it."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("▁", " ").encode())


_SUFFIXES = (".json", ".tiktoken", ".model")
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: titan4k (built in); a file *.tiktoken, tokenizer.model or tokenizer.json; or OWNER/NAME[@REVISION] on
            Hugging Face's hub, whose tokenizer.json is fetched once.

    Raises:
        ConfigError: when there is no such file or repository, it can't be fetched, or has another format.
    """
    tokenizer = _load_by_name(name)
    tokenizer.name = name
    return tokenizer


def _load_by_name(name: str) -> Tokenizer:
    if name == BUILT_IN:
        return load_ranks(Path(__file__).with_name("titan4k.tiktoken"))
    path = Path(name).expanduser()
    if not path.exists() and _ON_HUB.fullmatch(name) and path.suffix not in _SUFFIXES:
        return load_json(fetch_tokenizer(name), name)
    if not path.is_file():
        raise ConfigError(_describe_missing(name, path))
    if path.suffix == ".json":
        return load_json(path, name)
    if path.suffix in (".tiktoken", ".model"):
        return load_ranks(path)
    raise ConfigError(f"dataset.tokenizer={name}: unknown file type; give {BUILT_IN}, *.tiktoken, *.model or *.json.")


def _describe_missing(name: str, path: Path) -> str:
    if path.is_dir():
        return f"dataset.tokenizer={name}: is a folder; give a file in it, such as {path / 'tokenizer.json'}."
    hint = suggest_nearest(name, [BUILT_IN])
    ways = f"; give {BUILT_IN}, the path of a tokenizer's file, or OWNER/NAME, such as openai-community/gpt2."
    hint = ways if hint == "." else hint
    return f"dataset.tokenizer={name}: there is no such tokenizer or file{hint}"
