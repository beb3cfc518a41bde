"""Byte-level BPE from tiktoken rank files: one `base64 rank` per line, all used with Llama 3's split pattern."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from titan.dataset.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, read_tokenizer_file
from titan.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

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
        self._encoding = self._build_encoding()

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """The rank, which is the id, of each token's bytes."""
        return self._ranks

    @property
    def special(self) -> Sequence[str]:
        """The names of the special tokens, in the order of their ids."""
        return list(self._special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        pieces = [cut_spaces(text) for text in texts]
        flat = [piece for parts in pieces for piece in parts]
        threads = self.threads or min(8, os.cpu_count() or 1)
        if len(flat) < 4 or threads == 1:
            ids = iter([self._encoding.encode_ordinary(piece) for piece in flat])
        else:
            ids = iter(self._encoding.encode_ordinary_batch(flat, num_threads=threads))
        return [[i for _ in parts for i in next(ids)] if len(parts) > 1 else next(ids) for parts in pieces]

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

    def _build_encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding("titan", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens=self._special)

    def _compute_fingerprint(self) -> str:
        digest = blake2b(PATTERN.encode(), digest_size=32)
        for token, _ in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update("\0".join(self._special).encode())
        return digest.hexdigest()


def load_ranks(path: Path) -> RankTokenizer:
    """Return the tokenizer of a rank file.

    Raises:
        ConfigError: when the file can't be read or is malformed.
    """
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
