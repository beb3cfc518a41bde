"""Tokenizers: text to ids and back, from tiktoken rank files or Hugging Face's tokenizer.json.

Rank files hold a byte-level BPE vocabulary, `base64 rank` a line, and are all used with Llama 3's split pattern. Text
that happens to spell a special token is ordinary text: only `encode_document` adds special tokens.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Turn
from titan.settings import Refusal, nearest

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

BUILT_IN = "titan4k"

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merging (from its published tokenizer)."""

END = "<|end_of_text|>"
LLAMA3_RANKS = 128_000
_LLAMA3_SPECIAL = 256
_SPACES = 16_384
_LOOK = 64
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{_SPACES + 1},}}")
_ENDS = (END, "<|endoftext|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]", "[SEP]")
_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|begin▁of▁sentence|>", "[BOS]", "[CLS]")


class Tokenizer(ABC):
    """What every tokenizer offers.

    Attributes:
        vocab_size: one more than the largest id, special tokens included.
        eos, bos: the ids that end and begin a document, or None.
        fingerprint: hexadecimal digest of all that decides which ids a text gets.
        threads: how many threads `encode_batch` uses; None: as many as there are cores.
    """

    vocab_size: int
    eos: int | None
    bos: int | None
    fingerprint: str
    threads: int | None = None

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; uses several threads."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for, with U+FFFD where they are no UTF-8.

        Raises:
            Refusal: when there is no such id.
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
        """The ids of a document of turns, framed, and whether each counts in the loss; the last id always does."""
        encoded = self.encode_batch([turn.text for turn in turns])
        ids = self.framed([i for part in encoded for i in part])
        counts = [turn.trained for turn, part in zip(turns, encoded, strict=True) for _ in part]
        return ids, [*([] if self.bos is None else [False]), *counts, *([] if self.eos is None else [True])]

    def _check(self, ids: Sequence[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise Refusal(f"token {i}: the tokenizer has ids 0 to {self.vocab_size - 1}; use its own ids.")
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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; uses several threads."""
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


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of Hugging Face's `tokenizers`; `tokenizer_config.json` beside it names its eos and bos.

    Where there is none, they are told by their usual names. A bos that is also the eos counts as none. The bytes of a
    token are exact for byte-level and byte-fallback vocabularies, as far as the tokenizer doesn't normalise text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """Take the vocabulary of `backend` and the special tokens that `config` names."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self.vocab_size = max(self._vocab.values()) + 1
        self.eos = self._named(config, "eos_token", _ENDS)
        bos = self._named(config, "bos_token", _BEGINNINGS)
        self.bos = None if bos == self.eos else bos
        content = json.dumps([json.loads(backend.to_str()), self.eos, self.bos], sort_keys=True)
        self.fingerprint = blake2b(content.encode(), digest_size=32).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens; uses several threads."""
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for, special tokens by their names, with U+FFFD where they are no UTF-8."""
        return self._backend.decode(self._check(ids), skip_special_tokens=False)

    def token_bytes(self) -> NDArray[np.uint16]:
        """How many bytes of UTF-8 each id stands for, 0 for special tokens: [vocab_size]."""
        content = json.loads(self._backend.to_str())
        byte_level = '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["decoder"]])
        out = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, i in self._vocab.items():
            if i not in self._special:
                out[i] = len(token) if byte_level else _plain_bytes(token)
        return out

    def _named(self, config: dict[str, Any], key: str, usual: Sequence[str]) -> int | None:
        names: Sequence[Any] = usual
        if key in config:
            entry = config[key]
            names = [entry.get("content") if isinstance(entry, dict) else entry]
        return next((self._vocab[name] for name in names if name in self._vocab), None)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `name` names: titan4k (built in), or a file *.tiktoken, tokenizer.model or tokenizer.json.

    Raises:
        Refusal: when there is no such file, or it is none of these.
    """
    if name == BUILT_IN:
        return _load_ranks(Path(__file__).with_name("titan4k.tiktoken"))
    path = Path(name).expanduser()
    if not path.is_file():
        raise Refusal(_missing(name, path))
    if path.suffix == ".json":
        return _load_json(path)
    if path.suffix in (".tiktoken", ".model"):
        return _load_ranks(path)
    raise Refusal(f"dataset.tokenizer={name}: unknown kind of file; give {BUILT_IN}, *.tiktoken, *.model or *.json.")


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
    data = _read(path)
    if path.suffix == ".model" and (b"<unk>" in data[:4096] or b"\0" in data[:4096]):
        raise Refusal(
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


def _malformed(path: Path, reason: str) -> Refusal:
    return Refusal(f"dataset.tokenizer={path}: no tiktoken rank file ({reason}); give a complete one.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refusal(f"dataset.tokenizer={path}: can't be read ({error.strerror}); make it readable.") from error


def llama3_special() -> list[str]:
    """The names of Llama 3's 256 special tokens, in the order of their ids (as published with the model)."""
    first = ["<|begin_of_text|>", END, *(f"<|reserved_special_token_{i}|>" for i in range(4))]
    turns = ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    rest = _LLAMA3_SPECIAL - len(first) - len(turns)
    return [*first, *turns, *(f"<|reserved_special_token_{i}|>" for i in range(5, 5 + rest))]


def _load_json(path: Path) -> JsonTokenizer:
    import tokenizers

    text = _read(path).decode("utf-8", "replace")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
        if not backend.get_vocab_size():
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # the library raises bare Exception
        raise Refusal(f"dataset.tokenizer={path}: no tokenizer.json ({error}); give a complete one.") from error
    return JsonTokenizer(backend, _load_config(path.with_name("tokenizer_config.json")))


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except ValueError as error:
        raise Refusal(f"{path}: not JSON ({error}); mend it, or remove it from beside tokenizer.json.") from error
    return config if isinstance(config, dict) else {}


def _plain_bytes(token: str) -> int:
    """The bytes of a token of a vocabulary that isn't byte-level: SentencePiece's and WordPiece's ways of writing."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.removeprefix("##").replace("▁", " ").encode())
