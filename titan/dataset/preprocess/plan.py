"""The plan of a preparation, made before it begins: the folder, the shard jobs and the validation split.

It is determined by the source's content, the tokenizer and the settings, so all processes and jobs with the same input
make the same plan; readers find it as `plan.json` in the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.dataset.documents import Part, Skip, Source
from titan.dataset.preprocess import encode
from titan.dataset.preprocess.writer import read_json, write_json, write_token_bytes
from titan.dataset.schema import Dataset
from titan.dataset.shards import FORMAT, token_dtype
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.files.untrusted import check, file_name

VERSION = 2
"""Part of every digest; increased when the division, hashing or tokenization changes."""

UNIT_LEAST = 4 * 1024**2
UNIT_MOST = 2 * 1024**3
UNITS_WANTED = 64
LOOKED_AT = 4096
"""The maximum number of documents that are read to find one for the validation split."""


@dataclass(frozen=True)
class Plan:
    """The content of `plan.json`.

    Attributes:
        digest: the identity of the prepared corpus.
        name: the source's name.
        vocab_size: one more than the largest possible id.
        masked: whether there is a loss mask.
        tokenizer: its name, its fingerprint, and the file in the folder, an argument of `load_tokenizer`.
        limit: documents with a hash below it are in the validation split.
        units: for each shard job its first part, the part after its last, and its bytes in the source.
    """

    digest: str
    name: str
    vocab_size: int
    masked: bool
    tokenizer: dict[str, str]
    limit: int
    units: tuple[tuple[int, int, int], ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids on disk."""
        return token_dtype(self.vocab_size)

    def content(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        return {"format": FORMAT, **asdict(self), "dtype": self.dtype.name}


@dataclass(frozen=True)
class Input:
    """A dataset's source and tokenizer, with the digest of the source's content and of both."""

    dataset: Dataset
    source: Source
    tokenizer: Tokenizer | None
    content: str
    digest: str

    @property
    def folder(self) -> Path:
        """The prepared folder, whether it exists or not."""
        return cache_folder(self.dataset) / "datasets" / f"{self.source.name}-{self.digest[:16]}"

    @cached_property
    def parts(self) -> Sequence[Part]:
        """The source's parts."""
        return self.source.parts()

    @property
    def vocab_size(self) -> int:
        """One more than the largest possible id."""
        return self.tokenizer.vocab_size if self.tokenizer else self.source.vocab_size or 0

    def token_bytes(self) -> NDArray[np.uint16]:
        """Return the number of bytes of text of each id; 1 in a source of tokens."""
        return self.tokenizer.token_bytes() if self.tokenizer else np.ones(self.vocab_size, dtype=np.uint16)

    def changed(self) -> bool:
        """Return whether the source's content has changed since it was examined."""
        try:
            fresh = self.dataset.build()  # the source may have cached what it read
            return fresh.digest(memo(self.dataset)) != self.content
        except OSError:  # a file was removed
            return True


def cache_folder(dataset: Dataset) -> Path:
    """Return the cache's folder: `dataset.cache`, else $TITAN_CACHE, else ~/.cache/titan."""
    return Path(dataset.cache or os.environ.get("TITAN_CACHE") or "~/.cache/titan").expanduser()


def memo(dataset: Dataset) -> Path:
    """Return the folder that caches digests of large files."""
    return cache_folder(dataset) / "digests"


def examine(dataset: Dataset) -> Input:
    """Build the source, load the tokenizer, and compute the digests.

    Raises:
        ConfigError: when one of them can't be used.
    """
    source = dataset.build()
    tokenizer = load_tokenizer(dataset.tokenizer) if source.vocab_size is None else None
    content = source.digest(memo(dataset))
    return Input(dataset, source, tokenizer, content, _digest(content, tokenizer, dataset))


def read_plan(known: Input) -> Plan | None:
    """Return the plan in the folder; None when it is missing or corrupt."""
    content = read_json(known.folder / "plan.json")
    try:
        if content["format"] != FORMAT or content["digest"] != known.digest:
            return None
        units = tuple((int(first), int(end), int(size)) for first, end, size in content["units"])
        fields = {name: content[name] for name in _KINDS}
        for name, kind in _KINDS.items():
            check(content[name], kind, name)
        file_name(content["tokenizer"].get("file") or "none")
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return Plan(**fields, units=units) if units and (known.folder / "token_bytes.npy").is_file() else None


_KINDS: dict[str, Any] = {
    "digest": str, "name": str, "vocab_size": int, "masked": bool, "tokenizer": dict[str, str], "limit": int
}  # fmt: skip
"""The keys of a plan besides the shard jobs, and the types of their values."""


def write_plan(known: Input) -> Plan:
    """Make the plan and write it, with the files that a reader of unfinished data needs.

    Raises:
        ConfigError: when the first documents can't be read, or there are none.
    """
    limit = hash_limit(known.source, known.parts, known.dataset.validation)
    folder, tokenizer, name = known.folder, known.tokenizer, "none"
    folder.mkdir(parents=True, exist_ok=True)
    write_token_bytes(folder, known.token_bytes())
    about = {"name": "none", "fingerprint": "none"}
    if tokenizer is not None:
        about = {"name": known.dataset.tokenizer, "fingerprint": tokenizer.fingerprint}
        save = getattr(tokenizer, "save", None)
        name = save(folder) if save else known.dataset.tokenizer
    plan = Plan(
        digest=known.digest,
        name=known.source.name,
        vocab_size=known.vocab_size,
        masked=known.source.masked,
        tokenizer={**about, "file": name if (folder / name).is_file() else ""},
        limit=limit,
        units=divide(known.parts),
    )
    write_json(folder / "plan.json", plan.content())
    return plan


def divide(parts: Sequence[Part]) -> tuple[tuple[int, int, int], ...]:
    """Group consecutive parts into shard jobs of about 1/64 of all bytes; parts of unknown size get one job each."""
    total = sum(part.bytes for part in parts)
    size = min(max(total // UNITS_WANTED, UNIT_LEAST), UNIT_MOST)
    units, first, filled = list[tuple[int, int, int]](), 0, 0
    for i, part in enumerate(parts):
        weight = part.bytes if total else size
        if filled and filled + weight > size:
            units.append((first, i, sum(p.bytes for p in parts[first:i])))
            first, filled = i, 0
        filled += weight
    return (*units, (first, len(parts), sum(p.bytes for p in parts[first:])))


def hash_limit(source: Source, parts: Sequence[Part], share: float) -> int:
    """Return the hash below which documents are in the validation split: `share` of 2**64.

    If none of the first documents would be in it, the limit is raised to include their smallest hash, so that a small
    corpus has a validation split too (unless all these documents are equal).
    """
    limit, seen = int(share * 2**64), set[int]()
    for known in islice(_contents(source, parts), LOOKED_AT):
        seen.add(known.hash)
        if not share or known.hash < limit:
            return limit
    if not seen:
        raise ConfigError(f"dataset={source.name}: the source has no tokens; give text that is not empty.")
    return max(limit, min(seen) + 1) if len(seen) > 1 else limit


def _contents(source: Source, parts: Sequence[Part]) -> Iterator[encode.Content]:
    for part in parts:
        for document in encode.read(source, part):
            if not isinstance(document, Skip):
                yield encode.content(document)


def _digest(content: str, tokenizer: Tokenizer | None, dataset: Dataset) -> str:
    """Return the digest of the prepared corpus; the source's settings are part of `content`."""
    identity = [VERSION, FORMAT, content, tokenizer.fingerprint if tokenizer else "none", dataset.validation]
    if dataset.on_error != "refuse":
        identity.append(dataset.on_error)
    return blake2b(json.dumps(identity).encode(), digest_size=32).hexdigest()
