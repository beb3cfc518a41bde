"""Select the checkpoint that an attempt starts from: the last complete one, local or remote, or a given one.

Only sizes are checked here; `titan.checkpoint.restore` verifies the content on all ranks. Free of torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titan.checkpoint import manifest
from titan.checkpoint.manifest import Corrupt, Manifest
from titan.checkpoint.remote import INDEX, Remote, is_url, of
from titan.checkpoint.schema import Checkpoint
from titan.errors import ConfigError
from titan.files.untrusted import shown

COUNTS = {"hf": "config.json", "meta": "params.json"}
"""The file that makes an exported folder valid."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint to start from: its folder or URL, its manifest, and notes about skipped ones."""

    path: str
    about: Manifest
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The lineage id: "science_id@step"."""
        return f"{self.about.science_id}@{self.about.step}"


def latest(
    directory: Path, elsewhere: str | None = None, run_id: str | None = None
) -> tuple[Candidate | None, tuple[str, ...]]:
    """Return the last complete checkpoint of the run in `directory`, and notes about skipped ones.

    Args:
        directory: the run's directory.
        elsewhere: `checkpoint.path`, which may have more.
        run_id: the run's id, if it has started already.

    Raises:
        ConfigError: when there is none in `directory` and `elsewhere` can't be read.
    """
    here, notes = _here(directory, run_id)
    if elsewhere is None:
        return here, notes
    remote = of(elsewhere, str(directory))
    try:
        if run_id and remote.run_id() not in (None, run_id):
            raise ConfigError(
                f"checkpoint.path={elsewhere}: has checkpoints of another run of the same name, at {remote.url}; give "
                "another checkpoint.path, or another name."
            )
        found, more = _there(remote, here.about.step if here else 0, run_id)
        return found or here, (*notes, *more)
    except (OSError, ValueError, KeyError, Corrupt) as error:
        if here is None:
            raise ConfigError(
                f"checkpoint.path={elsewhere}: can't be read ({error}), and there is no checkpoint in {directory}; "
                "make it readable, or give checkpoint.path=null."
            ) from error
        notes = (*notes, f"checkpoint.path={elsewhere} can't be read ({error})")
    return here, notes


def complete(directory: Path, elsewhere: str | None, run_id: str) -> dict[int, Candidate]:
    """Return all complete checkpoints of a run by their steps, those in its directory rather than their copies.

    Args:
        directory: the run's directory.
        elsewhere: `checkpoint.path`; copies that can't be read from here are left out.
        run_id: the run's id.
    """
    found = {}
    for folder in manifest.steps(directory):
        with suppress(Corrupt):
            if about := manifest.inspect(folder):
                found[about.step] = Candidate(str(folder.absolute()), _known(about, run_id))
    if elsewhere is not None:
        with suppress(ConfigError, OSError, ValueError, KeyError, Corrupt):
            remote = of(elsewhere, str(directory))
            for step in remote.index().keys() - found.keys():
                with suppress(Corrupt):
                    found[step] = Candidate(f"{remote.url}/step-{step}", _known(remote.manifest(step), run_id))
    return found


def _known(about: Manifest, run_id: str) -> Manifest:
    _of_run(about, run_id)
    return about


def post_save_pending(how: Checkpoint, directory: Path, step: int) -> bool:
    """Return whether a checkpoint's export or copy is missing; false if it can't be determined."""
    folder = manifest.folder_of(directory, step)
    if manifest.read(folder) is None:
        return False
    if how.export and not (folder / how.export / COUNTS[how.export]).is_file():
        return True
    with suppress(OSError, Corrupt):
        return how.path is not None and step not in of(how.path, str(directory)).index()
    return False


def _there(remote: Remote, after: int, run_id: str | None) -> tuple[Candidate | None, list[str]]:
    """Return the last complete remote checkpoint after a step, and notes about skipped ones."""
    notes: list[str] = []
    for step in sorted((step for step in remote.index() if step > after), reverse=True):
        try:
            about = remote.manifest(step)
            _of_run(about, run_id)
            return Candidate(f"{remote.url}/step-{step}", about), notes
        except Corrupt as damage:
            notes.append(f"checkpoint step-{step} elsewhere is damaged and not used: {damage}")
    return None, notes


def _here(directory: Path, run_id: str | None = None) -> tuple[Candidate | None, tuple[str, ...]]:
    last, notes, place = None, [], directory / "checkpoints"
    if place.exists() and not place.is_dir():
        raise ConfigError(
            f"hydra.run.dir={directory}: {place.name} in it is a file instead of the folder of checkpoints; "
            "move it away, or choose another name."
        )
    for folder in manifest.steps(directory):
        try:
            about = _of_run(manifest.inspect(folder), run_id)
        except Corrupt as damage:
            notes.append(f"checkpoint {folder.name} is damaged and not used: {damage}")
            continue
        last = Candidate(str(folder), about) if about else last
        if about is None and (folder / manifest.BROKEN).exists():
            notes.append(f"checkpoint {folder.name} was found damaged, and is not used")
    after = last.about.step if last else -1
    return last, tuple(note for note in notes if int(note.split()[1].partition("-")[2]) > after)


def _of_run(about: Manifest | None, run_id: str | None) -> Manifest | None:
    """Return the manifest after checking that it belongs to the run with this id, if one is given.

    Raises:
        Damaged: when it belongs to another run.
    """
    if about and run_id and about.run_id != run_id:
        raise Corrupt(f"{manifest.NAME} is of another run ({shown(about.run_id)}, and this one is {run_id})")
    return about


def load_named(path: str, setting: str = "checkpoint.resume") -> Candidate:
    """Return the checkpoint of `setting=path`: a checkpoint, or a run's last complete one; a folder or a URL.

    Raises:
        ConfigError: when there is none.
    """
    return _load_elsewhere(path, setting) if is_url(path) else _load_here(path, setting)


def _load_here(path: str, setting: str) -> Candidate:
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"{setting}={path}: there is no such directory; correct the path.")
    if (folder / INDEX).is_file():  # remote checkpoints in a folder
        return _load_elsewhere(str(folder), setting)
    try:
        about = manifest.inspect(folder)
    except Corrupt as damage:
        raise ConfigError(f"{setting}={path}: the checkpoint is damaged: {damage}; give another one.") from damage
    last, notes = (Candidate(str(folder), about), ()) if about else _here(folder)
    if last is None:
        why = f" ({'; '.join(notes)})" if notes else ""
        others = [name for name in ("config.json", "params.json") if (folder / name).is_file()]
        way = f"use its weights: checkpoint.weights={path}" if others else "give a run's or a checkpoint's folder"
        raise ConfigError(f"{setting}={path}: holds no complete checkpoint{why}; {way}.")
    return replace(last, notes=notes)


def _load_elsewhere(url: str, setting: str) -> Candidate:
    parent, _, name = url.rstrip("/").rpartition("/")
    try:
        if name.startswith("step-") and name[5:].isdigit():
            return Candidate(url, Remote(parent, setting).manifest(int(name[5:])))
        remote = Remote(url, setting)
        steps = remote.index()
        if steps:
            return Candidate(f"{remote.url}/step-{max(steps)}", remote.manifest(max(steps)))
    except (OSError, Corrupt, ValueError, KeyError) as error:
        raise ConfigError(f"{setting}={url}: no checkpoint can be read there ({error}); correct the URL.") from error
    raise ConfigError(
        f"{setting}={url}: there is no checkpoint; give the URL of a run's checkpoints, or of one of them."
    )
