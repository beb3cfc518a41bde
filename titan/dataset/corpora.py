"""The prepared data of a run: prepare them, open them, and build the mixture of their rows.

`prepared_meanwhile` prepares while a run trains, in one process for all incomplete corpora. It adds finished shards to
the folder that the training reads. When the training ends first, the next attempt or `python -m titan.prepare`
continues the preparation.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from titan.console.text import is_url
from titan.dataset import remote
from titan.dataset.documents import content_digest
from titan.dataset.mixture import MixturePhase, RowMixture, TokenSequences
from titan.dataset.preprocess.plan import ensure_plan, find_cache_folder
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.preprocess.shard_job import end_processes, leave_signals_to
from titan.dataset.preprocess.writer import write_json
from titan.dataset.schema import BLOCK, Dataset, Mixture, Prepared, compute_block_counts
from titan.dataset.shards import Corpus, open_corpus
from titan.errors import ConfigError, RunError
from titan.training.schema import Training

Folders = Mapping[str, str]
"""The prepared folder of each corpus, by name."""
Corpora = Mapping[str, Corpus]


def prepare_corpora(dataset: Dataset, progress: Callable[[str], None] | None = None) -> dict[str, Corpus]:
    """Open the corpora of `dataset`, preparing what is missing.

    With `stream` only the plan is written: the preparation runs beside the training.
    """
    corpora = {}
    for name, settings in dataset.corpora().items():
        setting = f"dataset.sources.{name}" if isinstance(dataset, Mixture) else "dataset"
        folder = _prepare_corpus(settings, dataset.stream, progress, setting)
        check_sizes = not (isinstance(settings, Prepared) and is_url(settings.path))
        corpus = open_corpus(folder, partial=dataset.stream, check_sizes=check_sizes)
        if corpus.complete and not corpus.train.tokens:
            raise ConfigError(f"dataset: {corpus.name} has no training tokens; decrease dataset.validation.")
        corpora[name] = corpus
    _check_tokenizers(corpora)
    return corpora


def _prepare_corpus(settings: Dataset, stream: bool, progress: Callable[[str], None] | None, setting: str) -> Path:
    if isinstance(settings, Prepared):
        return _locate_folder(settings)
    folder = ensure_plan(settings, setting) if stream else None
    if folder is None or (folder / "manifest.json").is_file():
        return prepare(settings, progress, setting=setting)  # repairs corrupt files
    (folder / "failed.json").unlink(missing_ok=True)  # an earlier failure is retried
    return folder


def _locate_folder(settings: Prepared) -> Path:
    if is_url(settings.path):
        return remote.mirror_folder(settings.path, find_cache_folder(settings), settings.keep_gib)
    folder = Path(settings.path).expanduser().resolve()
    if not (folder / "manifest.json").is_file():
        raise ConfigError(
            f"dataset.path={settings.path}: the folder holds no prepared data (no manifest.json); give a folder that "
            "python -m titan.prepare has completed."
        )
    return folder


def _check_tokenizers(corpora: Corpora) -> None:
    """Raise ConfigError when the corpora have different tokenizers."""
    by_fingerprint = {corpus.tokenizer["fingerprint"]: name for name, corpus in corpora.items()}
    if len(by_fingerprint) > 1:
        first_name, second_name, *_ = by_fingerprint.values()
        raise ConfigError(
            f"dataset.sources: {first_name} and {second_name} have different tokenizers "
            f"({corpora[first_name].tokenizer['name']} and {corpora[second_name].tokenizer['name']}); prepare all "
            "with the same one."
        )


def open_corpora(folders: Folders, dataset: Dataset | None = None) -> dict[str, Corpus]:
    """Open the corpora of `folders`, as far as they are prepared.

    Args:
        dataset: the settings that they were prepared from. A machine needs them to create the local folder of a
            corpus at a URL, and a process to know that URL's credentials.
    """
    settings_by_name = dataset.corpora() if dataset is not None else {}
    for name, folder in folders.items():
        settings = settings_by_name.get(name)
        if isinstance(settings, Prepared) and is_url(settings.path):
            remote.register_url(settings.path)
        if isinstance(settings, Prepared) and not Path(folder).exists():
            _locate_folder(settings)
    return {name: open_corpus(folder, partial=True) for name, folder in folders.items()}


def build_mixture(dataset: Dataset, training: Training, corpora: Corpora) -> RowMixture:
    """Return the mixture of all rows that a run may read.

    Args:
        dataset: the weights and the order.
        training: the row length and the seed.
    """
    sequences = []
    for name, settings in dataset.corpora().items():
        window = None if settings.window is None else max(1, settings.window // training.seq_len)
        order = training.seed, settings.block, window, settings.epochs
        sequences.append(TokenSequences(name, corpora[name], training.seq_len, *order))
    phases = _build_phases(dataset, training, [rows.name for rows in sequences])
    return RowMixture(tuple(sequences), phases, _merge_skip_ranges(dataset), training.seed)


def compute_data_digest(mixture: RowMixture) -> str:
    """Return the digest of all corpora of a run and of the order in which each is read."""
    if len(mixture.sources) == 1:
        return mixture.sources[0].corpus.digest
    return content_digest({sequences.name: sequences.identity for sequences in mixture.sources})


def check_epochs(dataset: Dataset, training: Training, mixture: RowMixture) -> None:
    """Raise ConfigError when the run reads a corpus for more epochs than `dataset.epochs` allows."""
    for settings, sequences, rows_read in zip(
        dataset.corpora().values(),
        mixture.sources,
        mixture.count_rows_read(training.count_rows_before(training.steps + 1)),
        strict=True,
    ):
        epoch_rows = sequences.split.count_rows(training.seq_len)
        if settings.epochs is not None and sequences.corpus.complete and rows_read > settings.epochs * epoch_rows:
            prefix = "dataset" if len(mixture.sources) == 1 else f"dataset.sources.{sequences.name}"
            raise ConfigError(
                f"{prefix}.epochs={settings.epochs:g}: training.steps={training.steps} reads {sequences.name} "
                f"{rows_read / epoch_rows:.2f} times; decrease the steps or its weight, or increase the epochs."
            )


def _build_phases(dataset: Dataset, training: Training, names: list[str]) -> tuple[MixturePhase, ...]:
    if not isinstance(dataset, Mixture):
        return (MixturePhase(0, (BLOCK,)),)
    phases = [MixturePhase(0, compute_block_counts(dataset.weights, names, "dataset.weights"))]
    for tokens, weights in sorted((dataset.stages or {}).items()):
        quotas = compute_block_counts(weights, names, f"dataset.stages at {tokens}")
        phases.append(MixturePhase(-(-tokens // training.seq_len), quotas))
    return tuple(phases)


def _merge_skip_ranges(dataset: Dataset) -> tuple[tuple[int, int], ...]:
    """Return the ranges to skip in order; adjacent ones are merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(dataset.skip):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


NICENESS = 10
WATCH_SECONDS = 0.25
GRACE_SECONDS = 10.0


@contextmanager
def prepared_meanwhile(dataset: Dataset, folders: Folders, log: Path) -> Iterator[None]:
    """Prepare the incomplete corpora of `dataset` in a process that ends with this context."""
    incomplete = [settings for name, settings in dataset.corpora().items() if not open_corpora(folders)[name].complete]
    if not incomplete:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare_corpora, args=(incomplete, str(log), os.getpid())
    )
    process.start()
    ended = threading.Event()
    watcher = threading.Thread(target=_record_failure, args=(process, ended, folders), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        end_processes([process], GRACE_SECONDS)


def _record_failure(process: BaseProcess, ended: threading.Event, folders: Folders) -> None:
    """When the process ends early, write failed.json for the ranks that wait for its data."""
    while process.is_alive():
        if ended.wait(WATCH_SECONDS):
            return
    for corpus in open_corpora(folders).values():
        failure_file = corpus.folder / "failed.json"
        if not corpus.complete and not failure_file.exists():
            code = process.exitcode or 0
            outcome = f"was killed by signal {-code}" if code < 0 else "ended"
            write_json(
                failure_file,
                {"error": f"the preparing process {outcome}; see log/prepare.log, and start the run again"},
            )


def _prepare_corpora(datasets: list[Dataset], log: str, parent_pid: int) -> None:
    """Run in the process: ignore SIGINT and SIGHUP, which the parent handles, and exit when the parent does.

    Its priority is lower than the training's.
    """
    leave_signals_to(parent_pid)
    os.nice(NICENESS)
    with open(log, "a", buffering=1) as file:
        try:
            for dataset in datasets:
                prepare(dataset, lambda line: print(line, file=file))
        except (ConfigError, RunError) as error:
            print(error, file=file)
        except KeyboardInterrupt:
            print("stopped with the training", file=file)
