"""The plan of a preparation, made before it begins: the folder, the shard jobs and the validation split.

It is determined by the source's content, the tokenizer and the settings, so all processes and jobs with the same input
make the same plan; readers find it as `plan.json` in the folder.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from titan.config.warning import warn_once
from titan.dataset.documents import Skip, Source, SourcePart
from titan.dataset.preprocess import encode
from titan.dataset.preprocess.writer import write_json, write_token_bytes
from titan.dataset.schema import Dataset
from titan.dataset.shards import FORMAT, choose_token_dtype
from titan.dataset.sources.files import describe_selection
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.files.untrusted import check_file_name, read_object
from titan.optimizer.external import packages

VERSION = 2
"""Part of every digest; increased when the division, hashing or tokenization changes."""

MIN_SHARD_BYTES = 4 * 1024**2
MAX_SHARD_BYTES = 2 * 1024**3
TARGET_SHARDS = 64
MAX_SEARCHED_DOCUMENTS = 4096
"""The maximum number of documents that are read to find one for the validation split."""


@dataclass(frozen=True)
class PreparationPlan:
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
        return choose_token_dtype(self.vocab_size)

    def build_content(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        return {"format": FORMAT, **asdict(self), "dtype": self.dtype.name}


@dataclass(frozen=True)
class PreparationInputs:
    """A dataset's source and tokenizer, with their digests.

    Attributes:
        dataset: the settings.
        source: what they build.
        tokenizer: None for a source of tokens.
        content_digest: of the source's content.
        digest: of the prepared corpus.
        folder: the prepared folder, whether it exists or not.
        identity: of a user's own source: the name of the folder for its settings and its code as they are now.
        outdated: the folder of the same settings that was prepared before the source's code changed, if any.
    """

    dataset: Dataset
    source: Source
    tokenizer: Tokenizer | None
    content_digest: str
    digest: str
    folder: Path
    identity: str = ""
    outdated: Path | None = None

    @cached_property
    def parts(self) -> Sequence[SourcePart]:
        """The source's parts."""
        return self.source.parts()

    @property
    def vocab_size(self) -> int:
        """One more than the largest possible id."""
        return self.tokenizer.vocab_size if self.tokenizer else self.source.vocab_size or 0

    def has_changed(self) -> bool:
        """Return whether the source's content has changed since it was examined."""
        try:
            source = self.dataset.build()  # the source may have cached what it read
            return source.digest(find_cache_folder(self.dataset) / "digests") != self.content_digest
        except OSError:  # a file was removed
            return True


def find_cache_folder(dataset: Dataset) -> Path:
    """Return the cache's folder: `dataset.cache`, else $TITAN_CACHE, else ~/.cache/titan."""
    return Path(dataset.cache or os.environ.get("TITAN_CACHE") or "~/.cache/titan").expanduser()


def examine_dataset(dataset: Dataset) -> PreparationInputs:
    """Build the source, load the tokenizer, and compute the digests."""
    source = dataset.build()
    tokenizer = load_tokenizer(dataset.tokenizer) if source.vocab_size is None else None
    content_digest = source.digest(find_cache_folder(dataset) / "digests")
    digest = _compute_digest(content_digest, tokenizer, dataset)
    folder = find_cache_folder(dataset) / "datasets" / f"{source.name}-{digest[:16]}"
    inputs = PreparationInputs(dataset, source, tokenizer, content_digest, digest, folder)
    modules = {type(owner).__module__ for owner in (dataset, source)}
    is_own = any(module.partition(".")[0] != "titan" for module in modules)
    return _identify_code(inputs, packages.find_module_files(modules)) if is_own else inputs


def _identify_code(inputs: PreparationInputs, files: Mapping[str, Path]) -> PreparationInputs:
    """Return the inputs with a digest and a folder for the settings and the code of a user's own source.

    The name of a folder of titan's earlier versions has neither. It belongs to the settings and the code that first use
    it, unless the code's files have changed since it was made.
    """
    digest = _hash_values([inputs.digest, type(inputs.dataset).__qualname__, _list_settings(inputs.dataset)])
    code = packages.compute_files_digest(files) if files else _UNKNOWN
    earlier, prefix = inputs.folder, f"{inputs.source.name}-{digest[:16]}-"
    folder, newest = earlier.with_name(prefix + code), max((f.stat().st_mtime for f in files.values()), default=0)
    owner = (earlier / _OWNER).read_text() if (earlier / _OWNER).is_file() else None
    if owner == folder.name or (owner is None and not folder.exists() and _get_time(earlier) > newest):
        return replace(inputs, identity=folder.name)
    others = {*earlier.parent.glob(f"{glob.escape(prefix)}*")} - {folder}
    others |= {earlier} if (owner or prefix).startswith(prefix) else set()
    outdated = max((f for f in others if (f / "manifest.json").is_file()), key=_get_time, default=None)
    return replace(inputs, digest=_hash_values([digest, code]), folder=folder, identity=folder.name, outdated=outdated)


def _list_settings(dataset: Dataset) -> dict[str, Any]:
    """Return the settings that may decide which documents there are, besides those that all datasets have."""
    chosen = [f for f in fields(dataset) if f.name not in _COMMON and f.metadata.get("science") is not False]
    return {field.name: getattr(dataset, field.name) for field in chosen}


_COMMON = {field.name for field in fields(Dataset)}
_UNKNOWN = "unknown"
"""What stands for the code of a source that has no file."""
_OWNER = "owner.txt"
"""The file of a folder of an earlier version that says whose it is: what the folder's name would be today."""


def _get_time(folder: Path) -> float:
    """Return when a folder's preparation began; 0 where there is none."""
    plan = folder / "plan.json"
    return plan.stat().st_mtime if plan.is_file() else 0


def note_identity(inputs: PreparationInputs, setting: str) -> None:
    """Warn when a folder is prepared since the code has changed, and when one is used that may be of other content.

    Args:
        inputs: of a user's own source.
        setting: the name of the dataset's settings, such as dataset.
    """
    choice = setting if setting == "dataset" else f"dataset@{setting}"
    for file in _list_settings(inputs.dataset).values() if inputs.identity and inputs.folder.exists() else ():
        if isinstance(file, str) and os.path.isfile(file) and os.path.getmtime(file) > _get_time(inputs.folder):
            warn_once(
                f"{setting}: {file} is newer than {inputs.folder}, which is used because the source's digest() has not "
                "changed; where the file's content counts, it must be part of digest()."
            )
    if inputs.outdated and not inputs.folder.exists():
        warn_once(
            f"{setting}: {inputs.outdated} was prepared before the source's code changed, so {inputs.folder} is "
            f"prepared; to go on with the former data, give {choice}=prepared {setting}.path={inputs.outdated}."
        )
    elif inputs.folder.name.endswith(f"-{_UNKNOWN}") and inputs.folder.exists():
        warn_once(
            f"{setting}: {inputs.folder} is used, and changes of the source's code are not seen, because it has no "
            "file; where the text has changed, change a number in its digest()."
        )
    elif inputs.identity not in ("", inputs.folder.name) and not (inputs.folder / _OWNER).exists():
        warn_once(
            f"{setting}: {inputs.folder} is used, which an earlier version of titan prepared without recording the "
            "source's settings and code; if they were others, delete it."
        )
        with contextlib.suppress(OSError):  # a cache that can't be written can still be read
            write_atomic(inputs.folder / _OWNER, inputs.identity)


def read_plan(inputs: PreparationInputs) -> PreparationPlan | None:
    """Return the plan in the folder; None when it is missing or corrupt."""
    try:
        content = read_object(inputs.folder / "plan.json", _KINDS)
        if content["format"] != FORMAT or content["digest"] != inputs.digest:
            return None
        units = tuple((int(first), int(end), int(size)) for first, end, size in content["units"])
        fields = {name: content[name] for name in _KINDS}
        check_file_name(content["tokenizer"].get("file") or "none")
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return PreparationPlan(**fields, units=units) if units and (inputs.folder / "token_bytes.npy").is_file() else None


_KINDS: dict[str, Any] = {
    "digest": str, "name": str, "vocab_size": int, "masked": bool, "tokenizer": dict[str, str], "limit": int
}  # fmt: skip
"""The keys of a plan besides the shard jobs, and the types of their values."""


def write_plan(inputs: PreparationInputs) -> PreparationPlan:
    """Make the plan and write it, with the files that a reader of unfinished data needs."""
    units = divide_parts(inputs.parts)
    limit = compute_hash_limit(inputs.source, inputs.parts, inputs.dataset.validation)
    folder, tokenizer, name = inputs.folder, inputs.tokenizer, "none"
    folder.mkdir(parents=True, exist_ok=True)
    # in a source of tokens each id is one byte
    write_token_bytes(folder, tokenizer.count_token_bytes() if tokenizer else np.ones(inputs.vocab_size, np.uint16))
    identity = {"name": "none", "fingerprint": "none"}
    if tokenizer is not None:
        identity = {"name": inputs.dataset.tokenizer, "fingerprint": tokenizer.fingerprint}
        save = getattr(tokenizer, "save", None)
        name = save(folder) if save else inputs.dataset.tokenizer
    plan = PreparationPlan(
        digest=inputs.digest,
        name=inputs.source.name,
        vocab_size=inputs.vocab_size,
        masked=inputs.source.masked,
        tokenizer={**identity, "file": name if (folder / name).is_file() else ""},
        limit=limit,
        units=units,
    )
    write_json(folder / "plan.json", plan.build_content())
    return plan


def ensure_plan(dataset: Dataset, setting: str = "dataset") -> Path:
    """Write the plan of `dataset` unless it exists, and return the folder; nothing is tokenized.

    Args:
        dataset: the settings.
        setting: their name in messages.
    """
    inputs = examine_dataset(dataset)
    with convert_cache_errors(find_cache_folder(dataset)):
        read_or_write_plan(inputs, setting)
    return inputs.folder


def read_or_write_plan(inputs: PreparationInputs, setting: str) -> PreparationPlan:
    """Return the plan in the folder, or make it and write it, with what a user should know about it."""
    note_identity(inputs, setting)
    if plan := read_plan(inputs):
        return plan
    path = getattr(inputs.dataset, "path", None)
    selection = describe_selection(path, inputs.parts)
    if "leaves out" in selection:
        warn_once(f"{setting}.path={path}: reads {selection['reads']}, and leaves out {selection['leaves out']}.")
    return write_plan(inputs)


@contextmanager
def convert_cache_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the cache's folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} can't be used ({error.strerror or error}: {error.filename or folder}): free space, "
            f"correct its permissions, or choose another folder with dataset.cache=FOLDER."
        ) from error


def divide_parts(parts: Sequence[SourcePart]) -> tuple[tuple[int, int, int], ...]:
    """Group consecutive parts into shard jobs of about 1/64 of all bytes; parts of unknown size get one job each."""
    total = sum(part.bytes for part in parts)
    size = min(max(total // TARGET_SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    shards, first, filled = list[tuple[int, int, int]](), 0, 0
    for i, part in enumerate(parts):
        weight = part.bytes if total else size
        if filled and filled + weight > size:
            shards.append((first, i, sum(p.bytes for p in parts[first:i])))
            first, filled = i, 0
        filled += weight
    return (*shards, (first, len(parts), sum(p.bytes for p in parts[first:])))


def compute_hash_limit(source: Source, parts: Sequence[SourcePart], fraction: float) -> int:
    """Return the hash below which documents are in the validation split: `fraction` of 2**64.

    If none of the first documents would be in it, the limit is raised to include their smallest hash, so that a small
    corpus has a validation split too (unless all these documents are equal).
    """
    limit, hashes = int(fraction * 2**64), set[int]()
    documents = (document for part in parts for document in encode.read_documents(source, part))
    texts = (document for document in documents if not isinstance(document, Skip))
    for content in map(encode.hash_document, islice(texts, MAX_SEARCHED_DOCUMENTS)):
        hashes.add(content.hash)
        if not fraction or content.hash < limit:
            return limit
    if not hashes:
        raise ConfigError(f"dataset={source.name}: the source has no tokens; give text that is not empty.")
    return max(limit, min(hashes) + 1) if len(hashes) > 1 else limit


def _compute_digest(content_digest: str, tokenizer: Tokenizer | None, dataset: Dataset) -> str:
    """Return the digest of the prepared corpus; the source's settings are part of `content_digest`."""
    identity = [VERSION, FORMAT, content_digest, tokenizer.fingerprint if tokenizer else "none", dataset.validation]
    if dataset.on_error != "refuse":
        identity.append(dataset.on_error)
    return _hash_values(identity)


def _hash_values(values: list[Any]) -> str:
    return blake2b(json.dumps(values, sort_keys=True, default=_encode_value).encode(), digest_size=32).hexdigest()


def _encode_value(value: Any) -> Any:
    """Return what JSON writes of a value of a setting that it has no text for."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, {field.name: getattr(value, field.name) for field in fields(value)}]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else pickle.dumps(value).hex()
