"""The ids of a run, by hash: which runs are the same experiment.

`science_id` hashes the science settings that differ from their defaults, and the data's digest: runs of one science_id
must learn the same. `group_id` is science_id without the seed. `execution_id` hashes where and how fast an attempt
runs; `code_id` the code. A new setting whose default keeps the old meaning changes no id.

A user's own code, which `modules` and `_target_` name, is part of code_id. Its digests stand in run.yaml, so that a
continuation with changed code is noticed; a launcher's copy of the code includes the files. Free of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import typing
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.config import kinds
from titan.config.settings import to_plain
from titan.console.requirements import VERSION
from titan.console.text import redact_nested
from titan.optimizer.external.packages import compute_files_digest, find_version, is_own

if TYPE_CHECKING:
    from titan.run.run import Run

SCHEMA = 1
"""Increased when a setting changes its meaning, so that old and new runs get different ids."""
SCIENCE = ("model", "dataset", "optimizer", "schedule", "training", "precision")
ROOT = Path(__file__).resolve().parents[2]
FROZEN = "titan-code.json"
"""In a launcher's copy of the code: the file with the commit and diff of the checkout that was copied."""
DIGEST_NAMES = {
    "schedule.warmup": "training.warmup",
    "schedule.decay": "training.decay",
    "schedule.final_lr": "training.final_lr",
    "precision.matmuls": "precision.products",
    "precision.min_size": "precision.smallest",
    "evaluation.every": "metrics.validate_every",
    "evaluation.tokens": "metrics.validation_tokens",
}
"""The names under which ids hash these settings: frozen, as the kinds are."""
DIGEST_DEFAULTS = {"parallelism.schedule": "1F1B"}
"""Values that ids leave out as defaults, of settings whose own default is "auto" before a run is resolved."""
DIGEST_SCHEDULES: dict[str, dict[str, str]] = {
    "titan.schedule.Cosine": {"training.schedule": "cosine"},
    "titan.schedule.Linear": {"training.schedule": "linear"},
    "titan.schedule.WSD": {},
}
"""What ids hash for the names of these kinds of schedules; for those of others, `schedule`. Their settings `warmup`,
`decay` and `final_lr` are hashed under the names in `DIGEST_NAMES`."""
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "tiktoken", "tokenizers", "torchao")


@dataclasses.dataclass(frozen=True)
class Ids:
    """The ids of one attempt of a run."""

    science: str
    group: str
    execution: str
    code: str


def select_settings(run: Run, *, science: bool) -> dict[str, Any]:
    """Return the science (or else the execution) settings that differ from their defaults, by dotted name.

    Passwords and tokens in URLs are left out: a new one continues the same run.
    """
    settings, declared, hooks = dict[str, Any](), typing.get_type_hints(type(run)), run.hooks or {}
    # each schema by its name, with the class that is the default, and whether settings that don't say are science
    schemas = [(axis, getattr(run, axis), declared[axis], axis in SCIENCE) for axis in run.axes()]
    schemas += [(f"hooks.{name}", hook, None, hook.science) for name, hook in hooks.items()]
    for path, schema, cls, default in schemas:
        if type(schema) is not cls and default == science:
            settings[path] = kinds.get_kind(type(schema))
        for field in dataclasses.fields(schema):
            mark, name = field.metadata.get("science"), f"{path}.{field.name}"
            setting = getattr(schema, field.name)
            if not field.metadata.get("in_ids", True):
                continue
            if (default if mark is None else mark) == science and setting != DIGEST_DEFAULTS.get(name, field.default):
                settings[name] = redact_nested(to_plain(setting))
    # of several hooks that change what is learned, the order too
    changing = [name for name, hook in hooks.items() if hook.science]
    return settings | ({"hooks": changing} if science and len(changing) > 1 else {})


def collect_science(run: Run, data_digest: str, parent: str | None) -> dict[str, Any]:
    """Return all that decides what the run learns, which is compared before a run is resumed.

    Args:
        parent: the checkpoint that a fork starts from, as "science_id@step"; None for a run that is no fork.
    """
    data = {"data": data_digest} | ({"parent": parent} if parent else {})
    return select_settings(run, science=True) | data


def compute_ids(run: Run, science: Mapping[str, Any]) -> Ids:
    """Return the ids of a run whose `collect_science` is `science`."""
    execution = select_settings(run, science=False) | run.layout.degrees()
    science_id, group_id, execution_id = map(_compute_settings_digest, (science, _drop_seed(science), execution))
    return Ids(science_id, group_id, execution_id, compute_digest(describe_code(run)))


def compute_trial_id(run: Run) -> str:
    """Return the id of a trial: a hash of all settings but those of the machines that it gets, and of its degrees.

    The data's digest is not in it: the data need not be prepared yet.
    """
    return _compute_settings_digest(select_trial_settings(run) | {"devices": run.layout.degrees()})


def compute_portable_trial_id(run: Run) -> str:
    """Return the id of a trial on any machines: as `compute_trial_id`, without the degrees."""
    return _compute_settings_digest(select_trial_settings(run))


def compute_variant_id(run: Run) -> str:
    """Return the id of what a run learns, whatever its seed and its machines; see `compute_trial_id` about the data.

    The content of a user's own packages is part of it.
    """
    group = _drop_seed(select_settings(run, science=True))
    return _compute_settings_digest(group | {"own": compute_code_digests(run)})


def _drop_seed(science: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in science.items() if k != "training.seed"}


def select_trial_settings(run: Run) -> dict[str, Any]:
    """Return the settings that identify a trial and differ from their defaults: all but those of its machines."""
    execution = {k: v for k, v in select_settings(run, science=False).items() if not k.startswith("cluster.")}
    if run.compile_why:  # the setting is "auto", whatever follows from it on this machine
        execution.pop("compile.scope", None)
    return select_settings(run, science=True) | execution | {"device": run.cluster.device}


def _compute_settings_digest(settings: Mapping[str, Any]) -> str:
    hashed = {DIGEST_NAMES.get(name, name): value for name, value in settings.items()}
    if (schedule := settings.get("schedule")) in DIGEST_SCHEDULES:
        del hashed["schedule"]
        hashed |= DIGEST_SCHEDULES[schedule]
    return compute_digest(hashed)


def compute_digest(value: Any) -> str:
    """Return 12 hex digits of a hash of a value's canonical JSON, under the schema's version."""
    text = json.dumps([SCHEMA, value], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_code(run: Run | None = None) -> dict[str, Any]:
    """Return the versions of titan and of the libraries that compute, the git commit and a digest of the diff to it.

    In a copy of the code that a launcher made, commit and diff are those of the checkout that was copied. Of a run that
    imports a user's own packages there are their digests too.
    """
    own_digests = compute_code_digests(run) if run is not None else {}
    foreign = [] if run is None else [p for p in run.optimizer.list_packages() if not is_own(p)]
    versions = {name: _find_version(name) for name in PACKAGES}
    diff = read_git_diff()
    return {
        "titan": VERSION,
        "commit": _read_frozen("code", {}).get("commit") or run_git("rev-parse", "HEAD"),
        "diff": hashlib.sha256(diff.encode()).hexdigest()[:12] if diff else None,
        **versions,
        **({"optimizer": [find_version(package) for package in foreign]} if foreign else {}),
        **({"own": own_digests} if own_digests else {}),
    }


def read_git_diff() -> str | None:
    """Return the diff of the checkout's tracked files to the commit; None outside a checkout."""
    diff: str | None = _read_frozen("diff", None) or run_git("diff", "HEAD")
    return diff


def _read_frozen(key: str, default: Any) -> Any:
    """Return what a launcher wrote into its copy of the code; elsewhere the default."""
    try:
        return json.loads((ROOT / FROZEN).read_text())[key]
    except (OSError, ValueError, KeyError):
        return default


def run_git(*arguments: str) -> str | None:
    """Return git's output in titan's checkout; None where there is none."""
    if not (ROOT / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None


@functools.cache
def _find_version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


OWN_CODE = "own_code"
"""The key of the digests in a document of run.yaml."""
RESULT_FILES = ("run.yaml", "ledger.jsonl")
"""Files that make a folder one of results, which is no code."""


def find_packages(run: Run) -> tuple[str, ...]:
    """Return the top-level packages outside of titan that a run names, in order."""
    return tuple(list_uses(run))


def list_uses(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the settings whose classes are of each package outside of titan, in order; none where it is only imported.

    The standard library's are no packages of the user.
    """
    names: dict[str, list[str]] = {name.partition(".")[0]: [] for name in run.modules}
    for name, cls in find_classes({axis: getattr(run, axis) for axis in (*run.axes(), "hooks")}):
        names.setdefault(cls.__module__.partition(".")[0], []).append(name)
    for package in filter(is_own, run.optimizer.list_packages()):
        names.setdefault(package, []).append("optimizer.cls")
    own_packages = names.keys() - {"titan"} - sys.stdlib_module_names
    return {package: tuple(names[package]) for package in sorted(own_packages)}


def find_classes(value: Any, name: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted name and the class of all schemas in a value."""
    if dataclasses.is_dataclass(value):
        yield name, type(value)
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, part in value.items() if isinstance(value, Mapping) else ():
        yield from find_classes(part, f"{name}.{key}".lstrip("."))


def list_kinds(value: Any) -> list[tuple[str, str]]:
    """Return the dotted name and the kind of all schemas in a value."""
    return [(name, kinds.get_kind(found)) for name, found in find_classes(value)]


def find_files(package: str) -> dict[str, Path]:
    """Return the files of a package by their paths from the folder that it is imported from; none if it has none."""
    spec = None
    with contextlib.suppress(ValueError):  # of a module that was made without a file, as a notebook's
        spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        origin = Path(spec.origin or "") if spec else Path()
        return {origin.name: origin} if origin.is_file() else {}
    files_by_path: dict[str, Path] = {}
    for folder in map(Path, spec.submodule_search_locations):
        files_by_path = {f"{package}/{file.relative_to(folder)}": file for file in walk_files(folder)} | files_by_path
    return dict(sorted(files_by_path.items()))


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that are code: none that are hidden or compiled, and no results of runs."""
    for root, folders, names in os.walk(folder):
        if any(name in RESULT_FILES for name in names):
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        yield from (Path(root, n) for n in sorted(names) if not n.startswith(".") and not n.endswith(".pyc"))


def is_installed(package: str) -> bool:
    """Return whether a package is among those of this Python's site-packages, where every job finds it."""
    site_folders = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))
    return any(file.is_relative_to(folder) for file in find_files(package).values() for folder in site_folders)


def compute_code_digests(run: Run) -> dict[str, str]:
    """Return 12 hex digits of a hash of the files of each package: of their paths and contents."""
    return {package: compute_files_digest(find_files(package)) for package in find_packages(run)}


def note_code_changes(run: Run, last: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note where packages have changed since the last attempt, which its document describes."""
    last_digests, current_digests = last.get(OWN_CODE) or {}, compute_code_digests(run)
    changed = [
        f"{name} ({last_digests[name]} -> {current_digests[name]})"
        for name in current_digests
        if last_digests.get(name, current_digests[name]) != current_digests[name]
    ]
    return (f"your code has changed since attempt {last['attempt']}: {', '.join(changed)}",) if changed else ()
