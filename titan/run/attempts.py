"""Decide what a command does with its run's directory, by what that holds. Free of torch.

Nothing there: start. An unfinished run: resume it. A finished one: show its summary. More `training.steps`: continue.
A run with other hyperparameters raises ConfigError, which names the settings that differ. `titan.run.directory` reads
the files, `titan.run.same_experiment` compares, `titan.run.records` writes. The data are prepared before it, by
`titan.run.prepared_data`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.checkpoint.remote import Remote, open_remote
from titan.checkpoint.select import CheckpointCandidate
from titan.dataset import corpora
from titan.errors import ConfigError
from titan.metrics.reader import METRICS, ends_with_attempt
from titan.run import completion, evaluated, identity, own_code, records
from titan.run.directory import is_locked, parse_attempts, read_attempts, read_result
from titan.run.identity import Ids
from titan.run.lineage import Parent, count_rows_read, find_parent
from titan.run.prediction import Prediction, predict
from titan.run.prepared_data import PreparedData
from titan.run.run import Run
from titan.run.same_experiment import check_same, check_same_without_data


@dataclass(frozen=True)
class Attempt:
    """One execution of a run, between start or resume and its end.

    Attributes:
        number: 1 for the first.
        run_id: the same in all attempts of a run.
        ids: what identifies science, execution and code.
        corpora: the folder of each prepared corpus, by name.
        checkpoint: the folder or URL to resume from; None to start from the seed, or from `weights`.
        step: updates done in it; 0 at the start.
        rows: rows of the data read in it; 0 at the start.
        kind: "start", "resume", "continuation" or "fork" (from another run's checkpoint).
        parent: "science_id@step" of the checkpoint of a fork, or "weights:digest" of initial weights.
        weights: the folder of initial weights that replace those of the seed.
        notes: messages about it, for example about checkpoints that can't be used.
        prediction: of its step time and memory; None where the hardware is not described.
        evaluated: digests of what it evaluates, see `titan.run.evaluated`.
    """

    number: int
    run_id: str
    ids: Ids
    corpora: corpora.Folders
    checkpoint: str | None
    step: int
    rows: int
    kind: str
    parent: str | None = None
    weights: str | None = None
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None
    evaluated: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedRun:
    """The run in the directory has done all its steps."""

    directory: str
    result: Mapping[str, Any]


def begin_attempt(run: Run, data: PreparedData) -> Attempt | FinishedRun:
    """Decide what the directory means, and record the attempt that starts.

    Raises:
        ConfigError: when the directory holds something else.
    """
    history = _read_history(run)
    origin = find_parent(run, history.documents, data.mix, has_checkpoint=history.last is not None)
    science = identity.collect_science(run, corpora.compute_data_digest(data.mix), origin.id)
    notes = history.notes
    if history.documents:
        check_same(run, history.documents[-1], science, data.mix, history.last)
        if _is_finished(run, history):
            return FinishedRun(run.directory, history.result)
        _check_last(run, history.result, history.last, notes)
        notes += (*_note_missing_steps(history), *history.result_notes)
        notes += own_code.note_changes(run, history.documents[-1])
    digests = evaluated.compute_digests(run.evaluation)
    notes += evaluated.note_changes(digests, history.documents)
    prediction, problem = predict(run)
    notes += (problem,) if problem else ()
    attempt = _build_attempt(run, history, identity.compute_ids(run, science), data, origin)
    attempt = replace(attempt, notes=notes, prediction=prediction, evaluated=digests)
    records.record_attempt(run, attempt, science, history.documents)
    return attempt


@dataclass(frozen=True)
class _History:
    """What earlier attempts of a run have left.

    Attributes:
        documents: their documents in run.yaml.
        last: the last complete checkpoint.
        notes: messages about checkpoints that can't be used.
        result: the content of result.json; empty where it is missing or can't be used.
        result_notes: messages about result.json.
    """

    documents: list[dict[str, Any]]
    last: CheckpointCandidate | None
    notes: tuple[str, ...]
    result: Mapping[str, Any]
    result_notes: tuple[str, ...]


def _read_history(run: Run) -> _History:
    directory = Path(run.directory)
    documents = read_attempts(directory) or _read_remote_attempts(run)
    last, notes = select.find_latest(directory, run.checkpoint.path, documents[-1]["run_id"] if documents else None)
    if last and not documents:
        raise ConfigError(
            f"hydra.run.dir={directory}: holds checkpoints, and no run.yaml that says of which run; bring it back, or "
            "choose another name (checkpoint.resume goes on from them there)."
        )
    result, problem = read_result(directory, _collect_science_ids(documents)) if documents else ({}, None)
    return _History(documents, last, notes, result, (problem,) if problem else ())


def _is_finished(run: Run, history: _History) -> bool:
    """Return whether the run has done all its steps, or a hook has ended it, and no post-save hook is pending."""
    result, last = history.result, history.last
    is_done = result.get("finished") and result["step"] == run.training.steps
    if not (is_done or completion.is_ended_by_hook(run, history.documents[-1], result)):
        return False
    return not (last and select.is_post_save_pending(run.checkpoint, Path(run.directory), last.manifest.step))


def use_previous_checkpoint(run: Run, attempt: Attempt, problem: str) -> Attempt:
    """Return the attempt that starts one checkpoint earlier, since the one that it names is corrupt, and record that.

    Raises:
        ConfigError: when there is none before it, or it is another run's.
    """
    damaged_path, directory = str(attempt.checkpoint), Path(run.directory)
    if not _is_own(run, damaged_path):
        raise ConfigError(
            f"checkpoint.resume={run.checkpoint.resume}: {damaged_path} is damaged: {problem}; give another one."
        )
    if run.checkpoint.path and damaged_path.startswith(open_remote(run.checkpoint.path, run.directory).url):
        _retire_copy(
            open_remote(run.checkpoint.path, run.directory), attempt.step, f"checkpoint.path={run.checkpoint.path}"
        )
    else:
        manifest.mark_damaged(Path(damaged_path))
    earlier = read_attempts(directory)
    last, more_notes = select.find_latest(directory, run.checkpoint.path, attempt.run_id)
    notes = (*attempt.notes, f"checkpoint {Path(damaged_path).name} is damaged and not used: {problem}")
    notes += tuple(note for note in more_notes if note not in notes and f" {Path(damaged_path).name} " not in note)
    if last and last.path == damaged_path:
        raise ConfigError(f"hydra.run.dir={directory}: {notes[-1]}, and can't be set aside; remove it or move it away.")
    _check_last(run, {}, last, notes)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
    checkpoint = last or find_parent(run, earlier, mix, has_checkpoint=False).checkpoint
    step, rows = (checkpoint.manifest.step, count_rows_read(run, mix, checkpoint.manifest)) if checkpoint else (0, 0)
    attempt = replace(attempt, checkpoint=checkpoint.path if checkpoint else None, step=step, rows=rows, notes=notes)
    records.correct_start(directory, attempt)
    return attempt


def _retire_copy(copies: Remote, step: int, setting: str) -> None:
    """Mark a corrupt copy in `checkpoint.path` as not to be used."""
    try:
        copies.forget_step(step)
    except (OSError, CorruptCheckpointError) as error:
        raise ConfigError(
            f"{setting}: step-{step} there is damaged, and can't be set aside ({error}); fix this."
        ) from error


def withdraw_attempt(run: Run, attempt: Attempt) -> None:
    """Remove the record of an attempt that a ConfigError ended before its first step, so that its name is free.

    Nothing is removed of a run that has a complete checkpoint and no earlier attempt: its metrics were lost.
    """
    directory = Path(run.directory)
    earlier = [document for document in read_attempts(directory) if document["attempt"] != attempt.number]
    if ends_with_attempt(directory / METRICS, attempt.number):
        return
    if earlier:
        with contextlib.suppress(OSError):  # on a full disk it stays
            return records.write_attempts(directory, earlier)
        return
    if not manifest.list_complete(directory):
        records.clear_attempt(run)


def check_directory(run: Run, has_own_job: bool) -> None:
    """Check a run's directory before the run is handed to a scheduler, without its data.

    Args:
        has_own_job: it was handed over before, so that the process in its directory may be its own.

    Raises:
        ConfigError: when it holds no run, another experiment, one with more steps, or a process is running in it.
    """
    earlier = read_attempts(Path(run.directory))
    if not has_own_job and is_locked(Path(run.directory)):
        raise ConfigError(
            f"hydra.run.dir={run.directory}: a process is running in it; wait for it, or choose another name."
        )
    if earlier:
        check_same_without_data(run, earlier[-1])


def read_finished_run(run: Run) -> FinishedRun:
    """Return the result of the finished run in a directory."""
    return FinishedRun(run.directory, read_result(Path(run.directory))[0])


def _collect_science_ids(attempts: list[dict[str, Any]]) -> set[str]:
    """Return the science ids that a run has had: more steps change them."""
    return {document["ids"]["science"] for document in attempts}


def _read_remote_attempts(run: Run) -> list[dict[str, Any]]:
    """Return the documents of a run whose directory is gone, or on another machine, from `checkpoint.path`."""
    if run.checkpoint.path is None:
        return []
    copies = open_remote(run.checkpoint.path, run.directory)
    try:
        text = copies.read("run.yaml")
    except OSError:  # `select.find_latest` reports it
        return []
    return parse_attempts(text.decode(errors="replace"), f"checkpoint.path={run.checkpoint.path}") if text else []


def _is_own(run: Run, checkpoint: str) -> bool:
    """Return whether a checkpoint is the run's, not the one that it was forked from."""
    own_folders = [str(Path(run.directory) / "checkpoints")]
    if run.checkpoint.path:
        own_folders.append(open_remote(run.checkpoint.path, run.directory).url)
    return checkpoint.rpartition("/")[0] in own_folders


def _check_last(run: Run, result: Mapping[str, Any], last: CheckpointCandidate | None, notes: tuple[str, ...]) -> None:
    """Raise ConfigError where a run had got further, but none of its checkpoints can be used: it must not restart."""
    if last is not None:
        return
    if notes:
        raise ConfigError(
            f"hydra.run.dir={run.directory}: {'; '.join(notes)}; and there is no other. Bring back a copy of one, or "
            "choose another name to start again."
        )
    if result.get("finished"):
        raise ConfigError(
            f"training.steps={run.training.steps}: the run in {run.directory} is finished and has no checkpoint to "
            "continue from; choose another name."
        )


def _note_missing_steps(history: _History) -> tuple[str, ...]:
    """Return a note where a run had checkpoints and has none any more."""
    result = history.result
    from_step = int(history.documents[-1].get("from_step", 0))
    last_step = max(from_step, int(result.get("step", 0)) if result.get("checkpoint") else 0)
    if not last_step or history.last is not None:
        return ()
    return (f"there is no checkpoint any more of a run that had got to step {last_step}",)


def _build_attempt(run: Run, history: _History, ids: Ids, data: PreparedData, origin: Parent) -> Attempt:
    documents, checkpoint = history.documents, history.last or origin.checkpoint
    step, rows = (
        (checkpoint.manifest.step, count_rows_read(run, data.mix, checkpoint.manifest)) if checkpoint else (0, 0)
    )
    is_continuation = bool(documents) and ids.science != documents[-1]["ids"]["science"]
    kind = "continuation" if is_continuation else "resume" if documents else "fork" if checkpoint else "start"
    run_id = documents[0]["run_id"] if documents else uuid.uuid4().hex[:12]
    path, weights = (checkpoint.path, None) if checkpoint else (None, origin.weights)
    return Attempt(len(documents) + 1, run_id, ids, data.folders, path, step, rows, kind, origin.id, weights)
