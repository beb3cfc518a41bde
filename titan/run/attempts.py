"""Decide what a command does with its run's directory, by what that holds. Free of torch.

Nothing there: start. An unfinished run: resume it. A finished one: show its summary. More `training.steps`: continue.
A run with other hyperparameters raises ConfigError, which names the settings that differ. Then the attempt is written
into the directory: run.yaml, Hydra's own files, env.json. `titan.run.directory` reads them; the data are prepared
before, by `titan.run.lineage`.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import CorruptCheckpointError
from titan.checkpoint.remote import open_remote
from titan.checkpoint.select import CheckpointCandidate
from titan.config.kinds import get_kind
from titan.config.settings import format_value
from titan.console.text import redact_nested
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.files.atomic import write_atomic
from titan.files.run_directory import RUN, shorten_path
from titan.metrics.reader import METRICS, ends_with_attempt
from titan.model.schema import Llama
from titan.run import certificate, evaluated, hydra_private, identity, prediction
from titan.run.directory import (
    ENVIRONMENT,
    build_write_error,
    is_ended_by_hook,
    is_locked,
    list_hydra_folders,
    parse_attempts,
    read_attempts,
    read_result,
)
from titan.run.identity import Ids
from titan.run.lineage import count_rows_read, count_work, find_parent
from titan.run.prediction import Prediction, predict
from titan.run.run import Run, as_config, flatten_config


@dataclass(frozen=True)
class Attempt:
    """One execution of a run, between start or resume and its end."""

    number: int  # 1 for the first
    run_id: str  # the same in all attempts of a run
    ids: Ids  # what identifies science, execution and code
    corpora: corpora.Folders  # the folder of each prepared corpus, by name
    checkpoint: str | None  # the folder or URL to resume from; None to start from the seed, or from `weights`
    step: int  # updates done in it; 0 at the start
    rows: int  # rows of the data read in it; 0 at the start
    kind: str  # "start", "resume", "continuation" or "fork" (from another run's checkpoint)
    parent: str | None = None  # "science_id@step" of the checkpoint of a fork, or "weights:digest" of initial weights
    weights: str | None = None  # the folder of initial weights that replace those of the seed
    notes: tuple[str, ...] = ()  # messages about it, for example about checkpoints that can't be used
    prediction: Prediction | None = None  # of its step time and memory; None where the hardware is not described
    # digests of what it evaluates, see `titan.run.evaluated`
    evaluated: Mapping[str, str] = field(default_factory=dict)


def begin_attempt(run: Run, mix: RowMixture) -> Attempt | None:
    """Decide what the directory means, and record the attempt that starts; None where the run is finished.

    It is when it has done all its steps, or a hook has ended it, and no post-save hook is pending.
    """
    history = _read_history(run)
    origin = find_parent(run, history.documents, mix, has_checkpoint=history.last is not None)
    science = identity.collect_science(run, corpora.compute_data_digest(mix), origin.id)
    notes, directory = history.notes, Path(run.directory)
    if history.documents:
        check_same(run, history.documents[-1], science, mix, history.last)
        is_done = history.result.get("finished") and history.result["step"] == run.training.steps
        is_done = is_done or is_ended_by_hook(run, history.documents[-1], history.result)
        last = history.last
        if is_done and not (last and select.is_post_save_pending(run.checkpoint, directory, last.manifest.step)):
            return None
        _check_last(run, history.result, history.last, notes)
        saved_step = history.result["step"] if history.result.get("checkpoint") else 0
        lost_step = max(history.documents[-1].get("from_step", 0), saved_step)
        if history.last is None and lost_step:
            notes += (f"there is no checkpoint any more of a run that had got to step {lost_step}",)
        notes += history.result_notes
        notes += identity.note_code_changes(run, history.documents[-1])
    ids, checkpoint = identity.compute_ids(run, science), history.last or origin.checkpoint
    digests = evaluated.compute_digests(run.evaluation)
    notes += evaluated.note_changes(digests, history.documents)
    prediction, problem = predict(run)
    notes += (problem,) if problem else ()
    step, rows = count_work(run, mix, checkpoint)
    is_continuation = bool(history.documents) and ids.science != history.documents[-1]["ids"]["science"]
    kind = "continuation" if is_continuation else "resume" if history.documents else "fork" if checkpoint else "start"
    attempt = Attempt(
        number=len(history.documents) + 1,
        run_id=history.documents[0]["run_id"] if history.documents else uuid.uuid4().hex[:12],
        ids=ids,
        corpora=mix.folders,
        checkpoint=checkpoint.path if checkpoint else None,
        step=step,
        rows=rows,
        kind=kind,
        parent=origin.id,
        weights=None if checkpoint else origin.weights,
        notes=notes,
        prediction=prediction,
        evaluated=digests,
    )
    record_attempt(run, attempt, science, history.documents)
    return attempt


class _History(NamedTuple):
    """What earlier attempts of a run have left."""

    documents: list[dict[str, Any]]  # of run.yaml
    last: CheckpointCandidate | None  # the last complete one
    notes: tuple[str, ...]  # on checkpoints that can't be used
    result: Mapping[str, Any]  # the content of result.json; empty where it is missing or can't be used
    result_notes: tuple[str, ...]


def _read_history(run: Run) -> _History:
    directory = Path(run.directory)
    documents = read_attempts(directory)
    if not documents and run.checkpoint.path is not None:  # its directory is gone, or on another machine
        with contextlib.suppress(OSError):  # `select.find_latest` reports it
            text = open_remote(run.checkpoint.path, run.directory).read("run.yaml") or b""
            documents = parse_attempts(text.decode(errors="replace"), f"checkpoint.path={run.checkpoint.path}")
    last, notes = select.find_latest(directory, run.checkpoint.path, documents[-1]["run_id"] if documents else None)
    if last and not documents:
        raise ConfigError(
            f"hydra.run.dir={directory}: holds checkpoints, and no run.yaml that says of which run; bring it back, or "
            "choose another name (checkpoint.resume goes on from them there)."
        )
    sciences = {document["ids"]["science"] for document in documents}  # several, since more steps change it
    result, problem = read_result(directory, sciences) if documents else ({}, None)
    return _History(documents, last, notes, result, (problem,) if problem else ())


def use_previous_checkpoint(run: Run, attempt: Attempt, problem: str) -> Attempt:
    """Return the attempt that starts one checkpoint earlier, since the one that it names is corrupt, and record that.

    Raises:
        ConfigError: when there is none before it, or it is another run's.
    """
    damaged_path, directory = str(attempt.checkpoint), Path(run.directory)
    copies = open_remote(run.checkpoint.path, run.directory) if run.checkpoint.path else None
    folder = damaged_path.rpartition("/")[0]
    if folder == str(directory / "checkpoints"):
        manifest.mark_damaged(Path(damaged_path))
    elif copies is not None and folder == copies.url:
        try:
            copies.forget_step(attempt.step)
        except (OSError, CorruptCheckpointError) as error:
            raise ConfigError(
                f"checkpoint.path={run.checkpoint.path}: step-{attempt.step} there is damaged, and can't be set aside "
                f"({error}); fix this."
            ) from error
    else:  # of the run that this one was forked from
        raise ConfigError(
            f"checkpoint.resume={run.checkpoint.resume}: {damaged_path} is damaged: {problem}; give another one."
        )
    earlier = read_attempts(directory)
    last, more_notes = select.find_latest(directory, run.checkpoint.path, attempt.run_id)
    notes = (*attempt.notes, f"checkpoint {Path(damaged_path).name} is damaged and not used: {problem}")
    notes += tuple(note for note in more_notes if note not in notes and f" {Path(damaged_path).name} " not in note)
    if last and last.path == damaged_path:
        raise ConfigError(f"hydra.run.dir={directory}: {notes[-1]}, and can't be set aside; remove it or move it away.")
    _check_last(run, {}, last, notes)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
    checkpoint = last or find_parent(run, earlier, mix, has_checkpoint=False).checkpoint
    step, rows = count_work(run, mix, checkpoint)
    attempt = replace(attempt, checkpoint=checkpoint.path if checkpoint else None, step=step, rows=rows, notes=notes)
    *before, document = earlier
    try:
        write_attempts(directory, [*before, document | redact_nested({"from_step": step, "notes": list(notes)})])
    except OSError as error:
        raise build_write_error(directory, error) from error
    return attempt


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
            return write_attempts(directory, earlier)
        return
    if not manifest.list_complete(directory):
        clear_attempt(run)


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


def record_attempt(run: Run, attempt: Attempt, science: Mapping[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Write an attempt's document into run.yaml, after those of `earlier` attempts, and the files beside it."""
    directory = Path(run.directory)
    try:
        files = {name: hydra_private.dump_yaml(content) for name, content in run.hydra.items()}
        environment = {
            "code": identity.describe_code(run),
            "diff": identity.read_git_diff(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "host": socket.gethostname(),
            "device": asdict(run.machine),
        }
        document = _build_document(run, attempt, science)
        document, environment = redact_nested([document, environment])
        for name, text in (files | {ENVIRONMENT: json.dumps(environment, indent=1)}).items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_atomic(directory / name, text)
        # last: what fails before it leaves the run as it was
        write_attempts(directory, [*earlier, document])
    except OSError as error:
        if not earlier:
            clear_attempt(run)
        raise build_write_error(directory, error) from error


def _build_document(run: Run, attempt: Attempt, science: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "kind": attempt.kind,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": run.name,
        "parent": attempt.parent,
        "from_step": attempt.step,
        "notes": list(attempt.notes),
        "ids": asdict(attempt.ids),
        "overrides": list(run.overrides),
        "options": list(run.options),
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "expert": run.layout.expert,
        "microbatches": run.microbatches,
        "config": as_config(run),
        "science": dict(science),
        **({identity.OWN_CODE: digests} if (digests := identity.compute_code_digests(run)) else {}),
        **({evaluated.KEY: dict(attempt.evaluated)} if attempt.evaluated else {}),
        **({prediction.KEY: prediction.to_document(attempt.prediction)} if attempt.prediction else {}),
        **({certificate.KEY: found.summarize()} if (found := certificate.find(run)) else {}),
        "run_id": attempt.run_id,  # last, because it is required: a file that was cut lacks it
    }


def write_attempts(directory: Path, documents: list[dict[str, Any]]) -> None:
    """Replace run.yaml in one step, so that a kill leaves no half of it."""
    text = "".join("---\n" + yaml.safe_dump(document, sort_keys=False) for document in documents)
    write_atomic(directory / RUN, text, sync=True)


def clear_attempt(run: Run) -> None:
    """Remove what an attempt wrote that is not recorded."""
    directory = Path(run.directory)
    for name in (RUN, ENVIRONMENT):
        (directory / name).unlink(missing_ok=True)
    for name in ("log", "debug", "profile", *list_hydra_folders(run)):
        shutil.rmtree(directory / name, ignore_errors=True)


def check_same(
    run: Run, last: Mapping[str, Any], science: Mapping[str, Any], mix: RowMixture, saved: CheckpointCandidate | None
) -> None:
    """Raise ConfigError when the run's settings make it another experiment than its last attempt's.

    More steps are a continuation. So is what changes only the rows after those that the last checkpoint has read: a
    later stage of the mixture, rows to skip, a larger batch.
    """
    differ = _list_differing(last["science"], science)
    is_of_rows = all(k in ("dataset", "data", "training.grow") or k.startswith("dataset.") for k in differ)
    if saved is not None and is_of_rows and "dataset.mask_documents" not in differ:
        with contextlib.suppress(ConfigError):
            differ = [] if count_rows_read(run, mix, saved.manifest) > 0 else differ
    _reject_other(run, last, science, differ)


def check_same_without_data(run: Run, last: Mapping[str, Any]) -> None:
    """Raise ConfigError when settings that need neither data nor checkpoints show another experiment."""
    new = identity.select_settings(run, science=True)
    differ = [k for k in _list_differing(last["science"], new) if k != "training.grow"]
    _reject_other(run, last, new, [k for k in differ if k.split(".")[0] not in ("dataset", "data", "parent")])


def _list_differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    missing = object()
    differ = {k for k in old.keys() | new.keys() if old.get(k, missing) != new.get(k, missing)}
    return sorted(differ - {"training.steps"})


def _reject_other(run: Run, last: Mapping[str, Any], new: Mapping[str, Any], differ: list[str]) -> None:
    """Raise ConfigError that names the settings that differ, if any do, and for fewer steps than the last attempt's."""
    if differ:
        is_here = (Path(run.directory) / RUN).is_file() or run.checkpoint.path is None
        place = shorten_path(run.directory) if is_here else f"checkpoint.path={run.checkpoint.path}"
        last_values = {"model": get_kind(Llama), **flatten_config(last["config"]), **last["science"]}
        new_values = {"model": get_kind(Llama), **flatten_config(as_config(run)), **new}  # which ids leave out
        differences = "; ".join(
            f"{k} was {format_value(last_values.get(k))}, now {format_value(new_values.get(k))}" for k in differ
        )
        raise ConfigError(
            f"{place}: holds another experiment ({differences}); choose another name for this one, and "
            f"checkpoint.resume={shorten_path(run.directory)} if it is to begin where that one ended."
        )
    steps = int(last["config"]["training"]["steps"])
    if run.training.steps < steps:
        raise ConfigError(
            f"training.steps={run.training.steps}: the run in {run.directory} has {steps}; give {steps} or more."
        )
