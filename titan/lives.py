"""A run's directory and its lives: what the directory holds decides what a command does. Free of torch.

Nothing there: start. An unfinished run: resume it. A finished one: show its summary. More `training.steps`: continue.
Another science is refused with the settings that differ. `run.yaml` holds a document for each life.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from titan import identity
from titan.checkpoint import choose, manifest
from titan.checkpoint.choose import Candidate
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import of
from titan.dataset import corpora, order
from titan.dataset.mix import Mix
from titan.identity import Ids
from titan.run import Run, as_config, as_model
from titan.settings import Refusal, show

OURS = {".lock", ".hydra", "run.yaml", "env.json", "metrics.jsonl", "checkpoints", "result.json", "loss.png", "log"}
OURS |= {"profile", "debug", "tensorboard", "wandb", "save"}
NEEDED = ("life", "run_id", "ids", "science", "config")
"""What later lives want of a document in run.yaml."""


@dataclass(frozen=True)
class Life:
    """One execution of a run, between start or resume and its end.

    Attributes:
        number: 1 for the first.
        run_id: the same in all lives of a run.
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
class Finished:
    """The run in the directory has done all its steps."""

    directory: str
    result: Mapping[str, Any]


def begin(run: Run, progress: Callable[[str], None] | None = None) -> Life | Finished:
    """Prepare the data, decide what the directory means, and record the life that begins.

    Raises:
        Refusal: when the data can't be used, or the directory holds something else.
    """
    folders = corpora.ready(run.dataset, progress)
    mix = corpora.mixed(run.dataset, run.training, corpora.opened(folders))
    check_data(run, mix)
    directory = Path(run.directory)
    lives = read_lives(directory) or _lives_elsewhere(run)
    parent, fork = _parent(run, lives, mix)
    science = identity.science_of(run, corpora.data_digest(mix), parent)
    ids = identity.ids(run, science)
    last, notes = choose.newest(directory, run.checkpoint.path)
    if lives:
        _compare(run, lives[-1], science, mix, last)
        result = _result(directory)
        if result.get("finished") and result["step"] == run.training.steps:
            return Finished(run.directory, result)
        _check_last(run, result, last, notes)
        notes += _gone(lives[-1], result, last)
    found = last or fork or (_forked(run, parent) if parent and run.checkpoint.resume else None)
    life = _life(run, lives, ids, mix, folders, parent, found)
    life = replace(life, notes=notes)
    _record(run, life, science)
    return life


def without(run: Run, life: Life, wrong: str) -> Life:
    """The life that begins one checkpoint earlier, since the one that it named is damaged; run.yaml says so too.

    Args:
        run: the run.
        life: as it was to be.
        wrong: what is wrong with its checkpoint.

    Raises:
        Refusal: when there is none before it, or it is another run's.
    """
    damaged, directory = str(life.checkpoint), Path(run.directory)
    if not _own(run, damaged):
        raise Refusal(f"checkpoint.resume={run.checkpoint.resume}: {damaged} is damaged: {wrong}; give another one.")
    if run.checkpoint.path and damaged.startswith(of(run.checkpoint.path, run.directory).url):
        of(run.checkpoint.path, run.directory).forget(life.step)
    else:
        manifest.set_aside(Path(damaged))
    mix = corpora.mixed(run.dataset, run.training, corpora.opened(life.corpora, run.dataset))
    last, more = choose.newest(directory, run.checkpoint.path)
    notes = (*life.notes, f"checkpoint {Path(damaged).name} is damaged and not used: {wrong}", *more)
    _check_last(run, {}, last, notes)
    found = last or (_forked(run, life.parent) if life.parent and run.checkpoint.resume else None)
    step, rows = (found.about.step, _rows(run, mix, found.about)) if found else (0, 0)
    life = replace(life, checkpoint=found.path if found else None, step=step, rows=rows, notes=notes)
    _correct(directory, life)
    return life


def read_lives(directory: Path) -> list[dict[str, Any]]:
    """The documents of `run.yaml`, one a life; empty where no run began.

    Raises:
        Refusal: when the directory holds something that is no run.
    """
    file = directory / "run.yaml"
    if file.is_file():
        return _documents(file)
    others = sorted({p.name for p in directory.iterdir()} - OURS) if directory.is_dir() else []
    if others:
        raise Refusal(
            f"hydra.run.dir={directory}: holds no run, but other things ({', '.join(others[:3])}); "
            "choose another name or an empty directory."
        )
    return []


def _documents(file: Path) -> list[dict[str, Any]]:
    """What run.yaml holds.

    Raises:
        Refusal: when that is not what `_record` wrote.
    """
    try:
        documents = [document for document in yaml.safe_load_all(file.read_text()) if document]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(file, " ".join(str(error).split())[:100]) from error
    for number, document in enumerate(documents, 1):
        try:
            _ = [document[key] for key in NEEDED], document["config"]["training"]["steps"]
        except (KeyError, TypeError) as error:
            raise _unreadable(file, f"its document {number} is not complete") from error
    return documents


def _unreadable(file: Path, why: str) -> Refusal:
    return Refusal(
        f"hydra.run.dir={file.parent}: run.yaml can't be read ({why}); mend it, or choose another name to start again."
    )


def check_data(run: Run, mix: Mix) -> None:
    """Refuse data that the model or the batch can't use.

    Raises:
        Refusal: naming both sides.
    """
    for rows in mix.sources:
        corpus = rows.corpus
        if corpus.max_token >= run.model.vocab:
            raise Refusal(
                f"model.vocab={run.model.vocab}: the data has token ids up to {corpus.max_token} "
                f"(tokenizer {corpus.tokenizer['name']}); give model.vocab={corpus.vocab_size} or another tokenizer."
            )
        if corpus.complete and rows.split.rows(run.training.seq_len) < 1:
            raise Refusal(
                f"training.seq_len={run.training.seq_len}: the training data has only {rows.split.tokens} tokens, "
                "less than one row; give a smaller training.seq_len or more data."
            )
    corpora.check_epochs(run.dataset, run.training, mix)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run's directory, so that two jobs can't write to it; the lock ends with this process.

    Raises:
        Refusal: when another job holds it, or it can't be written to.
    """
    new = [f for f in (directory, *directory.parents) if not f.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("a+")
    except OSError as error:
        reason = error.strerror or str(error)
        raise Refusal(f"hydra.run.dir={directory}: can't be written to ({reason}); choose another place.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise Refusal(
                f"hydra.run.dir={directory}: {holder} is running in it; wait for it, or choose another name."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            if new and {p.name for p in directory.iterdir()} <= {".lock"}:
                _leave(new)


def _leave(folders: list[Path]) -> None:
    """Take away the folders, innermost first, that came with a run that was refused."""
    (folders[0] / ".lock").unlink()
    with contextlib.suppress(OSError):  # another run has come into one of them
        for folder in folders:
            folder.rmdir()


def _result(directory: Path) -> dict[str, Any]:
    file = directory / "result.json"
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _lives_elsewhere(run: Run) -> list[dict[str, Any]]:
    """The documents of a run whose directory is gone, or on another machine, from where its checkpoints are copied."""
    if run.checkpoint.path is None:
        return []
    with contextlib.suppress(OSError):  # `choose.newest` says so
        if text := of(run.checkpoint.path, run.directory).read("run.yaml"):
            (Path(run.directory) / "run.yaml").write_bytes(text)
    return read_lives(Path(run.directory))


def _parent(run: Run, lives: list[dict[str, Any]], mix: Mix) -> tuple[str | None, Candidate | None]:
    """What the run starts from, for its science, and its checkpoint; the first life's parent, when there was one."""
    resume, weights = run.checkpoint.resume, run.checkpoint.weights
    if resume and weights:
        raise Refusal(f"checkpoint.weights={weights}: checkpoint.resume={resume} brings its own; give one of the two.")
    if lives and lives[0].get("parent") and (resume or weights):
        return str(lives[0]["parent"]), None
    if weights:
        return _weights(run), None
    if not resume:
        return None, None
    found = choose.named(resume)
    manifest.check_resumable(found.about, resume)
    _check_model(run, found)
    _rows(run, mix, found.about)
    if found.about.step >= run.training.steps:
        raise Refusal(
            f"training.steps={run.training.steps}: the checkpoint to start from has done {found.about.step} steps "
            "already; give more steps."
        )
    return found.id, found


def _forked(run: Run, parent: str) -> Candidate:
    """The checkpoint that the fork started from, when it has none of its own yet; its run may have gone on since."""
    path, step = str(run.checkpoint.resume), parent.rpartition("@")[2]
    for place in (path, f"{path}/checkpoints/step-{step}", f"{path}/step-{step}"):
        with contextlib.suppress(Refusal):
            if (found := choose.named(place)).id == parent:
                return found
    raise Refusal(
        f"checkpoint.resume={path}: step {step}, which this fork started from, is not there any more, and the fork has "
        "no checkpoint of its own; choose another name for a new one."
    )


def _weights(run: Run) -> str:
    """The identity of the given weights, once it is sure that they fit the model."""
    from titan.checkpoint.models import check_model
    from titan.checkpoint.weights import digest_of, open_weights

    weights = open_weights(str(run.checkpoint.weights))
    check_model(run.model, weights.model, f"checkpoint.weights={run.checkpoint.weights}")
    return f"weights:{digest_of(weights)[:12]}"


def _check_model(run: Run, found: Candidate) -> None:
    """Refuse a checkpoint of another model, naming what differs."""
    here, there = as_model(run), found.about.model
    differ = sorted(k for k in here.keys() | there.keys() if here.get(k) != there.get(k))
    if differ:
        what = "; ".join(f"model.{k} is {show(there.get(k))} there and {show(here.get(k))} here" for k in differ)
        raise Refusal(
            f"checkpoint.resume={run.checkpoint.resume}: was saved with another model: {what}; give the same model."
        )


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
        raise Refusal(
            f"hydra.run.dir={run.directory}: {'; '.join(notes)}; and there is no other. Bring back a copy of one, or "
            "choose another name to start again."
        )
    if result.get("finished"):
        raise Refusal(
            f"training.steps={run.training.steps}: the run in {run.directory} is finished and has no checkpoint to "
            "continue from; choose another name."
        )


def _gone(before: Mapping[str, Any], result: Mapping[str, Any], last: Candidate | None) -> tuple[str, ...]:
    """What is to be said where a run had checkpoints and has none any more."""
    done = max(int(before.get("from_step", 0)), int(result.get("step", 0)) if result.get("checkpoint") else 0)
    return (f"there is no checkpoint any more of a run that had got to step {done}",) if done and last is None else ()


def _rows(run: Run, mix: Mix, saved: Manifest) -> int:
    """How many rows a checkpoint has read, when this run would have read the same ones.

    Raises:
        Refusal: when it would have read others.
    """
    rows = order.check_state(saved.data, mix.fingerprint)
    if rows != run.training.rows_before(saved.step + 1):
        raise Refusal(
            f"training.global_batch={run.training.global_batch}: the checkpoint read {rows} rows in {saved.step} "
            "steps; give the global_batch and grow that it was made with, up to there."
        )
    return rows


def _compare(run: Run, last: Mapping[str, Any], science: Mapping[str, Any], mix: Mix, saved: Candidate | None) -> None:
    """Refuse to go on with a run as another one.

    More steps are a continuation. So is what changes only the rows after those that the last checkpoint has read: a
    later stage of the mixture, rows to skip, a larger batch.
    """
    old, new = dict(last["science"]), dict(science)
    steps, wanted = int(last["config"]["training"]["steps"]), run.training.steps
    old.pop("training.steps", None)
    new.pop("training.steps", None)
    differ = sorted(k for k in old.keys() | new.keys() if old.get(k, _DEFAULT) != new.get(k, _DEFAULT))
    if differ and not (saved and _later(run, differ, mix, saved.about)):
        before, now = {**_flat(last["config"]), **old}, {**_flat(as_config(run)), **new}
        what = "; ".join(f"{k} was {show(before.get(k))}, now {show(now.get(k))}" for k in differ)
        raise Refusal(
            f"hydra.run.dir={run.directory}: holds another experiment ({what}); choose another name for this one."
        )
    if wanted < steps:
        raise Refusal(f"training.steps={wanted}: the run in {run.directory} has {steps}; give {steps} or more.")


def _later(run: Run, differ: list[str], mix: Mix, saved: Manifest) -> bool:
    """Whether what differs concerns rows only that the last checkpoint has not read."""
    order_only = [k for k in differ if k in ("dataset", "data", "training.grow") or k.startswith("dataset.")]
    if order_only != differ or "dataset.mask_documents" in differ:
        return False
    try:
        return _rows(run, mix, saved) > 0
    except Refusal:
        return False


_DEFAULT = object()


def _flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested configuration by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return flat


def _life(
    run: Run,
    lives: list[dict[str, Any]],
    ids: Ids,
    mix: Mix,
    folders: corpora.Folders,
    parent: str | None,
    found: Candidate | None,
) -> Life:
    step, rows = (found.about.step, _rows(run, mix, found.about)) if found else (0, 0)
    more = bool(lives) and ids.science != lives[-1]["ids"]["science"]
    kind = "continuation" if more else "resume" if lives else "fork" if found else "start"
    run_id = lives[0]["run_id"] if lives else uuid.uuid4().hex[:12]
    path, weights = (found.path, None) if found else (None, run.checkpoint.weights)
    return Life(len(lives) + 1, run_id, ids, folders, path, step, rows, kind, parent, weights)


def _record(run: Run, life: Life, science: Mapping[str, Any]) -> None:
    """Write what this life is: a document in run.yaml, Hydra's own files, the environment."""
    directory = Path(run.directory)
    document = {
        "life": life.number,
        "kind": life.kind,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "name": run.name,
        "run_id": life.run_id,
        "parent": life.parent,
        "from_step": life.step,
        "notes": list(life.notes),
        "ids": asdict(life.ids),
        "overrides": list(run.overrides),
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "microbatches": run.microbatches,
        "science": dict(science),
        "config": as_config(run),
    }
    _write(directory, [*read_lives(directory), document])
    (directory / ".hydra").mkdir(exist_ok=True)
    for name, text in run.hydra.items():
        (directory / ".hydra" / name).write_text(text)
    (directory / "env.json").write_text(json.dumps(_environment(run), indent=1))


def _correct(directory: Path, life: Life) -> None:
    """Let the last document of run.yaml say where the life really begins."""
    *earlier, document = read_lives(directory)
    _write(directory, [*earlier, document | {"from_step": life.step, "notes": list(life.notes)}])


def _write(directory: Path, documents: list[dict[str, Any]]) -> None:
    """Replace run.yaml; at once, so that a kill leaves no half of it."""
    temporary = directory / ".run.yaml"
    temporary.write_text("".join("---\n" + yaml.safe_dump(d, sort_keys=False) for d in documents))
    temporary.rename(directory / "run.yaml")


def _environment(run: Run) -> dict[str, Any]:
    return {
        "code": identity.code(),
        "diff": identity.git_diff(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": asdict(run.machine),
    }
