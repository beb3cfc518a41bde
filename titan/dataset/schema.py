"""The dataset axis: where text comes from and how it becomes tokens. Free of torch.

Each source is a dataclass whose `build()` gives an object that yields documents (`titan.dataset.sources.local`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from titan.config.settings import MISSING, setting, show
from titan.dataset.proportions import block_counts
from titan.errors import ConfigError

if TYPE_CHECKING:
    from titan.dataset.documents import Source
    from titan.dataset.sources.records import Reader


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What every source of text has in common."""

    tokenizer: str = setting(
        "titan4k",
        "titan4k (built in), a file (*.tiktoken, Llama 3's tokenizer.model, tokenizer.json), or OWNER/NAME on the hub",
        science=False,  # the data's digest covers its content, wherever the file lies
    )
    mask_documents: bool = setting(False, "keep attention, positions and targets inside a document")
    validation: float = setting(
        0.01, "share of the documents held out for validation, by content hash", at_least=0, below=1
    )
    cache: str | None = setting(None, "folder for prepared data; null: $TITAN_CACHE or ~/.cache/titan", science=False)
    prefetch: int = setting(4, "batches read ahead in the background", science=False, at_least=1, at_most=1024)
    epochs: float | None = setting(
        None, "how often the data may be read at most; null: any number of times", science=False, above=0
    )
    block: int = setting(
        1, "rows that keep together in the order: 1, or many where each read costs much (object stores)", at_least=1
    )
    window: int | None = setting(None, "tokens inside of which rows change places; null: all of them", at_least=1)
    skip: tuple[tuple[int, int], ...] = setting(
        (), "rows to leave out, as [[first,last],...] in the numbers that metrics.jsonl shows; both ends are left out"
    )
    on_error: Literal["refuse", "skip"] = setting(
        "refuse", "what can't be read, such as a broken line or file: refuse it, or skip it and count it in the report"
    )
    workers: int | str = setting(
        "auto",
        "processes that prepare the data; auto: one a CPU core",
        science=False,
        words=("auto",),
        at_least=1,
        cap=4096,
    )
    stream: bool = setting(False, "train while the data are still being prepared; needs dataset.window", science=False)

    def build(self) -> Source:
        """The source of documents that these settings describe."""
        raise NotImplementedError

    def corpora(self) -> Mapping[str, Dataset]:
        """What is prepared by itself, by name: this dataset, or those that it is mixed of."""
        return {"data": self}

    def check(self, where: str = "dataset") -> None:
        """Refuse settings that do not fit each other.

        Args:
            where: what the settings are called.

        Raises:
            ConfigError: naming the one to change.
        """
        for first, last in self.skip:
            if not 0 <= first <= last:
                raise ConfigError(f"{where}.skip=[[{first},{last}]]: a range is [first,last] with 0 <= first <= last.")
        if self.stream and self.window is None:
            raise ConfigError(
                f"{where}.stream=true: rows change places among all of them, which are not there yet; "
                f"give {where}.window, a number of tokens such as 50000000."
            )


@dataclass(frozen=True, kw_only=True)
class Stdlib(Dataset):
    """The running Python's own standard library: real text on every machine, nothing to download."""

    def build(self) -> Source:
        """The source files of the standard library, one document each."""
        from titan.dataset.sources.local import stdlib

        return stdlib()


@dataclass(frozen=True, kw_only=True)
class Text(Dataset):
    """Plain text files (UTF-8)."""

    path: str = setting(MISSING, "a file, a folder, a glob or a URL of text files (also .gz, .zst)", science=False)
    separator: str | None = setting(
        None,
        "text that ends a document inside a file, such as '<|endoftext|>'; null: files are cut into passages",
        any_text=True,
    )

    def build(self) -> Source:
        """The documents of the files at `path`."""
        from titan.dataset.sources.local import text

        return text(self.path, self.separator, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Jsonl(Dataset):
    """JSON Lines files (UTF-8): one object a line, one document an object."""

    path: str = setting(MISSING, "a file, a folder, a glob or a URL of .jsonl files (also .gz, .zst)", science=False)
    field: str = setting("text", "the key that holds the document's text")

    def build(self) -> Source:
        """The documents of the files at `path`."""
        from titan.dataset.sources.local import jsonl

        return jsonl(self.path, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Parquet(Dataset):
    """Parquet files: one document a row."""

    path: str = setting(MISSING, "a file, a folder, a glob or a URL of .parquet files", science=False)
    field: str = setting("text", "the column that holds the document's text")

    def build(self) -> Source:
        """The documents of the files at `path`."""
        from titan.dataset.sources.local import parquet

        return parquet(self.path, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Hub(Dataset):
    """A dataset of Hugging Face's hub, or a folder in the same formats: one document a row."""

    # The data's digest covers the commit, or the folder's content.
    name: str = setting(
        MISSING, "OWNER/NAME on the hub, a folder of data files, or what save_to_disk wrote", science=False
    )
    subset: str | None = setting(None, "which configuration of the dataset; null: the only one")
    split: str = setting("train", "which split")
    revision: str | None = setting(
        None, "branch, tag or commit on the hub, null: main; a commit needs no network once prepared", science=False
    )
    field: str = setting("text", "the column that holds the document's text")

    def build(self) -> Source:
        """The documents of the split."""
        from titan.dataset.sources.hub import hub

        return hub(self.name, self.subset, self.split, self.revision, self.field, self.on_error)


@dataclass(frozen=True, kw_only=True)
class Chat(Dataset):
    """Conversations for supervised fine-tuning: only what the assistant says counts in the loss."""

    path: str | None = setting(
        None, "a file, a folder, a glob or a URL of .jsonl (also .gz, .zst) or .parquet files", science=False
    )
    name: str | None = setting(None, "in place of path: OWNER/NAME on the hub, or a folder, as of hub", science=False)
    subset: str | None = setting(None, "which configuration of the named dataset; null: the only one")
    split: str = setting("train", "which split of the named dataset")
    revision: str | None = setting(None, "branch, tag or commit on the hub; null: main", science=False)
    messages: str = setting("messages", "the key of the list of messages, each {role, content} or {from, value}")
    prompt: str | None = setting(None, "in place of messages: the key of what the user says; needs dataset.completion")
    completion: str | None = setting(None, "in place of messages: the key of the answer; needs dataset.prompt")
    template: Literal["auto", "llama3", "chatml", "plain"] = setting(
        "auto", "how conversations are laid out; auto: llama3 or chatml where the tokenizer has its tokens, else plain"
    )

    def build(self) -> Source:
        """The conversations, laid out for the tokenizer."""
        from titan.dataset.sources import chat, hub
        from titan.dataset.tokenizers.load import load_tokenizer

        self._check()
        template = chat.template(self.template, load_tokenizer(self.tokenizer))
        pick = chat.Conversation(template, self.messages, self.prompt, self.completion)
        if self.name is not None:
            reader: Reader = hub.Hub(self.name, self.subset, self.split, self.revision, pick.columns)
        else:
            reader = chat.of_files(str(self.path), pick.columns)
        return chat.chat(reader, pick, self.on_error)

    def _check(self) -> None:
        if (self.path is None) == (self.name is None):
            raise ConfigError("dataset=chat: give either dataset.path=FILES or dataset.name=DATASET.")
        if (self.prompt is None) != (self.completion is None):
            raise ConfigError("dataset=chat: give both of dataset.prompt=KEY and dataset.completion=KEY, or neither.")


@dataclass(frozen=True, kw_only=True)
class Synthetic(Dataset):
    """Tokens drawn by a keyed generator from a small Markov chain: no text, no tokenizer; for tests and benchmarks."""

    tokens: int = setting(4_194_304, "how many tokens the corpus has", at_least=1024, cap=10**12)
    vocab: int = setting(256, "how many different tokens occur", at_least=2, cap=10**6)
    seed: int = setting(0, "which corpus", at_least=0)
    longest: int = setting(
        500, "tokens of the longest document; the shortest has a fifth of them", at_least=5, cap=10**8
    )

    def build(self) -> Source:
        """The chain's documents."""
        from titan.dataset.sources.local import Markov

        return Markov(self.tokens, self.vocab, self.seed, self.longest)


@dataclass(frozen=True, kw_only=True)
class Prepared(Dataset):
    """What was prepared before, perhaps elsewhere."""

    path: str = setting(
        MISSING,
        "a prepared folder, or the URL of one (s3://, https://, ...) that is fetched as it is read",
        science=False,
    )
    keep_gib: float | None = setting(
        None, "how much of what was fetched is kept in the cache; null: all", science=False, above=0
    )

    def check(self, where: str = "dataset") -> None:
        """Refuse what was decided when the data were prepared."""
        super().check(where)
        if where == "dataset":  # those of a mixture's parts are the mixture's
            _refuse_set(self, DECIDED, where, "was decided when the data were prepared", "")
        _refuse_set(self, ("on_error",), where, "was decided when the data were prepared", "")


@dataclass(frozen=True, kw_only=True)
class Mixture(Dataset):
    """Several datasets, mixed by tokens."""

    sources: Mapping[str, Dataset] = setting(MISSING, "the datasets, by names of your own", science=False)
    weights: Mapping[str, float] = setting(MISSING, "the share of tokens of each source, in any unit")
    stages: Mapping[int, Mapping[str, float]] | None = setting(
        None,
        "other weights later: {tokens: {source: weight}}, each from the row that begins at or after tokens",
    )

    def corpora(self) -> Mapping[str, Dataset]:
        """The sources, with what they have in common."""
        common = {name: getattr(self, name) for name in COMMON}
        return {name: replace(source, **common) for name, source in self.sources.items()}

    def check(self, where: str = "dataset") -> None:
        """Refuse what is to be said of the whole but is said of a part, and the other way round."""
        for name, source in self.sources.items():
            if isinstance(source, Mixture):
                raise ConfigError(f"dataset.sources.{name}: a mixture of its own; name its sources here instead.")
            _refuse_set(source, COMMON, f"dataset.sources.{name}", "holds for all sources", "dataset")
        _refuse_set(self, OWN, "dataset", "is each source's own", "dataset.sources.NAME")
        for name, source in self.corpora().items():
            source.check(f"dataset.sources.{name}")
        self._check_weights()

    def _check_weights(self) -> None:
        if not self.sources:
            raise ConfigError("dataset.sources={}: there is nothing to mix; add +dataset@dataset.sources.NAME=CHOICE.")
        block_counts(self.weights, list(self.sources), "dataset.weights")
        for tokens, weights in (self.stages or {}).items():
            if tokens < 1:
                raise ConfigError(
                    f"dataset.stages={show(self.stages)}: begins at {tokens}; give a number of tokens above 0."
                )
            block_counts(weights, list(self.sources), f"dataset.stages at {tokens}")


COMMON = ("tokenizer", "mask_documents", "validation", "cache", "prefetch", "skip", "workers", "stream")
"""Settings of a mixture that hold for all of its sources."""
OWN = ("epochs", "block", "window", "on_error")
"""Settings that each source of a mixture has for itself."""


DECIDED = ("tokenizer", "validation", "workers", "stream")
"""Settings of a dataset that is yet to be prepared, which a mixture has for all of its sources."""


def _refuse_set(dataset: Dataset, names: Iterable[str], where: str, why: str, there: str) -> None:
    """Refuse settings that are not at their defaults."""
    for field in fields(dataset):
        value = getattr(dataset, field.name)
        if field.name in names and value != field.default:
            way_out = f"give it as {there}.{field.name}" if there else "leave it out"
            raise ConfigError(f"{where}.{field.name}={show(value)}: {why}; {way_out}.")


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
