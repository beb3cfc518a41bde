"""The prepared data of a run: prepare them, open them, and build the mixture of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from titan.dataset import remote
from titan.dataset.documents import content_digest
from titan.dataset.mixture import MixturePhase, RowMixture, TokenSequences
from titan.dataset.preprocess.prepare import cache_folder, plan, prepare
from titan.dataset.proportions import BLOCK, block_counts
from titan.dataset.schema import Dataset, Mixture, Prepared
from titan.dataset.shards import Corpus, open_corpus
from titan.errors import ConfigError
from titan.training.schema import Training

Folders = Mapping[str, str]
"""The prepared folder of each corpus, by name."""
Corpora = Mapping[str, Corpus]


def prepare_corpora(dataset: Dataset, progress: Callable[[str], None] | None = None) -> dict[str, str]:
    """Return the prepared folder of each corpus of `dataset`, preparing what is missing.

    With `stream` only the plan is written: the preparation runs beside the training.

    Raises:
        ConfigError: when the data can't be used.
    """
    folders = {}
    for name, part in dataset.corpora().items():
        folder = _prepare(part, dataset.stream, progress)
        check = not (isinstance(part, Prepared) and "://" in part.path)
        _check(open_corpus(folder, partial=dataset.stream, check=check))
        folders[name] = str(folder)
    _check_tokenizers(open_corpora(folders))
    return folders


def _prepare(part: Dataset, stream: bool, progress: Callable[[str], None] | None) -> Path:
    if isinstance(part, Prepared):
        return _prepared_folder(part)
    if not stream:
        return prepare(part, progress)
    folder = plan(part)
    if (folder / "manifest.json").is_file():
        return prepare(part, progress)  # repairs corrupt files
    (folder / "failed.json").unlink(missing_ok=True)  # an earlier failure is retried
    return folder


def _prepared_folder(part: Prepared) -> Path:
    if "://" in part.path:
        return remote.mirror(part.path, cache_folder(part), part.keep_gib)
    folder = Path(part.path).expanduser().resolve()
    if not (folder / "manifest.json").is_file():
        raise ConfigError(
            f"dataset.path={part.path}: the folder holds no prepared data (no manifest.json); give a folder that "
            "python -m titan.prepare has completed."
        )
    return folder


def _check(corpus: Corpus) -> None:
    if corpus.complete and not corpus.train.tokens:
        raise ConfigError(f"dataset: {corpus.name} has no training tokens; decrease dataset.validation.")


def _check_tokenizers(corpora: Corpora) -> None:
    """Raise ConfigError when the corpora have different tokenizers."""
    by_fingerprint = {corpus.tokenizer["fingerprint"]: name for name, corpus in corpora.items()}
    if len(by_fingerprint) > 1:
        one, other, *_ = by_fingerprint.values()
        raise ConfigError(
            f"dataset.sources: {one} and {other} have different tokenizers ({corpora[one].tokenizer['name']} and "
            f"{corpora[other].tokenizer['name']}); prepare all with the same one."
        )


def open_corpora(folders: Folders, dataset: Dataset | None = None) -> dict[str, Corpus]:
    """Open the corpora of `folders`, as far as they are prepared.

    Args:
        folders: the prepared folder of each corpus.
        dataset: the settings that they were prepared from. A machine needs them to create the local folder of a
            corpus at a URL, and a process to know that URL's credentials.
    """
    parts = dataset.corpora() if dataset is not None else {}
    for name, folder in folders.items():
        part = parts.get(name)
        if isinstance(part, Prepared) and "://" in part.path:
            remote.know(part.path)
        if isinstance(part, Prepared) and not Path(folder).exists():
            _prepared_folder(part)
    return {name: open_corpus(folder, partial=True) for name, folder in folders.items()}


def build_mixture(dataset: Dataset, training: Training, corpora: Corpora) -> RowMixture:
    """Return the mixture of all rows that a run may read.

    Args:
        dataset: the weights and the order.
        training: the row length and the seed.
        corpora: the opened corpora.

    Raises:
        ConfigError: when the weights are invalid.
    """
    parts = dataset.corpora()
    rows = tuple(_sequences(name, part, training, corpora[name]) for name, part in parts.items())
    return RowMixture(rows, _phases(dataset, training, list(parts)), _skip(dataset), training.seed)


def data_digest(mix: RowMixture) -> str:
    """Return the digest of all corpora of a run and of the order in which each is read."""
    if len(mix.sources) == 1:
        return mix.sources[0].corpus.digest
    return content_digest({rows.name: rows.identity for rows in mix.sources})


def check_epochs(dataset: Dataset, training: Training, mix: RowMixture) -> None:
    """Raise ConfigError when the run reads a corpus for more epochs than `dataset.epochs` allows."""
    for part, rows, read in zip(
        dataset.corpora().values(), mix.sources, mix.reads(training.count_rows_before(training.steps + 1)), strict=True
    ):
        size = rows.split.rows(training.seq_len)
        if part.epochs is not None and rows.corpus.complete and read > part.epochs * size:
            where = "dataset" if len(mix.sources) == 1 else f"dataset.sources.{rows.name}"
            raise ConfigError(
                f"{where}.epochs={part.epochs:g}: training.steps={training.steps} reads {rows.name} {read / size:.2f} "
                "times; decrease the steps or its weight, or increase the epochs."
            )


def _sequences(name: str, part: Dataset, training: Training, corpus: Corpus) -> TokenSequences:
    window = None if part.window is None else max(1, part.window // training.seq_len)
    return TokenSequences(name, corpus, training.seq_len, training.seed, part.block, window, part.epochs)


def _phases(dataset: Dataset, training: Training, names: list[str]) -> tuple[MixturePhase, ...]:
    if not isinstance(dataset, Mixture):
        return (MixturePhase(0, (BLOCK,)),)
    found = [MixturePhase(0, block_counts(dataset.weights, names, "dataset.weights"))]
    for tokens, weights in sorted((dataset.stages or {}).items()):
        shares = block_counts(weights, names, f"dataset.stages at {tokens}")
        found.append(MixturePhase(-(-tokens // training.seq_len), shares))
    return tuple(found)


def _skip(dataset: Dataset) -> tuple[tuple[int, int], ...]:
    """Return the ranges to skip in order; adjacent ones are merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(dataset.skip):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)
