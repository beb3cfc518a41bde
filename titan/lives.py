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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from titan import identity
from titan.checkpoint import manifest
from titan.dataset import corpora, order
from titan.dataset.mix import Mix
from titan.identity import Ids
from titan.run import Run, as_config
from titan.settings import Refusal, show

OURS = {".lock", ".hydra", "run.yaml", "env.json", "metrics.jsonl", "checkpoints", "result.json", "loss.png", "log"}
OURS |= {"profile", "debug", "tensorboard", "wandb"}


@dataclass(frozen=True)
class Life:
    """One execution of a run, between start or resume and its end.

    Attributes:
        number: 1 for the first.
        run_id: the same in all lives of a run.
        ids: what identifies science, execution and code.
        corpora: the folder of each prepared corpus, by name.
        checkpoint: where to resume from; None to start from the seed.
        step: updates done in it; 0 at the start.
        rows: rows of the data read in it; 0 at the start.
        kind: "start", "resume", "continuation" or "fork".
        parent: "science_id@step" of the checkpoint that a fork came from.
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
    lives = read_lives(directory)
    parent, fork = _parent(run, lives, mix)
    science = identity.science_of(run, corpora.data_digest(mix), parent)
    ids = identity.ids(run, science)
    last = lives[-1] if lives else None
    if last:
        _compare(run, last, science, mix)
        result = _result(directory)
        if result.get("finished") and result["step"] == run.training.steps:
            return Finished(run.directory, result)
    life = _life(run, lives, ids, mix, folders, parent, fork)
    _record(run, life, science)
    return life


def read_lives(directory: Path) -> list[dict[str, Any]]:
    """The documents of `run.yaml`, one a life; empty where no run began.

    Raises:
        Refusal: when the directory holds something that is no run.
    """
    file = directory / "run.yaml"
    if file.is_file():
        return [document for document in yaml.safe_load_all(file.read_text()) if document]
    others = sorted({p.name for p in directory.iterdir()} - OURS) if directory.is_dir() else []
    if others:
        raise Refusal(
            f"hydra.run.dir={directory}: holds no run, but other things ({', '.join(others[:3])}); "
            "choose another name or an empty directory."
        )
    return []


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


def _parent(run: Run, lives: list[dict[str, Any]], mix: Mix) -> tuple[str | None, Path | None]:
    """The fork's parent, as "science_id@step", and its checkpoint; the first life's, when there was one."""
    if not run.checkpoint.resume:
        return None, None
    if lives and lives[0].get("parent"):
        return str(lives[0]["parent"]), None
    folder = manifest.find(run.checkpoint.resume)
    found = manifest.read(folder)
    if found is None:
        raise Refusal(f"checkpoint.resume={run.checkpoint.resume}: the checkpoint is damaged; give another one.")
    _rows(run, mix, found)
    if found.step >= run.training.steps:
        raise Refusal(
            f"training.steps={run.training.steps}: the checkpoint to start from has done {found.step} steps already; "
            "give more steps."
        )
    return f"{found.science_id}@{found.step}", folder


def _rows(run: Run, mix: Mix, saved: manifest.Manifest) -> int:
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


def _compare(run: Run, last: Mapping[str, Any], science: Mapping[str, Any], mix: Mix) -> None:
    """Refuse to go on with a run as another one.

    More steps are a continuation. So is what changes only the rows after those that the last checkpoint has read: a
    later stage of the mixture, rows to skip, a larger batch.
    """
    old, new = dict(last["science"]), dict(science)
    steps, wanted = int(last["config"]["training"]["steps"]), run.training.steps
    old.pop("training.steps", None)
    new.pop("training.steps", None)
    differ = sorted(k for k in old.keys() | new.keys() if old.get(k, _DEFAULT) != new.get(k, _DEFAULT))
    if differ and not _later(run, differ, mix):
        before, now = {**_flat(last["config"]), **old}, {**_flat(as_config(run)), **new}
        what = "; ".join(f"{k} was {show(before.get(k))}, now {show(now.get(k))}" for k in differ)
        raise Refusal(
            f"hydra.run.dir={run.directory}: holds another experiment ({what}); choose another name for this one."
        )
    if wanted < steps:
        raise Refusal(f"training.steps={wanted}: the run in {run.directory} has {steps}; give {steps} or more.")


def _later(run: Run, differ: list[str], mix: Mix) -> bool:
    """Whether what differs concerns rows only that the last checkpoint has not read."""
    order_only = [k for k in differ if k in ("dataset", "data", "training.grow") or k.startswith("dataset.")]
    found = manifest.complete(Path(run.directory))
    saved = manifest.read(found[-1]) if found else None
    if order_only != differ or "dataset.mask_documents" in differ or saved is None:
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
    fork: Path | None,
) -> Life:
    found = manifest.complete(Path(run.directory))
    checkpoint = found[-1] if found else fork
    content = manifest.read(checkpoint) if checkpoint else None
    step, rows = (content.step, _rows(run, mix, content)) if content else (0, 0)
    if _result(Path(run.directory)).get("finished") and not found:
        raise Refusal(
            f"training.steps={run.training.steps}: the run in {run.directory} is finished and has no checkpoint to "
            "continue from; choose another name."
        )
    more = bool(lives) and ids.science != lives[-1]["ids"]["science"]
    kind = "continuation" if more else "resume" if lives else "fork" if fork else "start"
    run_id = lives[0]["run_id"] if lives else uuid.uuid4().hex[:12]
    path = str(checkpoint) if checkpoint else None
    return Life(len(lives) + 1, run_id, ids, folders, path, step, rows, kind, parent)


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
        "ids": asdict(life.ids),
        "overrides": list(run.overrides),
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "microbatches": run.microbatches,
        "science": dict(science),
        "config": as_config(run),
    }
    with (directory / "run.yaml").open("a") as out:
        out.write("---\n" + yaml.safe_dump(document, sort_keys=False))
    (directory / ".hydra").mkdir(exist_ok=True)
    for name, text in run.hydra.items():
        (directory / ".hydra" / name).write_text(text)
    (directory / "env.json").write_text(json.dumps(_environment(run), indent=1))


def _environment(run: Run) -> dict[str, Any]:
    return {
        "code": identity.code(),
        "diff": identity.git_diff(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": asdict(run.machine),
    }
