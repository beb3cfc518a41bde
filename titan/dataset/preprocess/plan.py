"""What a preparation will do, decided before it begins: the folder, its units of work and what is held out.

All of it follows from the source's content, the tokenizer and the settings, so any number of processes and jobs that
are given the same come to the same plan, and `plan.json` in the folder says it to whoever reads there.
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
"""Part of every digest: another version divides, hashes or tokenises differently."""

UNIT_LEAST = 4 * 1024**2
UNIT_MOST = 2 * 1024**3
UNITS_WANTED = 64
LOOKED_AT = 4096
"""How many documents are read, at most, to find one to hold out."""


@dataclass(frozen=True)
class Plan:
    """What `plan.json` says.

    Attributes:
        digest: the identity of what is prepared.
        name: the source's.
        vocab_size: one more than the largest id there can be.
        masked: whether tokens are marked as to whether they count in the loss.
        tokenizer: its name, its fingerprint, and the file in the folder that `load_tokenizer` takes.
        limit: documents are held out whose hash is below it.
        units: of each unit its first part, the part after its last, and its bytes in the source.
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
        """The type that ids are written in."""
        return token_dtype(self.vocab_size)

    def content(self) -> dict[str, Any]:
        """As `plan.json` has it."""
        return {"format": FORMAT, **asdict(self), "dtype": self.dtype.name}


@dataclass(frozen=True)
class Input:
    """A dataset's source and tokenizer, and what they are called together."""

    dataset: Dataset
    source: Source
    tokenizer: Tokenizer | None
    content: str
    digest: str

    @property
    def folder(self) -> Path:
        """Where it is, or will be, prepared."""
        return cache_folder(self.dataset) / "datasets" / f"{self.source.name}-{self.digest[:16]}"

    @cached_property
    def parts(self) -> Sequence[Part]:
        """The source's parts."""
        return self.source.parts()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id there can be."""
        return self.tokenizer.vocab_size if self.tokenizer else self.source.vocab_size or 0

    def token_bytes(self) -> NDArray[np.uint16]:
        """How many bytes of text each id stands for; one, where there is no text."""
        return self.tokenizer.token_bytes() if self.tokenizer else np.ones(self.vocab_size, dtype=np.uint16)

    def changed(self) -> bool:
        """Whether the source's content is another one by now."""
        try:
            return (
                self.dataset.build().digest(memo(self.dataset)) != self.content
            )  # built anew: it may remember what it saw
        except OSError:  # a file is gone
            return True


def cache_folder(dataset: Dataset) -> Path:
    """Where prepared data is kept: `dataset.cache`, else $TITAN_CACHE, else ~/.cache/titan."""
    return Path(dataset.cache or os.environ.get("TITAN_CACHE") or "~/.cache/titan").expanduser()


def memo(dataset: Dataset) -> Path:
    """Where digests of big files are remembered."""
    return cache_folder(dataset) / "digests"


def examine(dataset: Dataset) -> Input:
    """Find the source and the tokenizer, and digest the content.

    Raises:
        ConfigError: when one of them can't be used.
    """
    source = dataset.build()
    tokenizer = load_tokenizer(dataset.tokenizer) if source.vocab_size is None else None
    content = source.digest(memo(dataset))
    return Input(dataset, source, tokenizer, content, _digest(content, tokenizer, dataset))


def read_plan(known: Input) -> Plan | None:
    """The plan in the folder; None when there is none yet, or it is damaged."""
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
"""What a plan holds beside its units, by the types of its values."""


def write_plan(known: Input) -> Plan:
    """Decide the plan and write it, with all that a reader of unfinished data needs.

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
    """The units: runs of parts of about a 64th of all bytes; where no part's size is known, each is a unit."""
    total = sum(part.bytes for part in parts)
    size = min(max(total // UNITS_WANTED, UNIT_LEAST), UNIT_MOST)
    units, first, held = list[tuple[int, int, int]](), 0, 0
    for i, part in enumerate(parts):
        weight = part.bytes if total else size
        if held and held + weight > size:
            units.append((first, i, sum(p.bytes for p in parts[first:i])))
            first, held = i, 0
        held += weight
    return (*units, (first, len(parts), sum(p.bytes for p in parts[first:])))


def hash_limit(source: Source, parts: Sequence[Part], share: float) -> int:
    """Below which hash documents are held out: `share` of 2**64.

    So that a small corpus has a validation part too, it is raised to take the smallest hash of the first documents,
    where none of them is held out and they are not all the same one.
    """
    limit, seen = int(share * 2**64), set[int]()
    for known in islice(_contents(source, parts), LOOKED_AT):
        seen.add(known.hash)
        if not share or known.hash < limit:
            return limit
    if not seen:
        raise ConfigError(f"dataset={source.name}: no tokens come of it; give text that is not empty.")
    return max(limit, min(seen) + 1) if len(seen) > 1 else limit


def _contents(source: Source, parts: Sequence[Part]) -> Iterator[encode.Content]:
    for part in parts:
        for document in encode.read(source, part):
            if not isinstance(document, Skip):
                yield encode.content(document)


def _digest(content: str, tokenizer: Tokenizer | None, dataset: Dataset) -> str:
    """The identity of the prepared folder; the settings of the source itself are in `content`."""
    identity = [VERSION, FORMAT, content, tokenizer.fingerprint if tokenizer else "none", dataset.validation]
    if dataset.on_error != "refuse":
        identity.append(dataset.on_error)
    return blake2b(json.dumps(identity).encode(), digest_size=32).hexdigest()
