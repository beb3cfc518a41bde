"""The tokenizers, and how one is loaded by its name.

`titan4k` is built in. Others are tiktoken rank files (byte-level BPE, one `base64 rank` per line, all used with Llama
3's split pattern), a tokenizer.json of Hugging Face, or such a file of a repository of the hub.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from titan.config.optional import import_optional
from titan.config.settings import suggest_nearest
from titan.dataset.sources.hub import fetch_tokenizer
from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from titan.errors import ConfigError
from titan.files import untrusted

if TYPE_CHECKING:
    import tokenizers

BUILT_IN = "titan4k"

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merging (from its published tokenizer)."""

LLAMA3_RANKS = 128_000
_LLAMA3_SPECIAL = 256
_SPACES = 16_384
_LOOK = 64
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_SPACES + 1},}}")


class RankTokenizer(Tokenizer):
    """A byte-level BPE in tiktoken's format, with special tokens after the ranks."""

    def __init__(self, ranks: dict[bytes, int], special: Sequence[str]) -> None:
        """`ranks` are 0 to n - 1, all 256 bytes among them; `special` names the ids from n on."""
        self._ranks = ranks
        self._special = {name: len(ranks) + i for i, name in enumerate(special)}
        self.vocab_size = len(ranks) + len(special)
        self.eos, self.bos = self._special.get(END_OF_TEXT), self._special.get("<|begin_of_text|>")
        self.fingerprint = self._compute_fingerprint()
        import tiktoken

        self._encoding = tiktoken.Encoding(
            "titan", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self._special
        )

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """The rank, which is the id, of each token's bytes."""
        return self._ranks

    @property
    def special(self) -> Sequence[str]:
        """The names of the special tokens, in the order of their ids."""
        return list(self._special)

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as an array, without Python lists of ids, which take half of the time."""
        threads = self.threads or min(8, os.cpu_count() or 1)
        if len(texts) < 4 or threads == 1:
            return [self._encode_array(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self._encode_array, texts))

    def _encode_array(self, text: str) -> NDArray[np.uint32]:
        encode = partial(self._encoding.encode_to_numpy, disallowed_special=())
        pieces = cut_spaces(text)
        return encode(text) if len(pieces) == 1 else np.concatenate([encode(piece) for piece in pieces])

    def encode_markup(self, text: str) -> list[int]:
        """Return the ids of `text`; names of special tokens in it become special tokens."""
        return self._encoding.encode(text, allowed_special="all")

    def has_special(self, token: str) -> bool:
        """Return whether there is a special token of this name."""
        return token in self._special

    def save(self, folder: Path) -> str:
        """Write the rank file, unless the tokenizer is built in."""
        if self.name == BUILT_IN:
            return BUILT_IN
        name = "tokenizer.model" if len(self._ranks) == LLAMA3_RANKS else "tokenizer.tiktoken"
        write_ranks(folder / name, sorted(self._ranks, key=lambda token: self._ranks[token]))
        return name

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are not UTF-8."""
        return self._encoding.decode(self._check_ids(ids), errors="replace")

    def count_token_bytes(self) -> NDArray[np.uint16]:
        """Return the number of bytes of UTF-8 of each id, 0 for special tokens: uint16 [vocab_size]."""
        out = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, rank in self._ranks.items():
            out[rank] = len(token)
        return out

    def _compute_fingerprint(self) -> str:
        digest = blake2b(PATTERN.encode(), digest_size=32)
        for token, _ in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update("\0".join(self._special).encode())
        return digest.hexdigest()


def read_tokenizer_file(path: Path) -> bytes:
    """Return the content of a tokenizer's file."""
    try:
        return untrusted.read_regular_file(path)
    except OSError as error:
        raise ConfigError(f"dataset.tokenizer={path}: can't be read ({error.strerror}); make it readable.") from error
    except ValueError as error:
        raise ConfigError(f"dataset.tokenizer={path}: {error}; name a file.") from error


def load_ranks(path: Path) -> RankTokenizer:
    """Return the tokenizer of a rank file."""
    data = read_tokenizer_file(path)
    if path.suffix == ".model" and (b"<unk>" in data[:4096] or b"\0" in data[:4096]):
        raise ConfigError(
            f"dataset.tokenizer={path}: is a SentencePiece model (as of Llama 2), which titan doesn't read; "
            f"give the tokenizer.json of the same model."
        )
    ranks = _parse_ranks(path, data)
    return RankTokenizer(ranks, list_llama3_special() if len(ranks) == LLAMA3_RANKS else [END_OF_TEXT])


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            if line.strip():
                raise _build_format_error(path, f"line {number} is not `base64 rank`") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _build_format_error(path, "its ranks are not 0 to n - 1, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise _build_format_error(path, "not every single byte has a rank")
    return ranks


def _build_format_error(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"dataset.tokenizer={path}: is not a tiktoken rank file ({reason}); give a complete one.")


def cut_spaces(text: str) -> list[str]:
    """Split `text` inside runs of over 16,384 white space characters only, which overflow the splitter's stack."""
    if not any(text[i : i + _LOOK].isspace() for i in range(0, len(text), _SPACES // 2)):
        return [text]  # a run that is too long covers one of these positions and the _LOOK characters after it
    runs = (match.span() for match in _LONG_SPACE.finditer(text))
    cuts = [0, *(cut for start, end in runs for cut in range(start + _SPACES, end, _SPACES)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def write_ranks(path: Path, tokens: Sequence[bytes]) -> None:
    """Write `tokens`, in the order of their ranks, as a tiktoken rank file."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines), encoding="ascii")


def list_llama3_special() -> list[str]:
    """Return the names of Llama 3's 256 special tokens, in the order of their ids (as published with the model)."""
    first = ["<|begin_of_text|>", END_OF_TEXT, *(f"<|reserved_special_token_{i}|>" for i in range(4))]
    turns = ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    reserved = _LLAMA3_SPECIAL - len(first) - len(turns)
    return [*first, *turns, *(f"<|reserved_special_token_{i}|>" for i in range(5, 5 + reserved))]


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
        """Take the vocabulary of `backend` and the special tokens that `config` names."""
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

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as an array, without special tokens."""
        if self.threads == 1:
            encodings = [self._backend.encode(text, add_special_tokens=False) for text in texts]
        else:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

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
    """Load the tokenizer.json at `path`; messages call it `name`."""
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
    """
    tokenizer = _load_by_name(name)
    tokenizer.name = name
    return tokenizer


def _load_by_name(name: str) -> Tokenizer:
    if name == BUILT_IN:
        return load_ranks(Path(__file__).with_name("titan4k.tiktoken"))
    path = Path(name).expanduser()
    if not path.exists() and _ON_HUB.fullmatch(name) and path.suffix not in _SUFFIXES:
        path = fetch_tokenizer(name)
    elif path.is_dir():
        raise ConfigError(
            f"dataset.tokenizer={name}: is a folder; give a file in it, such as {path / 'tokenizer.json'}."
        )
    elif not path.is_file():
        hint = suggest_nearest(name, [BUILT_IN])
        ways = f"; give {BUILT_IN}, the path of a tokenizer's file, or OWNER/NAME, such as openai-community/gpt2."
        raise ConfigError(
            f"dataset.tokenizer={name}: there is no such tokenizer or file{ways if hint == '.' else hint}"
        )
    if path.suffix == ".json":
        return load_json(path, name)
    if path.suffix in (".tiktoken", ".model"):
        return load_ranks(path)
    raise ConfigError(f"dataset.tokenizer={name}: unknown file type; give {BUILT_IN}, *.tiktoken, *.model or *.json.")
