"""The trials of a sweep: composed, checked and named before any of them starts. Free of torch."""

from __future__ import annotations

import copy
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launchers import run_file
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.config import settings
from titan.config.warning import warn_once
from titan.console.numbers import format_plural
from titan.console.progress import LOG_SECONDS, progress_line
from titan.console.text import redact, sanitize_line
from titan.errors import ConfigError
from titan.run import compose, hydra_session, identity, trust
from titan.run.hydra_private import ConfigLoaderImpl, get_overrides_dirname
from titan.run.run import Run
from titan.run.synonyms import check_optional
from titan.sweep import budget, ledger, trial_settings
from titan.sweep.labels import SHOWN_DIGITS, count_distinguishing_digits, format_label
from titan.sweep.schema import Sweep

AUTO = "auto"
"""The value of `hydra.sweep.subdir` that names a trial's folder after what it varies."""
LONGEST_NAME = 100  # characters of a folder's name
TERMINAL_SECONDS = 0.1  # the time between two progress lines on a terminal
MANY_TRIALS = 20  # from so many trials on, a log has progress lines too


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    id: str  # see `find_trial_id`
    varied: tuple[str, ...]  # its overrides, without those that all trials share
    run: Run  # the frozen run
    config: DictConfig | None = field(default=None, compare=False, repr=False)  # what Hydra composed, for callbacks
    digits: int = SHOWN_DIGITS  # of sampled numbers in its label

    @property
    def label(self) -> str:
        """Its name in messages."""
        return format_label(self.varied, self.digits) or sanitize_line(self.run.name)


def expand_trials(
    loader: Any,
    config: DictConfig,
    overrides: Sequence[Sequence[str]],
    first: int,
    remote: bool,
    trusted: tuple[str, ...] = (),
    fixed_settings: Collection[str] | None = None,
    is_planned: bool = False,
) -> list[Trial]:
    """Compose and check every trial, and choose its folder: the one that it has had, or a new one.

    Args:
        remote: see `titan.run.compose.freeze_run`.
        trusted: see `titan.run.compose.freeze_run`.
        fixed_settings: the settings that do not vary, of a sweeper that comes with one batch of trials after another,
            in which a trial may be there twice; None: those that are the same in all trials.
        is_planned: whether trials are planned, not trained: then other hardware makes another trial.

    Raises:
        ConfigError: for a trial that is rejected, with its number and overrides, and for two that are the same.
    """
    root = Path(os.path.abspath(config.hydra.sweep.dir))
    composer = Composer(loader, config)
    find_machine = _cache_machines()
    shared = [o for o, count in Counter(o for trial in overrides for o in trial).items() if count == len(overrides)]
    if (root / "run.yaml").exists():
        raise ConfigError(f"hydra.sweep.dir={root}: holds a single run; choose another name for a sweep.")
    composed: list[Trial] = []
    for number, trial_overrides in enumerate(_show_progress(overrides)):
        fixed = shared
        if fixed_settings is not None:
            fixed = [o for o in trial_overrides if o.partition("=")[0].lstrip("+~") in fixed_settings]
        varied = tuple(redact(o) for o in trial_overrides if o not in fixed)
        with _name_trial_in_errors(number, varied):
            cfg = composer(trial_overrides)
            with open_dict(cfg):
                cfg.hydra.job.id = cfg.hydra.job.num = first + number
                if cfg.hydra.sweep.subdir == AUTO:
                    cfg.hydra.sweep.subdir = _build_folder_name(varied)
                cfg.name = f"{Path(cfg.hydra.sweep.dir).name}/{cfg.hydra.sweep.subdir}"
            check_optional(composer.list_choices, cfg)
            directory = str(Path(cfg.hydra.sweep.dir) / cfg.hydra.sweep.subdir)
            run = compose.freeze_run(cfg, directory, remote=remote, find_machine=find_machine, trusted=trusted)
        trust.remember_typed([*run.options, *run.overrides])
        compose.warn_of_small_work(run)
        composed.append(Trial("", varied, run, cfg if config.hydra.callbacks else None))
    is_grid = fixed_settings is None
    return _name_trials(_equalise_steps(composed, config, is_grid), root, is_grid, is_planned)


def build_sweep(config: DictConfig) -> Sweep:
    """Return the settings of a composed configuration's sweep."""
    sweep: Sweep = settings.build(Sweep, OmegaConf.to_container(config.sweep), "sweep")
    return sweep


def _equalise_steps(composed: Sequence[Trial], config: DictConfig, is_grid: bool) -> list[Trial]:
    sweep = build_sweep(config)
    if sweep.budget != "steps" and not is_grid:
        raise ConfigError(f"sweep.budget={sweep.budget}: needs all trials at once; leave hydra/sweeper out.")
    varied = [c.varied for c in composed]
    runs = budget.equalise_steps([c.run for c in composed], varied, sweep)
    for line, doubt in budget.describe_times(runs, varied, sweep):
        print(sanitize_line(line), flush=True)
        if doubt:
            warn_once(sanitize_line(doubt))
    return [replace(trial, run=run) for trial, run in zip(composed, runs, strict=True)]


def _name_trials(composed: Sequence[Trial], root: Path, is_grid: bool, is_planned: bool) -> list[Trial]:
    """Return the trials with the ids and folders that they have had, or new ones."""
    ledger_trials = ledger.read_trials(root)
    directories = {trial.id: Path(trial.directory) for trial in ledger_trials}
    trials_by_id: dict[str, Trial] = {}
    digits = count_distinguishing_digits([trial.varied for trial in composed])
    ids: list[str] = []
    for number, trial in enumerate(composed, 1):
        run, trial_id = trial.run, find_trial_id(trial.run, trial.varied, ledger_trials)
        if is_planned:
            trial_id = identity.compute_digest([trial_id, repr(run.cluster)])
        ids.append(trial_id)
        if trial_id in trials_by_id:
            if is_grid:
                name = ", ".join([f"trial {number} of the sweep", *trial.varied])
                raise ConfigError(f"{name}: is the same as another; leave one out.")
            continue
        used = {*directories.values(), *(Path(t.run.directory) for t in trials_by_id.values())}
        folder = directories.get(trial_id, Path(run.directory))
        if trial_id not in directories and (len(folder.name) > LONGEST_NAME or folder in used):
            folder = folder.with_name(f"{folder.name[:LONGEST_NAME]}-{trial_id[:6]}")
        run = replace(run, directory=str(folder), name=f"{root.name}/{folder.relative_to(root)}")
        trials_by_id[trial_id] = replace(trial, id=trial_id, run=run, digits=digits)
    return [trials_by_id[trial_id] for trial_id in ids]


def find_trial_id(run: Run, varied: Sequence[str], ledger_trials: Sequence[ledger.TrialState]) -> str:
    """Return a trial's id: that of the trial with the same settings which the sweep has already, on any machines.

    Where the sweep varies the machines, each of them makes another trial.
    """
    trial_id = identity.compute_trial_id(run)
    if trial_id in (trial.id for trial in ledger_trials) or any(
        re.match(r"[+]*cluster\b", override) for override in varied
    ):
        return trial_id
    matching_ids = [trial.id for trial in ledger_trials if trial.asked == identity.compute_portable_trial_id(run)]
    return matching_ids[0] if len(matching_ids) == 1 else trial_id


def _cache_machines() -> compose.MachineFinder:
    """Return `get_machine` with a cache by description of the nodes: finding GPUs takes seconds on some machines."""
    machines: list[tuple[Cluster, Machine]] = []

    def find_machine(cluster: Cluster, remote: bool) -> Machine:
        if not any(cluster == known_cluster for known_cluster, _ in machines):
            machines.append((cluster, compose.get_machine(cluster, remote)))
        return next(machine for known_cluster, machine in machines if known_cluster == cluster)

    return find_machine


def _show_progress(overrides: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield the trials, and count them in a line on stderr: at once on a terminal, in a log when it takes long."""
    pause = TERMINAL_SECONDS if sys.stderr.isatty() else LOG_SECONDS if len(overrides) >= MANY_TRIALS else math.inf
    last_shown = time.monotonic()
    with progress_line() as show:
        for number, trial_overrides in enumerate(overrides):
            if time.monotonic() - last_shown > pause:
                last_shown = time.monotonic()
                show(f"{number} of {format_plural(len(overrides), 'trial')} composed and checked")
            yield trial_overrides


@contextmanager
def _name_trial_in_errors(number: int, varied: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        trial_label = ", ".join([f"trial {number + 1} of the sweep", *([" ".join(varied)] if varied else [])])
        raise ConfigError(f"{str(error).rstrip('.')} ({trial_label}; nothing was started).") from None


def _build_folder_name(varied: Sequence[str]) -> str:
    """Return a folder's name made of what is varied: the last part of each setting's name, and its value."""
    keys = [o.partition("=")[0].lstrip("+~") for o in varied]
    short_names = Counter(key.rpartition(".")[2] for key in keys)
    words = []
    for key, override in zip(keys, varied, strict=True):
        short = key.rpartition(".")[2]
        value = re.sub(r"[^A-Za-z0-9_.+-]+", "-", override.partition("=")[2]).strip("-_.")
        words.append(f"{short if short_names[short] == 1 else key}-{value}".replace("/", "-"))
    return "_".join(words) or "run"


def note_mixed(root: Path, trials: Sequence[Trial], has_budget: bool) -> None:
    """Print a sentence where the trials that a directory does not have differ from its others in unvaried settings."""
    if not (earlier := ledger.read_trials(root)):
        return
    known, asked = {trial.id for trial in earlier}, {trial.id for trial in trials}
    new_trials = [(t.varied, trial_settings.collect_settings(t.run)) for t in trials if t.id not in known]
    repeated = [trial.settings for trial in earlier if trial.id in asked and trial.settings is not None]
    if note := trial_settings.describe_mixed(new_trials, earlier, repeated, has_budget):
        print(sanitize_line(note), flush=True)


def register_trials(root: Path, trials: Sequence[Trial], spec: ledger.SweepSpec) -> None:
    """Record the sweep: what it is for, and the trials that the ledger does not have yet."""
    root.mkdir(parents=True, exist_ok=True)
    previous = ledger.read_spec(root)
    values_by_axis = {name: dict.fromkeys(values) for name, values in previous.axes.items()}
    for override in (override for trial in trials for override in trial.varied):
        key, _, value = override.partition("=")
        values_by_axis.setdefault(key, {})[value] = None
    ledger.write_spec(root, replace(spec, axes={name: tuple(values) for name, values in values_by_axis.items()}))
    recorded_steps = {trial.id: trial.steps for trial in ledger.read_trials(root)}
    events: list[dict[str, Any]] = [
        {
            "event": "point",
            "id": trial.id,
            "directory": str(Path(trial.run.directory).relative_to(root)),
            "overrides": trial.varied,
            "steps": trial.run.training.steps,
            "devices": trial.run.layout.devices,
            "asked": identity.compute_portable_trial_id(trial.run),
            "settings": trial_settings.collect_settings(trial.run),
        }
        for trial in trials
        if recorded_steps.get(trial.id) != trial.run.training.steps
    ]
    ledger.add_events(root, *events)


def write_run(trial: Trial, folder: Path) -> Path:
    """Write a trial's run into a file, for its process or job to read."""
    file = folder / f"{trial.id}.json"
    run_file.write(trial.run, file)
    return file


class Composer:
    """Composes trials as `loader.load_sweep_config(config, overrides)` would, with the sweep's Hydra `config`.

    Hydra composes in two steps: the choices on the command line (AXIS=CHOICE) decide which files are merged, and then
    the single values replace what these say. Trials of a sweep differ mostly in values, so the result of the first step
    is kept for each set of choices, and a trial is a copy of it with the trial's own values.
    """

    def __init__(self, loader: ConfigLoaderImpl, config: DictConfig) -> None:
        self.loader, self.config = loader, config
        self.hydra_overrides: list[str] = list(OmegaConf.to_container(config.hydra.overrides.hydra))  # type: ignore[arg-type]
        self.config_name = config.hydra.job.config_name
        self.parsed_overrides: dict[str, Override] = {}
        self.groups: dict[str, bool] = {}
        self.options: dict[str, list[str]] = {}
        self.bases: dict[tuple[str, ...], DictConfig] = {}
        typed = [*self.hydra_overrides, *OmegaConf.to_container(config.hydra.overrides.task)]  # type: ignore[misc]
        hydra_session.guard_loader(loader, self.config_name, typed)

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of one trial."""
        lines = [*self.hydra_overrides, *overrides]
        new_lines = [line for line in dict.fromkeys(lines) if line not in self.parsed_overrides]
        if new_lines:
            parsed_lines = OverridesParser.create().parse_overrides(new_lines)
            self.parsed_overrides |= dict(zip(new_lines, parsed_lines, strict=True))
        parsed = [self.parsed_overrides[line] for line in lines]
        choices = tuple(o.input_line or "" for o in parsed if self._is_choice(o))
        values = [o for o in parsed if not self._is_choice(o)]
        if choices not in self.bases:
            self.bases[choices] = self.loader.load_configuration(self.config_name, list(choices), RunMode.RUN)
        cfg = copy.deepcopy(self.bases[choices])
        try:
            self.loader.validate_sweep_overrides_legal(values, RunMode.RUN, from_shell=True)
            ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
            tasks = [o for o in parsed if not o.is_hydra_override()]
            cfg.hydra.overrides.task = [o.input_line for o in tasks]
            names = cfg.hydra.job.config.override_dirname
            cfg.hydra.job.override_dirname = get_overrides_dirname(
                tasks, names.exclude_keys, names.item_sep, names.kv_sep
            )
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        OmegaConf.copy_cache(from_config=self.config, to_config=cfg)
        return cfg

    def list_choices(self, group: str) -> list[str]:
        """Return the choices in a group."""
        if group not in self.options:
            self.options[group] = self.loader.get_group_options(group, ObjectType.CONFIG)
        return self.options[group]

    def _is_choice(self, override: Override) -> bool:
        """Return whether an override decides what is merged, as Hydra sees it; so do overrides of Hydra itself."""
        key = override.key_or_group
        if key not in self.groups:
            self.groups[key] = self.loader.repository.group_exists(key)
        group = self.groups[key] and not isinstance(override.value(), dict)
        return group or override.package is not None or override.is_hydra_override()
