"""Tokenizers: text to ids and back, from tiktoken rank files or Hugging Face's tokenizer.json, of a file or the hub.

Rank files hold a byte-level BPE vocabulary, `base64 rank` a line, and are all used with Llama 3's split pattern. Text
that happens to spell a special token is ordinary text: only `encode_document` and the markup of `encode_turns` give
special tokens.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from titan.config.settings import nearest
from titan.dataset.documents import Turn
from titan.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

    from titan.dataset.documents import Turn

BUILT_IN = "titan4k"

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merging (from its published tokenizer)."""

END = "<|end_of_text|>"
LLAMA3_RANKS = 128_000
_SUFFIXES = (".json", ".tiktoken", ".model")
_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_LLAMA3_SPECIAL = 256
_SPACES = 16_384
_LOOK = 64
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_SPACES + 1},}}")


class Tokenizer(ABC):
    """What every tokenizer offers.

    Attributes:
        vocab_size: one more than the largest id, special tokens included.
        eos, bos: the ids that end and begin a document, or None.
        fingerprint: hexadecimal digest of all that decides which ids a text gets.
        name: what messages call it.
        threads: how many threads `encode_batch` uses; None: as many as there are cores. A tokenizer.json knows one or
            several only.
    """

    name: str = "tokenizer"
    threads: int | None = None
    vocab_size: int
    eos: int | None
    bos: int | None
    fingerprint: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; uses several threads, or as many as `threads` says."""

    @abstractmethod
    def encode_markup(self, text: str) -> list[int]:
        """The ids of `text`, in which what spells special tokens becomes them."""

    @abstractmethod
    def has(self, token: str) -> bool:
        """Whether there is a special token of this name."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Write what it consists of into `folder`, and return the name there by which `load_tokenizer` reads it.

        The name of a built-in tokenizer is its own, and nothing is written.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for, with U+FFFD where they are no UTF-8.

        Raises:
            ConfigError: when there is no such id.
        """

    @abstractmethod
    def token_bytes(self) -> NDArray[np.uint16]:
        """How many bytes of UTF-8 each id stands for, 0 for special tokens: [vocab_size]."""

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """As `encode_batch`, as arrays."""
        return [np.frombuffer(array("I", ids), np.uint32) for ids in self.encode_batch(texts)]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_document(self, text: str) -> list[int]:
        """The ids of `text` between those that begin and end a document, where there are such."""
        return self.framed(self.encode(text))

    def framed(self, ids: list[int]) -> list[int]:
        """`ids` as a document: `bos` before and `eos` after, where there are such."""
        return [*([] if self.bos is None else [self.bos]), *ids, *([] if self.eos is None else [self.eos])]

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
        """The ids of a document made of turns, and of each whether it counts in the loss.

        The document is framed as `framed` does it, except by tokens that the turns bring; the eos added counts.
        """
        ids, trained = list[int](), list[bool]()
        for turn in turns:
            new = self.encode_markup(turn.text) if turn.special else self.encode(turn.text)
            ids += new
            trained += [turn.trained] * len(new)
        if self.bos is not None and ids[:1] != [self.bos]:
            ids, trained = [self.bos, *ids], [False, *trained]
        if self.eos is not None and ids[-1:] != [self.eos]:
            ids, trained = [*ids, self.eos], [*trained, True]
        return ids, trained

    def notes(self) -> list[str]:
        """Lines for the report: how documents end and begin, and a warning of what is unusual."""
        begin = "without a token" if self.bos is None else f"with {self.decode([self.bos])}"
        end = "without a token" if self.eos is None else f"with {self.decode([self.eos])}"
        lines = [f"{self.name}: {self.vocab_size:,} ids; documents end {end}, begin {begin}"]
        if self.eos is None:
            lines.append(f"warning: {self.name} has no token that ends a document: documents run into each other")
        gaps = self._gaps()
        if gaps:
            lines.append(f"warning: {self.name}: {len(gaps):,} ids stand for nothing, the first {gaps[0]}")
        return lines

    def _gaps(self) -> list[int]:
        """The ids below `vocab_size` that stand for nothing."""
        return []

    def _check(self, ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ConfigError(f"token {i}: the tokenizer has ids 0 to {self.vocab_size - 1}; use its own ids.")
        return ids


class RankTokenizer(Tokenizer):
    """A byte-level BPE in tiktoken's format, with special tokens after the ranks."""

    def __init__(self, ranks: dict[bytes, int], special: Sequence[str]) -> None:
        """`ranks` are 0 to n - 1, all 256 bytes among them; `special` names the ids from n on."""
        self._ranks = ranks
        self._special = {name: len(ranks) + i for i, name in enumerate(special)}
        self.vocab_size = len(ranks) + len(special)
        self.eos, self.bos = self._special.get(END), self._special.get("<|begin_of_text|>")
        self.fingerprint = self._digest()
        self._encoding = self._build()

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """The rank, which is the id, of each token's bytes."""
        return self._ranks

    @property
    def special(self) -> Sequence[str]:
        """The names of the special tokens, in the order of their ids."""
        return list(self._special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        pieces = [cut_spaces(text) for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        threads = self.threads or min(8, os.cpu_count() or 1)
        if len(flat) < 4 or threads == 1:
            ids = iter([self._encoding.encode_ordinary(piece) for piece in flat])
        else:
            ids = iter(self._encoding.encode_ordinary_batch(flat, num_threads=threads))
        return [[i for _ in parts for i in next(ids)] if len(parts) > 1 else next(ids) for parts in pieces]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """As `encode_batch`, as arrays: without a Python list of numbers, which takes as long as what fills it."""
        threads = self.threads or min(8, os.cpu_count() or 1)
        if len(texts) < 4 or threads == 1:
            return [self._array(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self._array, texts))

    def _array(self, text: str) -> NDArray[np.uint32]:
        encode = partial(self._encoding.encode_to_numpy, disallowed_special=())
        pieces = cut_spaces(text)
        return encode(text) if len(pieces) == 1 else np.concatenate([encode(piece) for piece in pieces])

    def encode_markup(self, text: str) -> list[int]:
        """The ids of `text`, in which what spells special tokens becomes them."""
        return self._encoding.encode(text, allowed_special="all")

    def has(self, token: str) -> bool:
        """Whether there is a special token of this name."""
        return token in self._special

    def save(self, folder: Path) -> str:
        """Write the rank file, unless it is the built-in one."""
        if self.name == BUILT_IN:
            return BUILT_IN
        name = "tokenizer.model" if len(self._ranks) == LLAMA3_RANKS else "tokenizer.tiktoken"
        write_ranks(folder / name, sorted(self._ranks, key=lambda token: self._ranks[token]))
        return name

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for, with U+FFFD where they are no UTF-8."""
        return self._encoding.decode(self._check(ids), errors="replace")

    def token_bytes(self) -> NDArray[np.uint16]:
        """How many bytes of UTF-8 each id stands for, 0 for special tokens: [vocab_size]."""
        out = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, rank in self._ranks.items():
            out[rank] = len(token)
        return out

    def _build(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding("titan", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens=self._special)

    def _digest(self) -> str:
        digest = blake2b(PATTERN.encode(), digest_size=32)
        for token, _ in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update("\0".join(self._special).encode())
        return digest.hexdigest()


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` names.

    Args:
        name: titan4k (built in); a file *.tiktoken, tokenizer.model or tokenizer.json; or OWNER/NAME on Hugging Face's
            hub, perhaps with @REVISION, whose tokenizer.json is fetched once.

    Raises:
        ConfigError: when there is no such file or repository, it can't be fetched, or it is none of these.
    """
    tokenizer = _load(name)
    tokenizer.name = name
    return tokenizer


def _load(name: str) -> Tokenizer:
    if name == BUILT_IN:
        return _load_ranks(Path(__file__).with_name("titan4k.tiktoken"))
    from titan.dataset.sources.hub import fetch
    from titan.dataset.tokenizers.json_file import load_json

    path = Path(name).expanduser()
    if not path.exists() and _ON_HUB.fullmatch(name) and path.suffix not in _SUFFIXES:
        return load_json(fetch(name), name)
    if not path.is_file():
        raise ConfigError(_missing(name, path))
    if path.suffix == ".json":
        return load_json(path, name)
    if path.suffix in (".tiktoken", ".model"):
        return _load_ranks(path)
    raise ConfigError(
        f"dataset.tokenizer={name}: unknown kind of file; give {BUILT_IN}, *.tiktoken, *.model or *.json."
    )


def cut_spaces(text: str) -> list[str]:
    """`text` in pieces, cut only inside runs of over 16,384 white space characters, which overflow the splitter."""
    if not any(text[i : i + _LOOK].isspace() for i in range(0, len(text), _SPACES // 2)):
        return [text]  # a run that is too long covers one of these places, with what follows it
    runs = (match.span() for match in _LONG_SPACE.finditer(text))
    cuts = [0, *(cut for start, end in runs for cut in range(start + _SPACES, end, _SPACES)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


def write_ranks(path: Path, tokens: Sequence[bytes]) -> None:
    """Write `tokens`, in the order of their ranks, as a tiktoken rank file."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines), encoding="ascii")


def _missing(name: str, path: Path) -> str:
    if path.is_dir():
        return f"dataset.tokenizer={name}: a folder; name the file in it, such as {path / 'tokenizer.json'}."
    hint = nearest(name, [BUILT_IN]) or f"; give {BUILT_IN} or the path of a tokenizer's file."
    return f"dataset.tokenizer={name}: there is no such tokenizer or file{hint}"


def _load_ranks(path: Path) -> RankTokenizer:
    data = read(path)
    if path.suffix == ".model" and (b"<unk>" in data[:4096] or b"\0" in data[:4096]):
        raise ConfigError(
            f"dataset.tokenizer={path}: a SentencePiece model (Llama 2's kind), which titan doesn't read; "
            f"give the tokenizer.json of the same model."
        )
    ranks = _parse_ranks(path, data)
    return RankTokenizer(ranks, llama3_special() if len(ranks) == LLAMA3_RANKS else [END])


def _parse_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            if line.strip():
                raise _malformed(path, f"line {number} is not `base64 rank`") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _malformed(path, "its ranks are not 0 to n - 1, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise _malformed(path, "not every single byte has a rank")
    return ranks


def _malformed(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"dataset.tokenizer={path}: no tiktoken rank file ({reason}); give a complete one.")


def read(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        ConfigError: when it can't be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"dataset.tokenizer={path}: can't be read ({error.strerror}); make it readable.") from error


def llama3_special() -> list[str]:
    """The names of Llama 3's 256 special tokens, in the order of their ids (as published with the model)."""
    first = ["<|begin_of_text|>", END, *(f"<|reserved_special_token_{i}|>" for i in range(4))]
    turns = ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    rest = _LLAMA3_SPECIAL - len(first) - len(turns)
    return [*first, *turns, *(f"<|reserved_special_token_{i}|>" for i in range(5, 5 + rest))]
