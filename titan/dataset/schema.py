"""Settings of the dataset axis: sources of text, the tokenizer, and the order of rows. Free of torch.

Each source is a dataclass whose `build()` returns a `titan.dataset.documents.Source`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from titan.config.settings import MISSING, format_value, setting
from titan.config.text_kinds import Input, Label, Output
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.dataset.documents import Source

BLOCK = 10_000
"""Rows per block: weights are rounded to a ten-thousandth."""


def compute_block_counts(weights: Mapping[str, float], names: Sequence[str], setting: str) -> tuple[int, ...]:
    """Return the rows per block of each of `names`, in proportion to the weights, by the largest remainder method.

    Raises:
        ConfigError: when a name is unknown, a weight is negative or too small, or all are zero.
    """
    unknown = sorted(set(weights) - set(names))
    if unknown:
        raise ConfigError(
            f"{setting}: there is no source {unknown[0]!r} (the sources: {', '.join(names)}); correct the name."
        )
    values = [float(weights.get(name, 0)) for name in names]
    total = sum(values)
    if not all(0 <= value < float("inf") for value in values) or not total > 0:
        raise ConfigError(f"{setting}: weights must be at least 0 and one of them above 0; correct them.")
    exact = [BLOCK * value / total for value in values]
    counts = [int(quota) for quota in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: (counts[k] - exact[k], names[k]))
    for k in by_remainder[: BLOCK - sum(counts)]:
        counts[k] += 1
    for name, value, rows in zip(names, values, counts, strict=True):
        if value and not rows:
            raise ConfigError(
                f"{setting}: the weight of {name} is less than one row in {BLOCK:,}; increase it, or omit {name}."
            )
    return tuple(counts)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The settings that all datasets have in common."""

    tokenizer: Input = setting(
        "titan4k",
        "titan4k (built in), a file (*.tiktoken, Llama 3's tokenizer.model, tokenizer.json), or OWNER/NAME on the hub",
        science=False,  # the data's digest covers its content, whatever its path
    )
    mask_documents: bool = setting(False, "keep attention, positions and targets inside a document")
    validation: float = setting(
        0.01, "fraction of the documents in the validation split, chosen by content hash", at_least=0, below=1
    )
    cache: Output | None = setting(
        None, "folder for prepared data; null: $TITAN_CACHE or ~/.cache/titan", science=False
    )
    prefetch: int = setting(4, "batches read ahead in the background", science=False, at_least=1, at_most=1024)
    epochs: float | None = setting(
        None, "maximum number of passes over the data; null: unlimited", science=False, above=0
    )
    block: int = setting(
        1, "neighbouring rows that are read together: 1, or many if each read is slow (object stores)", at_least=1
    )
    window: int | None = setting(None, "shuffle rows within windows of this many tokens; null: all rows", at_least=1)
    skip: tuple[tuple[int, int], ...] = setting(
        (), "rows to skip, as [[first,last],...] in the row numbers of metrics.jsonl, both ends included"
    )
    on_error: Literal["refuse", "skip"] = setting(
        "refuse", "for unreadable lines and files: refuse: stop with an error; skip: skip and count them in the report"
    )
    workers: int | str = setting(
        "auto",
        "processes that prepare the data; auto: one per CPU core",
        science=False,
        words=("auto",),
        at_least=1,
        cap=4096,
    )
    stream: bool = setting(False, "train while the data are still being prepared; needs dataset.window", science=False)

    @property
    def row_format(self) -> str | None:
        """What the ids of a document mean, which is a row; None: tokens, which rows are cut from at any place."""
        return None

    @abstractmethod
    def build(self) -> Source:
        """Return the source of documents that these settings describe."""
        raise NotImplementedError

    def corpora(self) -> Mapping[str, Dataset]:
        """Return the datasets to prepare, by name: this one, or the sources of a mixture."""
        return {"data": self}

    def check(self, prefix: str = "dataset") -> None:
        """Raise ConfigError when settings contradict each other."""
        for first, last in self.skip:
            if not 0 <= first <= last:
                raise ConfigError(f"{prefix}.skip=[[{first},{last}]]: a range is [first,last] with 0 <= first <= last.")
        if self.stream and self.window is None:
            raise ConfigError(
                f"{prefix}.stream=true: all rows are shuffled, and they are not all prepared yet; "
                f"set {prefix}.window to a number of tokens, such as 50000000."
            )


@dataclass(frozen=True, kw_only=True)
class Stdlib(Dataset):
    """The running Python's own standard library: real text on every machine, nothing to download."""

    def build(self) -> Source:
        """Return the source files of the standard library, one document each."""
        from titan.dataset.sources.local import build_stdlib_source

        return build_stdlib_source()


@dataclass(frozen=True, kw_only=True)
class Text(Dataset):
    """Plain text files (UTF-8)."""

    path: Input = setting(MISSING, "a file, a folder, a glob or a URL of text files (also .gz, .zst)", science=False)
    separator: Label | None = setting(
        None,
        "text that separates documents in a file, such as '<|endoftext|>'; null: files are split into passages",
        any_text=True,
    )

    def build(self) -> Source:
        """Return the documents of the files at `path`."""
        from titan.dataset.sources.local import build_text_source

        return build_text_source(self.path, self.separator, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Jsonl(Dataset):
    """JSON Lines files (UTF-8): one object per line, one document per object."""

    path: Input = setting(MISSING, "a file, a folder, a glob or a URL of .jsonl files (also .gz, .zst)", science=False)
    field: Label = setting("text", "the key that holds the document's text")

    def build(self) -> Source:
        """Return the documents of the files at `path`."""
        from titan.dataset.sources.local import build_jsonl_source

        return build_jsonl_source(self.path, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Parquet(Dataset):
    """Parquet files: one document per row."""

    path: Input = setting(MISSING, "a file, a folder, a glob or a URL of .parquet files", science=False)
    field: Label = setting("text", "the column that holds the document's text")

    def build(self) -> Source:
        """Return the documents of the files at `path`."""
        from titan.dataset.sources.local import build_parquet_source

        return build_parquet_source(self.path, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Hub(Dataset):
    """A dataset of Hugging Face's hub, or a folder in the same formats: one document per row."""

    # The data's digest covers the commit, or the folder's content.
    name: Input = setting(
        MISSING, "OWNER/NAME on the hub, a folder of data files, or a folder of save_to_disk", science=False
    )
    subset: Label | None = setting(None, "which configuration of the dataset; null: the only one")
    split: Label = setting("train", "which split")
    revision: Label | None = setting(
        None, "branch, tag or commit on the hub, null: main; a commit needs no network once prepared", science=False
    )
    field: Label = setting("text", "the column that holds the document's text")

    def build(self) -> Source:
        """Return the documents of the split."""
        from titan.dataset.sources.hub import build_hub_source

        return build_hub_source(self.name, self.subset, self.split, self.revision, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Chat(Dataset):
    """Conversations for supervised fine-tuning: only the assistant's messages count in the loss."""

    path: Input | None = setting(
        None, "a file, a folder, a glob or a URL of .jsonl (also .gz, .zst) or .parquet files", science=False
    )
    name: Input | None = setting(None, "instead of path: OWNER/NAME on the hub, or a folder, as of hub", science=False)
    subset: Label | None = setting(None, "which configuration of the named dataset; null: the only one")
    split: Label = setting("train", "which split of the named dataset")
    revision: Label | None = setting(None, "branch, tag or commit on the hub; null: main", science=False)
    messages: Label = setting("messages", "the key of the list of messages, each {role, content} or {from, value}")
    prompt: Label | None = setting(None, "instead of messages: the key of the user's message; needs dataset.completion")
    completion: Label | None = setting(None, "instead of messages: the key of the answer; needs dataset.prompt")
    template: Literal["auto", "llama3", "chatml", "plain"] = setting(
        "auto", "chat template; auto: llama3 or chatml if the tokenizer has its special tokens, else plain"
    )

    def build(self) -> Source:
        """Return the conversations in the tokenizer's chat template."""
        from titan.dataset.sources import chat, hub, records
        from titan.dataset.tokenizers.load import load_tokenizer

        if (self.path is None) == (self.name is None):
            raise ConfigError("dataset=chat: give either dataset.path=FILES or dataset.name=DATASET.")
        if (self.prompt is None) != (self.completion is None):
            raise ConfigError("dataset=chat: give both of dataset.prompt=KEY and dataset.completion=KEY, or neither.")
        template = chat.choose_template(self.template, load_tokenizer(self.tokenizer))
        row_format = chat.Conversation(template, self.messages, self.prompt, self.completion)
        if self.name is None:
            return records.find_rows("chat", str(self.path), row_format, self.on_error)
        return hub.HubSource(
            name="chat",
            row_format=row_format,
            on_error=self.on_error,
            dataset=self.name,
            subset=self.subset,
            split=self.split,
            revision=self.revision,
        )


@dataclass(frozen=True, kw_only=True)
class Synthetic(Dataset):
    """Tokens sampled from a small Markov chain with a seed: no text, no tokenizer; for tests and benchmarks."""

    tokens: int = setting(4_194_304, "number of tokens of the corpus", at_least=1024, cap=10**12)
    vocab: int = setting(256, "number of different tokens", at_least=2, cap=10**6)
    seed: int = setting(0, "seed of the corpus", at_least=0)
    longest: int = setting(
        500, "tokens of the longest document; the shortest has a fifth of them", at_least=5, cap=10**8
    )

    def build(self) -> Source:
        """Return the chain's documents."""
        from titan.dataset.sources.local import MarkovSource

        return MarkovSource(self.tokens, self.vocab, self.seed, self.longest)


@dataclass(frozen=True, kw_only=True)
class Prepared(Dataset):
    """A dataset that is prepared already, perhaps on another machine."""

    path: Input = setting(
        MISSING,
        "a prepared folder, or the URL of one (s3://, https://, ...) whose shards are fetched when they are read",
        science=False,
    )
    keep_gib: float | None = setting(
        None, "maximum size of the fetched shards in the cache, in GiB; null: unlimited", science=False, above=0
    )

    def check(self, prefix: str = "dataset") -> None:
        """Raise ConfigError when a setting of the preparation is given."""
        super().check(prefix)
        if prefix == "dataset":  # a mixture sets those of its sources
            _reject_non_defaults(self, PREPARATION_SETTINGS, prefix, "is fixed by the prepared data", "")
        _reject_non_defaults(self, ("on_error",), prefix, "is fixed by the prepared data", "")


@dataclass(frozen=True, kw_only=True)
class Mixture(Dataset):
    """Several datasets, mixed by tokens."""

    sources: Mapping[str, Dataset] = setting(MISSING, "the datasets, by names that you choose", science=False)
    weights: Mapping[str, float] = setting(MISSING, "the relative share of tokens of each source", unit="share")
    stages: Mapping[int, Mapping[str, float]] | None = setting(
        None,
        "weights of later stages: {tokens: {source: weight}}, each from the row that begins at or after tokens",
        unit="share",
    )

    def corpora(self) -> Mapping[str, Dataset]:
        """Return the sources with the mixture's common settings."""
        common = {name: getattr(self, name) for name in COMMON_SETTINGS}
        return {name: replace(source, **common) for name, source in self.sources.items()}

    def check(self, prefix: str = "dataset") -> None:
        """Raise ConfigError when a common setting is given for one source, or a source's setting for the mixture."""
        for name, source in self.sources.items():
            if isinstance(source, Mixture):
                raise ConfigError(f"dataset.sources.{name}: is a mixture; name its sources here instead.")
            _reject_non_defaults(
                source, COMMON_SETTINGS, f"dataset.sources.{name}", "applies to all sources", "dataset"
            )
        _reject_non_defaults(self, SOURCE_SETTINGS, "dataset", "is set for each source", "dataset.sources.NAME")
        for name, source in self.corpora().items():
            source.check(f"dataset.sources.{name}")
        self._check_weights()

    def _check_weights(self) -> None:
        if not self.sources:
            raise ConfigError("dataset.sources={}: the mixture is empty; add +dataset@dataset.sources.NAME=CHOICE.")
        compute_block_counts(self.weights, list(self.sources), "dataset.weights")
        for tokens, weights in (self.stages or {}).items():
            if tokens < 1:
                raise ConfigError(
                    f"dataset.stages={format_value(self.stages)}: a stage begins at {tokens}; give a number of tokens "
                    "above 0."
                )
            compute_block_counts(weights, list(self.sources), f"dataset.stages at {tokens}")


COMMON_SETTINGS = ("tokenizer", "mask_documents", "validation", "cache", "prefetch", "skip", "workers", "stream")
"""Settings of a mixture that apply to all of its sources."""
SOURCE_SETTINGS = ("epochs", "block", "window", "on_error")
"""Settings of each source of a mixture."""


PREPARATION_SETTINGS = ("tokenizer", "validation", "workers", "stream")
"""Settings of the preparation, which a mixture has for all of its sources."""


def _reject_non_defaults(dataset: Dataset, names: Iterable[str], prefix: str, reason: str, other_prefix: str) -> None:
    """Raise ConfigError when one of these settings is not at its default."""
    for field in fields(dataset):
        value = getattr(dataset, field.name)
        if field.name in names and value != field.default:
            way_out = f"give it as {other_prefix}.{field.name}" if other_prefix else "remove it"
            raise ConfigError(f"{prefix}.{field.name}={format_value(value)}: {reason}; {way_out}.")


KINDS: dict[str, Callable[..., Dataset]] = {
    "stdlib": Stdlib,
    "text": Text,
    "jsonl": Jsonl,
    "parquet": Parquet,
    "hub": Hub,
    "chat": Chat,
    "synthetic": Synthetic,
    "prepared": Prepared,
    "mixture": Mixture,
}
