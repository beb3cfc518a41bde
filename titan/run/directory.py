"""Lock a run's directory, and read its files: run.yaml and result.json. Free of torch.

Whatever is in them is compared with the types that titan writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from titan.errors import ConfigError
from titan.files import locks, untrusted
from titan.files.run_directory import BEGUN, RUN, foreign_files, is_written
from titan.files.untrusted import truncate_text
from titan.run import trust
from titan.run.axes import find_unknown_setting
from titan.run.run import Run, as_config
from titan.run.schema import Recipe

RESULT, ENVIRONMENT, LOCK = "result.json", "env.json", ".lock"
"""Names in a run's directory."""

_REQUIRED: dict[str, Any] = {
    "attempt": int, "run_id": str, "overrides": list[str], "ids": dict[str, str], "ids.science": str,
    "science": dict[str, Any], "config": dict[str, Any], "config.training": dict[str, Any],
    "config.training.steps": int,
}  # fmt: skip
"""What later attempts need of a document in run.yaml, by the types of the values."""
_OPTIONAL: dict[str, Any] = {
    "parent": str | None, "from_step": int, "notes": list[str], "options": list[str],
    "choices": dict[str, Any], "layout": dict[str, int], "kind": str | None, "name": str | None,
    "own_code": dict[str, str], "evaluated": dict[str, str], "microbatches": int, "expert": int, "began": str,
    **{f"science.{axis}": str for axis in Recipe.axes()},
    **{f"config.{axis}": dict[str, Any] for axis in (*Recipe.axes(), "hooks")},
    **{f"config.training.{name}": int for name in ("seed", "repeat", "seq_len", "global_batch")},
    "config.precision.compute": str, "config.compile.scope": str, "config.cluster.device": str,
    "config.optimizer.lr": float, **{f"config.checkpoint.{name}": str | None for name in ("path", "resume", "weights")},
}  # fmt: skip
"""What else is read of it."""
_RESULT: dict[str, Any] = {
    **dict.fromkeys(("tokens", "attempt"), int),
    **dict.fromkeys(("first_loss", "last_loss", "validation_loss", "bits_per_byte", "mfu", "seconds"), float | None),
    **dict.fromkeys(("evaluation", "ema"), float | None),
    **dict.fromkeys(("tokens_per_second", "data_wait", "memory_gib", "checkpoint_stall_seconds"), float | None),
    **dict.fromkeys(("checkpoint", "plot"), str | None),
    "science_id": str,
    "ended_by": dict[str, str],
    "sample": dict[str, str] | None,
}
"""The optional values of result.json by their types; names go up to a slash."""


def read_attempts(directory: Path) -> list[dict[str, Any]]:
    """Return the documents of `run.yaml`, one per attempt; empty where no run has started.

    Raises:
        ConfigError: when the directory holds something that is no run.
    """
    file = directory / RUN
    if file.is_file():
        try:
            text = untrusted.read_regular_file(file).decode(errors="replace")
            return parse_attempts(text, f"hydra.run.dir={directory}", directory)
        except OSError as error:
            raise _build_read_error(f"hydra.run.dir={directory}", error.strerror or str(error)) from error
    foreign = foreign_files(p.name for p in directory.iterdir()) if directory.is_dir() else []
    if foreign:
        raise ConfigError(
            f"hydra.run.dir={directory}: holds no run, but other things ({', '.join(foreign[:3])}); "
            "choose another name or an empty directory."
        )
    return []


def parse_attempts(text: str, label: str, directory: Path | None = None) -> list[dict[str, Any]]:
    """Return the documents in the text of a run.yaml.

    Args:
        directory: the run's, whose env.json names the commit that wrote it; None where there is none.

    Raises:
        ConfigError: when it is not what `titan.run.attempts` writes, or another commit of titan wrote it.
    """
    try:
        documents = [document for document in untrusted.parse_yaml(text) if document]
    except ValueError as error:
        raise _build_read_error(label, " ".join(str(error).split())[:100]) from error
    if text and not text.endswith("\n"):
        raise _build_read_error(label, "its end is missing")
    for number, document in enumerate(documents, 1):
        try:
            untrusted.check_type(document, dict[str, Any], "it")
            for path, kind in (_REQUIRED | _OPTIONAL).items():
                *folders, name = path.split(".")
                values = document
                for folder in folders:
                    values = values.get(folder, {})
                if name in values or path in _REQUIRED:
                    untrusted.check_type(values[name], kind, path)
            if document["run_id"] != documents[0]["run_id"]:
                raise ValueError(f"it is of another run, {untrusted.describe_value(document['run_id'])}")
        except KeyError as error:
            if "run_id" in document:  # the last key: nothing was cut
                raise _build_commit_error(label, f"it has no {error}", directory) from error
            raise _build_read_error(label, f"its document {number} is not complete: it has no {error}") from error
        except ValueError as error:
            raise _build_read_error(label, f"its document {number} is not complete: {error}") from error
        if unknown_setting := find_unknown_setting(document["config"], document["science"]):
            raise _build_commit_error(label, f"it has a setting {unknown_setting}", directory)
    return documents


def _build_read_error(label: str, reason: str) -> ConfigError:
    return ConfigError(f"{label}: run.yaml can't be read ({reason}); repair it, or choose another name to start again.")


def _build_commit_error(label: str, difference: str, directory: Path | None) -> ConfigError:
    reader = "the commit that wrote it"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if directory is not None:
            code = untrusted.read_object(directory / ENVIRONMENT)["code"]
            if re.fullmatch(r"[0-9a-f]{40,64}", code["commit"]):
                reader = f"commit {code['commit'][:12]}{' and the diff in env.json' if code['diff'] else ''}"
    return ConfigError(
        f"{label}: another commit of titan wrote run.yaml ({difference}); read it with {reader}, or choose another "
        "name to start again."
    )


def is_finished(directory: Path, steps: int = 0) -> bool:
    """Return whether the run in a directory has done all its steps, and at least so many."""
    result, _ = read_result(directory)
    return bool(result.get("finished")) and int(result["step"]) >= steps


def describe_hook_end(result: Mapping[str, Any]) -> str | None:
    """Return which hook ended the run of a `result.json` before its last step, and why; None where none did."""
    hook_end = result.get("ended_by")
    if not hook_end or result.get("finished"):
        return None
    return f"hooks.{hook_end.get('hook')}: {hook_end.get('reason')}"


def read_result(directory: Path, sciences: Collection[str] = ()) -> tuple[dict[str, Any], str | None]:
    """Return the content of a run's `result.json`, empty where there is none; and what is wrong with it, if anything.

    Args:
        sciences: the science ids that the run has had, if known: a result with another one is another run's.
    """
    try:
        content = untrusted.read_object(directory / RESULT, {"finished": bool, "step": int})
        for name, value in content.items():
            untrusted.check_type(value, _RESULT.get(name.partition("/")[0], Any), name)
    except FileNotFoundError:
        return {}, None
    except (OSError, ValueError, KeyError) as error:
        lacks = f"it has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        return {}, f"result.json is damaged and not used: {lacks}"
    if sciences and content.get("science_id", "") not in {*sciences, ""}:
        return {}, f"result.json is of another run ({untrusted.describe_value(content['science_id'])}) and not used"
    return content, None


def list_hydra_folders(run: Run) -> set[str]:
    """Return the names of the folders of Hydra's own files in a run's directory: `hydra.output_subdir`."""
    return {file.partition("/")[0] for file in run.hydra}


def is_locked(directory: Path) -> bool:
    """Return whether a process of this machine, or of any that shares locks with it, is running in a directory."""
    return locks.is_locked(directory / LOCK)


def is_done(run: Run) -> bool:
    """Return whether the run in the directory has done all its steps, or a hook that it still has ended it."""
    directory, result = Path(run.directory), read_result(Path(run.directory))[0]
    if is_finished(directory, run.training.steps) or not result.get("ended_by"):
        return is_finished(directory, run.training.steps)
    return any(is_ended_by_hook(run, last, result) for last in read_attempts(directory)[-1:])


def is_ended_by_hook(run: Run, last: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Return whether a hook that the run still has, with the same settings, ended it before its last step."""
    hook = result.get("ended_by", {}).get("hook")
    hooks, last_hooks = (config.get("hooks", {}) for config in (as_config(run), last["config"]))
    is_same_attempt = result.get("attempt") == last["attempt"]
    has_same_steps = last["config"]["training"]["steps"] == run.training.steps
    return is_same_attempt and has_same_steps and hook in hooks and last_hooks.get(hook) == hooks[hook]


REPEATS = ("training.seed", "training.repeat")
"""Settings whose values make no other variant."""


class ParentSweep(NamedTuple):
    """What a run is in its sweep."""

    name: str  # of the sweep's directory
    variant: str  # the settings that the sweep varies, with the run's values as typed, without seed and repeat


def find_parent_sweep(run: Run) -> ParentSweep | None:
    """Return the sweep that started a run; None for a run outside of a sweep."""
    folder = Path(run.directory).parent
    try:
        content = [*untrusted.parse_yaml(untrusted.read_regular_file(folder / "sweep.yaml").decode()), {}][0] or {}
        untrusted.check_type(content, dict[str, object], "it")
        untrusted.check_type(varied := content.get("axes") or {}, dict[str, list[object]], "axes")
    except (OSError, ValueError):
        return None
    values = dict(override.lstrip("+").split("=", 1) for override in run.overrides if "=" in override)
    names = sorted((varied.keys() - set(REPEATS)) & values.keys())
    return ParentSweep(folder.name, " ".join(f"{name}={values[name]}" for name in names))


WRITTEN_FOLDERS = ("log", "profile", "debug")
"""Folders of a run with files of fixed names that are written to as they are."""
LINKED_FOLDERS = (*WRITTEN_FOLDERS, "checkpoints", "tensorboard", "wandb", "mlflow", "trackio")
"""Folders of a run that may be on another disk."""


@contextmanager
def lock_directory(directory: Path, patience: float = 2.0, more_names: Container[str] = ()) -> Iterator[None]:
    """Lock a run's directory while the block runs, so that two jobs can't write to it; a kill frees the lock.

    Args:
        patience: seconds to wait for another lock: `is_locked` takes one for a moment, and that of a node that was lost
            is freed some time later.
        more_names: names that this run writes in its directory beside those of every run.

    Raises:
        ConfigError: when another job has locked it, it can't be written to, or what is written would go elsewhere.
    """
    new_folders = [f for f in (directory, *directory.parents) if not f.exists()]
    fresh = not (directory / ".lock").exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = locks.open_lock(directory / ".lock")
    except OSError as error:
        _remove_folders(new_folders)
        raise build_write_error(directory, error) from error
    try:
        try:
            locks.acquire(lock, f"hydra.run.dir={directory}", patience)
        except BlockingIOError:
            holder = truncate_text(os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process")
            raise ConfigError(
                f"hydra.run.dir={directory}: {holder} is running in it; wait for it, or choose another name."
            ) from None
        with contextlib.suppress(OSError):  # on a full disk the message lacks the name
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        _check_links(directory, more_names)
        yield
    finally:
        if fresh and directory.is_dir() and not {p.name for p in directory.iterdir()} & BEGUN:
            (directory / ".lock").unlink(missing_ok=True)
            _remove_folders(new_folders)
        os.close(lock)


def _check_links(directory: Path, more_names: Container[str]) -> None:
    """Raise ConfigError for a link in a run's directory through which titan would write files elsewhere.

    Whoever made a directory that somebody else resumes may have put it there. Links under other names are a user's own.
    """
    for folder in (directory, *(directory / name for name in WRITTEN_FOLDERS)):
        for entry in os.scandir(folder) if folder.is_dir() and not folder.is_symlink() else ():
            is_written_here = is_written(entry.name) or entry.name in more_names
            is_followed = folder != directory or (entry.name not in LINKED_FOLDERS and is_written_here)
            if entry.is_symlink() and is_followed:
                raise ConfigError(
                    f"hydra.run.dir={directory}: {entry.path} is a symbolic link to {os.readlink(entry.path)}, and a "
                    "run would write there; remove it, or replace it by what it links to."
                )


def check_linked_folders(directory: Path, typed: str) -> None:
    """Raise ConfigError where a folder of the run that `typed` names is a link out of it that was not typed."""
    for name, target in list_linked_folders(directory):
        if not trust.was_typed((name, target)):
            raise ConfigError(
                f"{typed}: {name} in it is a symbolic link to {target}, outside of the run, and nothing shows that you "
                f"have started a run with it; if you trust it, type the whole command with hydra.run.dir={directory} "
                f"in place of {typed}, or replace it by what it links to."
            )


def list_linked_folders(directory: Path) -> list[tuple[str, str]]:
    """Return the names of folders of a run that are links out of it, and where they lead."""
    links = [(name, os.path.realpath(directory / name)) for name in LINKED_FOLDERS if (directory / name).is_symlink()]
    return [(name, target) for name, target in links if not Path(target).is_relative_to(os.path.realpath(directory))]


def build_write_error(directory: Path, error: OSError) -> ConfigError:
    """Return the error for a run's directory that can't be written to."""
    reason = error.strerror or str(error)
    advice = "free some of it" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return ConfigError(f"hydra.run.dir={directory}: can't be written to ({reason}); {advice}, or choose another place.")


def _remove_folders(folders: list[Path]) -> None:
    """Remove folders, innermost first, that were made for a run that has not started."""
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not there, or another run has come into it
            folder.rmdir()
