"""A run's directory and its attempts: what the directory holds decides what a command does. Free of torch.

Nothing there: start. An unfinished run: resume it. A finished one: show its summary. More `training.steps`: continue.
Another science is refused with the settings that differ. `run.yaml` holds a document for each attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import Damaged, Manifest
from titan.checkpoint.remote import Remote, of
from titan.checkpoint.select import Candidate
from titan.config.settings import show
from titan.console.text import redacted
from titan.dataset import corpora
from titan.dataset.mixture import RowMixture
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.former import renamed
from titan.run import identity
from titan.run.identity import Ids
from titan.run.lineage import Parent, parent, rows_read
from titan.run.lock import _unwritable
from titan.run.paths import FILES
from titan.run.result import is_locked, read_result
from titan.run.run import Run, as_config

NEEDED: dict[str, Any] = {
    "attempt": int, "run_id": str, "ids": dict[str, Any], "science": dict[str, Any], "config": dict[str, Any],
}  # fmt: skip
"""What later attempts want of a document in run.yaml, by the types of the values."""
_MORE: dict[str, Any] = {
    "parent": str | None, "from_step": int | None, "notes": list[str] | None, "overrides": list[str] | None,
    "choices": dict[str, Any] | None, "layout": dict[str, int] | None, "kind": str | None, "name": str | None,
}  # fmt: skip
"""What a document may lack."""


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
        kind: "start", "resume", "continuation" or "fork".
        parent: "science_id@step" of the checkpoint that a fork came from, or "weights:digest" of given weights.
        weights: where the weights are that it starts from, in place of those of the seed.
        notes: what is to be said of it: checkpoints that can't be used, for example.
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


@dataclass(frozen=True)
class FinishedRun:
    """The run in the directory has done all its steps."""

    directory: str
    result: Mapping[str, Any]


def begin_attempt(run: Run, progress: Callable[[str], None] | None = None) -> Attempt | FinishedRun:
    """Prepare the data, decide what the directory means, and record the attempt that begins.

    Raises:
        ConfigError: when the data can't be used, or the directory holds something else.
    """
    folders = corpora.prepare_corpora(run.dataset, progress)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(folders))
    check_data(run, mix)
    directory = Path(run.directory)
    attempts = read_attempts(directory) or _attempts_elsewhere(run)
    last, notes = select.latest(directory, run.checkpoint.path, attempts[-1]["run_id"] if attempts else None)
    if last and not attempts:
        raise ConfigError(
            f"hydra.run.dir={directory}: holds checkpoints, and no run.yaml that says of which run; bring it back, or "
            "choose another name (checkpoint.resume goes on from them there)."
        )
    begins = parent(run, attempts, mix, own=last is not None)
    science = identity.science_of(run, corpora.data_digest(mix), begins.id)
    if attempts:
        _check_same_experiment(run, attempts[-1], science, mix, last)
        result, wrong = read_result(directory, _sciences(attempts))
        done = result.get("finished") and result["step"] == run.training.steps
        if done and not (last and select.post_save_pending(run.checkpoint, directory, last.about.step)):
            return FinishedRun(run.directory, result)
        _check_last(run, result, last, notes)
        notes += (*_missing_steps(attempts[-1], result, last), *([wrong] if wrong else []))
    attempt = replace(_attempt(run, attempts, identity.ids(run, science), mix, folders, begins, last), notes=notes)
    _record(run, attempt, science, attempts)
    return attempt


def use_previous_checkpoint(run: Run, attempt: Attempt, wrong: str) -> Attempt:
    """The attempt that begins one checkpoint earlier, since the one that it named is damaged; run.yaml says so too.

    Args:
        run: the run.
        attempt: as it was to be.
        wrong: what is wrong with its checkpoint.

    Raises:
        ConfigError: when there is none before it, or it is another run's.
    """
    damaged, directory = str(attempt.checkpoint), Path(run.directory)
    if not _own(run, damaged):
        raise ConfigError(
            f"checkpoint.resume={run.checkpoint.resume}: {damaged} is damaged: {wrong}; give another one."
        )
    if run.checkpoint.path and damaged.startswith(of(run.checkpoint.path, run.directory).url):
        _forget(of(run.checkpoint.path, run.directory), attempt.step, f"checkpoint.path={run.checkpoint.path}")
    else:
        manifest.set_aside(Path(damaged))
    attempts = read_attempts(directory)
    last, more = select.latest(directory, run.checkpoint.path, attempt.run_id)
    notes = (*attempt.notes, f"checkpoint {Path(damaged).name} is damaged and not used: {wrong}")
    notes += tuple(note for note in more if note not in notes and f" {Path(damaged).name} " not in note)
    if last and last.path == damaged:
        raise ConfigError(f"hydra.run.dir={directory}: {notes[-1]}, and can't be set aside; remove it or move it away.")
    _check_last(run, {}, last, notes)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(attempt.corpora, run.dataset))
    found = last or parent(run, attempts, mix, own=False).checkpoint
    step, rows = (found.about.step, rows_read(run, mix, found.about)) if found else (0, 0)
    attempt = replace(attempt, checkpoint=found.path if found else None, step=step, rows=rows, notes=notes)
    _correct(directory, attempt)
    return attempt


def _forget(copies: Remote, step: int, setting: str) -> None:
    """Let a damaged copy elsewhere count no more."""
    try:
        copies.forget(step)
    except (OSError, Damaged) as error:
        raise ConfigError(
            f"{setting}: step-{step} there is damaged, and can't be set aside ({error}); mend that."
        ) from error


def withdraw_attempt(run: Run, attempt: Attempt) -> None:
    """Take back an attempt that was refused before its first step, so that the same name may be used otherwise."""
    directory = Path(run.directory)
    earlier = [document for document in read_attempts(directory) if document["attempt"] != attempt.number]
    if _has_records(directory, attempt):
        return
    if earlier:
        with contextlib.suppress(OSError):  # on a full disk it stays
            return _write(directory, earlier)
        return
    _clear(run)


def _has_records(directory: Path, attempt: Attempt) -> bool:
    """Whether the metrics end with something of an attempt, so that it was more than a beginning."""
    try:
        metrics = (directory / "metrics.jsonl").read_bytes().rstrip()
        return any(metrics.endswith(b'"%s": %d}' % (name, attempt.number)) for name in (b"attempt", b"life"))
    except OSError:
        return False


def read_attempts(directory: Path) -> list[dict[str, Any]]:
    """The documents of `run.yaml`, one an attempt; empty where no run began.

    Raises:
        ConfigError: when the directory holds something that is no run.
    """
    file = directory / "run.yaml"
    if file.is_file():
        try:
            return _documents(untrusted.read(file).decode(errors="replace"), f"hydra.run.dir={directory}")
        except OSError as error:
            raise _unreadable(f"hydra.run.dir={directory}", error.strerror or str(error)) from error
    others = sorted({p.name for p in directory.iterdir()} - FILES) if directory.is_dir() else []
    if others:
        raise ConfigError(
            f"hydra.run.dir={directory}: holds no run, but other things ({', '.join(others[:3])}); "
            "choose another name or an empty directory."
        )
    return []


def _documents(text: str, label: str) -> list[dict[str, Any]]:
    """What run.yaml holds.

    Raises:
        ConfigError: when that is not what `_record` wrote.
    """
    try:
        documents = [renamed(document) for document in untrusted.parse_yaml(text) if document]
    except ValueError as error:
        raise _unreadable(label, " ".join(str(error).split())[:100]) from error
    for number, document in enumerate(documents, 1):
        try:
            _check_document(document, documents[0])
        except KeyError as error:
            raise _unreadable(label, f"its document {number} is not complete: it has no {error}") from error
        except ValueError as error:
            raise _unreadable(label, f"its document {number} is not complete: {error}") from error
    return documents


def _check_document(document: Any, first: Any) -> None:
    """Compare a document of run.yaml with what `_record` writes.

    Raises:
        ValueError, KeyError: naming what is missing, of another type, or another run's.
    """
    untrusted.check(document, dict[str, Any], "it")
    for name, kind in NEEDED.items():
        untrusted.check(document[name], kind, name)
    for name, kind in _MORE.items():
        untrusted.check(document.get(name), kind, name)
    untrusted.check(document["ids"]["science"], str, "ids.science")
    training = document["config"]["training"]
    untrusted.check(training, dict[str, Any], "config.training")
    for name in ("steps", "seed", "repeat", "seq_len", "global_batch"):
        untrusted.check(training[name] if name == "steps" else training.get(name, 0), int, f"config.training.{name}")
    if document["run_id"] != first["run_id"]:
        raise ValueError(f"it is of another run, {untrusted.shown(document['run_id'])}")


def _unreadable(label: str, why: str) -> ConfigError:
    return ConfigError(f"{label}: run.yaml can't be read ({why}); mend it, or choose another name to start again.")


def check_data(run: Run, mix: RowMixture) -> None:
    """Refuse data that the model or the batch can't use.

    Raises:
        ConfigError: naming both sides.
    """
    for rows in mix.sources:
        corpus = rows.corpus
        if corpus.max_token >= run.model.vocab:
            raise ConfigError(
                f"model.vocab={run.model.vocab}: the data has token ids up to {corpus.max_token} "
                f"(tokenizer {corpus.tokenizer['name']}); give model.vocab={corpus.vocab_size} or another tokenizer."
            )
        if corpus.complete and rows.split.rows(run.training.seq_len) < 1:
            raise ConfigError(
                f"training.seq_len={run.training.seq_len}: the training data has only {rows.split.tokens} tokens, "
                "less than one row; give a smaller training.seq_len or more data."
            )
    corpora.check_epochs(run.dataset, run.training, mix)


def check_directory(run: Run, own_job: bool) -> None:
    """Before a run is handed to a scheduler: refuse what its directory shows, without its data, to be another's.

    Args:
        run: the run.
        own_job: it was handed over before, so that the process in its directory may be its own.

    Raises:
        ConfigError: when it holds no run, another experiment, one with more steps, or a process is running in it.
    """
    before = read_attempts(Path(run.directory))
    if not own_job and is_locked(Path(run.directory)):
        raise ConfigError(
            f"hydra.run.dir={run.directory}: a process is running in it; wait for it, or choose another name."
        )
    if before:
        science = {k: v for k, v in identity.settings_of(run, science=True).items() if not _of_data(k)}
        old = {k: v for k, v in before[-1]["science"].items() if not _of_data(k)}
        _reject_other(
            run, before[-1], science, sorted(k for k in old.keys() | science.keys() if _differ(k, old, science))
        )
        _reject_fewer_steps(run, int(before[-1]["config"]["training"]["steps"]))


def _of_data(key: str) -> bool:
    """Whether a science setting can be judged only with the data and checkpoints at hand."""
    return key.split(".")[0] in ("dataset", "data", "parent") or key == "training.grow"


def _differ(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return key != "training.steps" and old.get(key, _DEFAULT) != new.get(key, _DEFAULT)


def finished_run(run: Run) -> FinishedRun:
    """What the finished run in a directory came to."""
    return FinishedRun(run.directory, read_result(Path(run.directory))[0])


def _sciences(attempts: list[dict[str, Any]]) -> set[str]:
    """The ids of what a run has learned: more steps change them."""
    return {document["ids"]["science"] for document in attempts}


def _attempts_elsewhere(run: Run) -> list[dict[str, Any]]:
    """The documents of a run whose directory is gone, or on another machine, from where its checkpoints are copied."""
    if run.checkpoint.path is None:
        return []
    place = of(run.checkpoint.path, run.directory)
    try:
        text = place.read("run.yaml")
    except OSError:  # `choose.newest` says so
        return []
    return _documents(text.decode(errors="replace"), f"checkpoint.path={run.checkpoint.path}") if text else []


def _own(run: Run, checkpoint: str) -> bool:
    """Whether a checkpoint is the run's, not the one of which it is a fork."""
    own = [str(Path(run.directory) / "checkpoints")]
    if run.checkpoint.path:
        own.append(of(run.checkpoint.path, run.directory).url)
    return checkpoint.rpartition("/")[0] in own


def _check_last(run: Run, result: Mapping[str, Any], last: Candidate | None, notes: tuple[str, ...]) -> None:
    """Refuse to begin anew where a run has got further, but nothing of it can be used."""
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


def _missing_steps(before: Mapping[str, Any], result: Mapping[str, Any], last: Candidate | None) -> tuple[str, ...]:
    """What is to be said where a run had checkpoints and has none any more."""
    done = max(int(before.get("from_step", 0)), int(result.get("step", 0)) if result.get("checkpoint") else 0)
    return (f"there is no checkpoint any more of a run that had got to step {done}",) if done and last is None else ()


def _check_same_experiment(
    run: Run, last: Mapping[str, Any], science: Mapping[str, Any], mix: RowMixture, saved: Candidate | None
) -> None:
    """Refuse to go on with a run as another one.

    More steps are a continuation. So is what changes only the rows after those that the last checkpoint has read: a
    later stage of the mixture, rows to skip, a larger batch.
    """
    old, new = dict(last["science"]), dict(science)
    differ = sorted(k for k in old.keys() | new.keys() if _differ(k, old, new))
    if differ and not (saved and _later(run, differ, mix, saved.about)):
        _reject_other(run, last, new, differ)
    _reject_fewer_steps(run, int(last["config"]["training"]["steps"]))


def _reject_other(run: Run, last: Mapping[str, Any], new: Mapping[str, Any], differ: list[str]) -> None:
    """Refuse another experiment, naming the settings that differ, where there are any."""
    if differ:
        before, now = {**flat(last["config"]), **last["science"]}, {**flat(as_config(run)), **new}
        what = "; ".join(f"{k} was {show(before.get(k))}, now {show(now.get(k))}" for k in differ)
        raise ConfigError(f"{_place(run)}: holds another experiment ({what}); choose another name for this one.")


def _reject_fewer_steps(run: Run, steps: int) -> None:
    """Refuse fewer steps than the run was to do before."""
    if run.training.steps < steps:
        raise ConfigError(
            f"training.steps={run.training.steps}: the run in {run.directory} has {steps}; give {steps} or more."
        )


def _place(run: Run) -> str:
    """The setting that names what holds the run."""
    if (Path(run.directory) / "run.yaml").is_file() or run.checkpoint.path is None:
        return f"hydra.run.dir={run.directory}"
    return f"checkpoint.path={run.checkpoint.path}"


def _later(run: Run, differ: list[str], mix: RowMixture, saved: Manifest) -> bool:
    """Whether what differs concerns rows only that the last checkpoint has not read."""
    order_only = [k for k in differ if k in ("dataset", "data", "training.grow") or k.startswith("dataset.")]
    if order_only != differ or "dataset.mask_documents" in differ:
        return False
    try:
        return rows_read(run, mix, saved) > 0
    except ConfigError:
        return False


_DEFAULT = object()


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested configuration by dotted names."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def _attempt(
    run: Run,
    attempts: list[dict[str, Any]],
    ids: Ids,
    mix: RowMixture,
    folders: corpora.Folders,
    begins: Parent,
    last: Candidate | None,
) -> Attempt:
    found = last or begins.checkpoint
    step, rows = (found.about.step, rows_read(run, mix, found.about)) if found else (0, 0)
    more = bool(attempts) and ids.science != attempts[-1]["ids"]["science"]
    kind = "continuation" if more else "resume" if attempts else "fork" if found else "start"
    run_id = attempts[0]["run_id"] if attempts else uuid.uuid4().hex[:12]
    path, weights = (found.path, None) if found else (None, begins.weights)
    return Attempt(len(attempts) + 1, run_id, ids, folders, path, step, rows, kind, begins.id, weights)


def _record(run: Run, attempt: Attempt, science: Mapping[str, Any], attempts: list[dict[str, Any]]) -> None:
    """Write what this attempt is: a document in run.yaml, Hydra's own files, the environment."""
    directory = Path(run.directory)
    document = {
        "attempt": attempt.number,
        "kind": attempt.kind,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": run.name,
        "run_id": attempt.run_id,
        "parent": attempt.parent,
        "from_step": attempt.step,
        "notes": list(attempt.notes),
        "ids": asdict(attempt.ids),
        "overrides": list(run.overrides),
        "options": list(run.options),
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "microbatches": run.microbatches,
        "science": dict(science),
        "config": as_config(run),
    }
    try:
        for name, text in run.hydra.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text)
        (directory / "env.json").write_text(json.dumps(redacted(_environment(run)), indent=1))
        _write(directory, [*attempts, redacted(document)])  # last: what fails before it leaves the run as it was
    except OSError as error:
        if not attempts:
            _clear(run)
        raise _unwritable(directory, error) from error


def _clear(run: Run) -> None:
    """Remove what an attempt left that was not recorded."""
    directory = Path(run.directory)
    for name in ("run.yaml", "env.json"):
        (directory / name).unlink(missing_ok=True)
    for name in ("log", *{file.partition("/")[0] for file in run.hydra}):
        shutil.rmtree(directory / name, ignore_errors=True)


def _correct(directory: Path, attempt: Attempt) -> None:
    """Let the last document of run.yaml say where the attempt really begins."""
    *earlier, document = read_attempts(directory)
    changed = redacted({"from_step": attempt.step, "notes": list(attempt.notes)})
    try:
        _write(directory, [*earlier, document | changed])
    except OSError as error:
        raise _unwritable(directory, error) from error


def _write(directory: Path, documents: list[dict[str, Any]]) -> None:
    """Replace run.yaml; at once, so that a kill leaves no half of it."""
    temporary = directory / ".run.yaml"
    temporary.unlink(missing_ok=True)  # a link would lead elsewhere
    try:
        with temporary.open("x") as out:
            out.write("".join("---\n" + yaml.safe_dump(d, sort_keys=False) for d in documents))
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(directory / "run.yaml")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _environment(run: Run) -> dict[str, Any]:
    return {
        "code": identity.code(),
        "diff": identity.git_diff(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": asdict(run.machine),
    }
