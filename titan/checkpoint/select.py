"""Select the checkpoint that an attempt starts from: the last complete one, local or remote, or a given one.

Only sizes are checked here, unless a caller checks the content; `titan.checkpoint.restore` verifies that on all ranks.
Free of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titan.checkpoint import manifest
from titan.checkpoint.manifest import CorruptCheckpointError, Manifest
from titan.checkpoint.remote import INDEX, Remote, open_remote
from titan.checkpoint.schema import Checkpoint
from titan.config.settings import format_setting
from titan.console.text import is_url, sanitize_line
from titan.errors import ConfigError
from titan.files.run_directory import describe_runs_below
from titan.files.untrusted import describe_value

ContentCheck = Callable[[Path], str | None]
"""Returns what is wrong with the content of a checkpoint's folder; None if nothing is."""
EXPORT_MARKERS = {"hf": "config.json", "meta": "params.json"}
"""The file that makes an exported folder valid."""


@dataclass(frozen=True)
class CheckpointCandidate:
    """A checkpoint to start from: its folder or URL, its manifest, and notes about skipped ones."""

    path: str
    manifest: Manifest
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The lineage id: "science_id@step"."""
        return f"{self.manifest.science_id}@{self.manifest.step}"


def find_latest(
    directory: Path,
    remote_path: str | None = None,
    run_id: str | None = None,
    check: ContentCheck = lambda folder: None,
) -> tuple[CheckpointCandidate | None, tuple[str, ...]]:
    """Return the last complete checkpoint of the run in `directory`, and notes about skipped ones.

    Args:
        remote_path: `checkpoint.path`, which may have more.
        run_id: the run's id, if it has started already.
        check: which checkpoints in `directory` are corrupt.

    Raises:
        ConfigError: when there is none in `directory` and `remote_path` can't be read.
    """
    local_candidate, notes = _find_latest_local(directory, run_id, check)
    if remote_path is None:
        return local_candidate, notes
    remote = open_remote(remote_path, str(directory))
    try:
        if run_id and remote.read_run_id() not in (None, run_id):
            raise ConfigError(
                f"checkpoint.path={remote_path}: has checkpoints of another run of the same name, at {remote.url}; "
                "give another checkpoint.path, or another name."
            )
        remote_candidate, remote_notes = _find_latest_remote(
            remote, local_candidate.manifest.step if local_candidate else 0, run_id
        )
        return remote_candidate or local_candidate, (*notes, *remote_notes)
    except (OSError, ValueError, KeyError, CorruptCheckpointError) as error:
        if local_candidate is None:
            raise ConfigError(
                f"checkpoint.path={remote_path}: can't be read ({error}), and there is no checkpoint in {directory}; "
                "make it readable, or give checkpoint.path=null."
            ) from error
        notes = (*notes, f"checkpoint.path={remote_path} can't be read ({error})")
    return local_candidate, notes


def list_candidates(directory: Path, remote_path: str | None, run_id: str) -> dict[int, CheckpointCandidate]:
    """Return all complete checkpoints of a run by their steps, those in its directory rather than their copies.

    Args:
        remote_path: `checkpoint.path`; copies that can't be read from here are left out.
    """
    candidates = {}
    for folder in manifest.list_folders(directory):
        with suppress(CorruptCheckpointError):
            if checkpoint_manifest := manifest.inspect(folder):
                _check_run(checkpoint_manifest, run_id)
                candidates[checkpoint_manifest.step] = CheckpointCandidate(str(folder.absolute()), checkpoint_manifest)
    if remote_path is not None:
        with suppress(ConfigError, OSError, ValueError, KeyError, CorruptCheckpointError):
            remote = open_remote(remote_path, str(directory))
            for step in remote.list_steps().keys() - candidates.keys():
                with suppress(CorruptCheckpointError):
                    _check_run(remote_manifest := remote.read_manifest(step), run_id)
                    candidates[step] = CheckpointCandidate(f"{remote.url}/step-{step}", remote_manifest)
    return candidates


def is_post_save_pending(settings: Checkpoint, directory: Path, step: int) -> bool:
    """Return whether a checkpoint's export or copy is missing; false if it can't be determined."""
    folder = manifest.folder_of(directory, step)
    if manifest.read(folder) is None:
        return False
    if settings.export and not (folder / settings.export / EXPORT_MARKERS[settings.export]).is_file():
        return True
    with suppress(OSError, CorruptCheckpointError):
        return settings.path is not None and step not in open_remote(settings.path, str(directory)).list_steps()
    return False


def _find_latest_remote(
    remote: Remote, after_step: int, run_id: str | None, check: ContentCheck = lambda folder: None
) -> tuple[CheckpointCandidate | None, list[str]]:
    """Return the last complete remote checkpoint after a step, and notes about skipped ones."""
    notes: list[str] = []
    for step in sorted((step for step in remote.list_steps() if step > after_step), reverse=True):
        try:
            checkpoint_manifest = remote.read_manifest(step)
            _check_run(checkpoint_manifest, run_id)
            _check_content(f"{remote.url}/step-{step}", check)
            return CheckpointCandidate(f"{remote.url}/step-{step}", checkpoint_manifest), notes
        except CorruptCheckpointError as error:
            notes.append(f"checkpoint step-{step} elsewhere is damaged and not used: {error}")
    return None, notes


def _find_latest_local(
    directory: Path, run_id: str | None = None, check: ContentCheck = lambda folder: None
) -> tuple[CheckpointCandidate | None, tuple[str, ...]]:
    checkpoints_folder = directory / "checkpoints"
    if checkpoints_folder.exists() and not checkpoints_folder.is_dir():
        raise ConfigError(
            f"hydra.run.dir={directory}: {checkpoints_folder.name} in it is a file instead of the folder of "
            "checkpoints; move it away, or choose another name."
        )
    notes, differing = list[str](), list[str]()
    for folder in reversed(manifest.list_folders(directory)):
        try:
            if checkpoint_manifest := _check_run(manifest.inspect(folder), run_id):
                _check_content(folder, check)
                return CheckpointCandidate(str(folder), checkpoint_manifest), (*notes[::-1], *differing[::-1])
        except CorruptCheckpointError as error:
            notes.append(f"checkpoint {folder.name} is damaged and not used: {error}")
            continue
        if (folder / manifest.DAMAGED).exists():
            notes.append(f"checkpoint {folder.name} was found damaged, and is not used")
        if (folder / manifest.DIFFERS).exists():
            differing.append(f"checkpoint {folder.name} is of replicas that differed, and is not used")
    return None, tuple(notes[::-1])  # the run starts again: nothing was wrong before replicas differed


def _check_content(folder: str | Path, check: ContentCheck) -> None:
    """Raise CorruptCheckpointError where the check finds a problem."""
    if problem := check(Path(folder)):
        raise CorruptCheckpointError(problem)


def _check_run(checkpoint_manifest: Manifest | None, run_id: str | None) -> Manifest | None:
    """Return the manifest after checking that it belongs to the run with this id, if one is given.

    Raises:
        CorruptCheckpointError: when it belongs to another run.
    """
    if checkpoint_manifest and run_id and checkpoint_manifest.run_id != run_id:
        raise CorruptCheckpointError(
            f"{manifest.NAME} is of another run ({describe_value(checkpoint_manifest.run_id)}, and this one is "
            f"{run_id})"
        )
    return checkpoint_manifest


def report_skipped(notes: tuple[str, ...], used: str) -> None:
    """Warn of the checkpoints that are damaged; `used` is the one before them."""
    for note in notes:
        print(f"titan: warning: {sanitize_line(note)}; using {Path(used).name}", file=sys.stderr)


LAST_WORDS = ("latest", "last", "auto", "best")
"""What others write for the last checkpoint of the same run."""


def load_named(
    path: str, setting: str = "checkpoint.resume", check: ContentCheck = lambda folder: None
) -> CheckpointCandidate:
    """Return the checkpoint of `setting=path`: a checkpoint, or a run's last complete one; a folder or a URL.

    Args:
        setting: the setting, for messages.
        check: which checkpoints of a folder are corrupt; of a run, the one before is returned.
    """
    return _load_remote(path, setting, check) if is_url(path) else _load_local(path, setting, check)


def _load_local(path: str, setting: str, check: ContentCheck) -> CheckpointCandidate:
    label, folder = format_setting(setting, path), Path(path).expanduser().absolute()
    if not folder.is_dir():
        advice = (
            "repeat a run's command to resume it, or name a directory" if path in LAST_WORDS else "correct the path"
        )
        raise ConfigError(f"{label}: there is no such directory; {advice}.")
    if (folder / INDEX).is_file():  # remote checkpoints in a folder
        return _load_remote(str(folder), setting, check)
    try:
        if checkpoint_manifest := manifest.inspect(folder):
            _check_content(folder, check)
    except CorruptCheckpointError as error:
        raise ConfigError(f"{label}: the checkpoint is damaged: {error}; give another one.") from error
    last, notes = (
        (CheckpointCandidate(str(folder), checkpoint_manifest), ())
        if checkpoint_manifest
        else _find_latest_local(folder, check=check)
    )
    if last is None:
        reasons = f" ({'; '.join(notes)})" if notes else ""
        if not notes and (runs := describe_runs_below(path)):
            raise ConfigError(f"{label}: {runs}.")
        weight_files = [name for name in ("config.json", "params.json") if (folder / name).is_file()]
        advice = (
            f"use its weights: checkpoint.weights={path}" if weight_files else "give a run's or a checkpoint's folder"
        )
        raise ConfigError(f"{label}: holds no complete checkpoint{reasons}; {advice}.")
    return replace(last, notes=notes)


def _load_remote(url: str, setting: str, check: ContentCheck) -> CheckpointCandidate:
    label = format_setting(setting, url)
    parent, _, name = url.rstrip("/").rpartition("/")
    try:
        if name.startswith("step-") and name[5:].isdigit():
            return CheckpointCandidate(url, Remote(parent, setting).read_manifest(int(name[5:])))
        last, notes = _find_latest_remote(Remote(url, setting), -1, None, check)
        if last:
            return replace(last, notes=tuple(notes))
    except (OSError, CorruptCheckpointError, ValueError, KeyError) as error:
        raise ConfigError(f"{label}: no checkpoint can be read there ({error}); correct the URL.") from error
    reasons = f" ({'; '.join(notes)})" if notes else ""
    raise ConfigError(
        f"{label}: there is no checkpoint{reasons}; give the URL of a run's checkpoints, or of one of them."
    )
