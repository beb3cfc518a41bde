"""Carry out a command line of titan.train: one run on this machine or a cluster, a sweep, or its --help."""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.types import RunMode

from launchers import plugin
from launchers.session import Describe, Planner, SweepSession, describe_best, describe_nothing, silence_sweeper
from titan.config import modules
from titan.config.command import describe_version, format_help
from titan.console.text import redact
from titan.errors import ConfigError, exit_code
from titan.run import certificate, command_line, directory, hydra_private, hydra_session, trust
from titan.run.compose import check_weights, freeze_run, register_configs, warn_of_small_work
from titan.run.hydra_errors import translate_errors
from titan.run.hydra_session import CONF, CONFIG, compose_config, open_hydra
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.run.synonyms import describe_value_error
from titan.sweep.schema import GRID


def run_command(
    argv: Sequence[str] | None,
    job: Callable[[Run], int],
    ranks: int | None = None,
    describe: Describe = describe_nothing,
) -> int:
    """Carry out a command line: compose, check, then `job`.

    Args:
        argv: the arguments; None: those of this process.
        job: runs one checked Run and returns its exit code.
        ranks: how many ranks a launcher has started already; None when titan is to start them.
        describe: returns what a dry run prints about its trials beside the scripts.

    Returns:
        The exit code: 0 done, 1 a failed run, 2 a ConfigError, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _execute_command(arguments, job, ranks, describe))


def _execute_command(arguments: list[str], job: Callable[[Run], int], ranks: int | None, describe: Describe) -> int:
    with _prepare(arguments) as (args, cfg):
        if args.version:
            print(describe_version())
            return 0
        if args.help:
            with open_hydra(args) as loader:
                print(build_help(loader, Recipe.axes()))
            return 0
        if args.multirun or cfg is None:
            return _hand_to_hydra(args, SweepSession(describe=describe))
        launcher = plugin.find_scheduler_launcher(cfg) if ranks is None else None
        run = freeze_run(cfg, trusted=args.trusted, ranks=ranks, remote=launcher is not None)
        certificate.check(run)
        _remember(run, leaves=directory.list_linked_folders(Path(run.directory)))
        warn_of_small_work(run)
        callbacks = hydra_session.HydraCallbacks(cfg, remote=launcher is not None)
    return callbacks.around_run(
        lambda: plugin.launch_single(launcher, run, cfg, describe) if launcher else job(run), CONFIG
    )


def plan_command(argv: Sequence[str], job: Callable[[Run], int], sweep_job: Planner, is_searched: bool = False) -> int:
    """Compose and check what a command line of titan.train would start, on the machines that it describes.

    Args:
        job: takes the run of a command line without -m; returns the exit code.
        sweep_job: takes the trials of one with -m; returns their exit codes.
        is_searched: whether the layout of the run is searched, so that it need not work.
    """
    with _prepare(argv, accepted=("multirun",)) as (args, cfg):
        if args.multirun or cfg is None:
            return _hand_to_hydra(args, SweepSession(planner=sweep_job))
        run = freeze_run(cfg, trusted=args.trusted, remote=True, is_searched=is_searched)
        if not run.is_layout_open:
            warn_of_small_work(run, planned=True)
        return job(run)


def launch_sweep(argv: Sequence[str]) -> Path:
    """Carry out a command line of titan.train with -m; return the sweep's directory.

    Raises:
        ConfigError: when a trial can't work, or the command line asks for anything else; nothing was started then.
        KeyboardInterrupt: for Ctrl-C, once the running trials have ended.
    """
    session = SweepSession()
    with _prepare(["-m", *argv], accepted=("multirun",)) as (args, _):
        _hand_to_hydra(args, session)
    return session.directory or Path()


def launch_trials(
    argv: Sequence[str], trials: Sequence[Sequence[str]], typed: Sequence[str] = ()
) -> list[tuple[Run, int]]:
    """Launch a sweep of given trials, as `titan.train -m` launches a grid.

    Args:
        argv: what a command line would say of the sweep: its directory and its launcher.
        typed: those that the user has typed now; others come from a file, and let no package be imported.

    Returns:
        The run of each trial and its exit code, in order.

    Raises:
        ConfigError: when a trial can't work, or has a setting that the user must have typed once and has not
            (`titan.run.trust`); none was started then.
        KeyboardInterrupt: for Ctrl-C, once the running trials have ended.
    """
    shared = set(trials[0]).intersection(*trials)
    fixed_settings = {override.partition("=")[0].lstrip("+~") for override in shared} - {"training.seed"}
    session = SweepSession(given_overrides=trials, fixed_settings=frozenset(fixed_settings))
    words = [*argv, *(override for trial in trials for override in trial)]
    trust.select_recorded(list(dict.fromkeys(words)), [*typed, "hydra.sweep.dir="])
    with _prepare(["-m", *argv]) as (args, _):
        args.typed = [*args.typed, *typed]
        _hand_to_hydra(args, session)
    return session.outcomes


def compose_single(arguments: Sequence[str], recorded: Sequence[str] = ()) -> Run:
    """Return the checked run of a command line that starts one run on this machine.

    Args:
        recorded: a run's own command line, to which this one is added; it lets no package be imported.

    Raises:
        ConfigError: when the run can't work, or the command line asks for anything else.
    """
    with _prepare(arguments, recorded, accepted=()) as (args, cfg):
        if args.multirun:
            raise ConfigError("hydra.mode=MULTIRUN: a sweep takes the command titan.train -m; leave it out.")
        if plugin.find_scheduler_launcher(cfg) is not None:
            launcher = cfg.hydra.runtime.choices.get("hydra/launcher")
            raise ConfigError(f"hydra/launcher={launcher}: takes the command titan.train; leave it out.")
        if cfg.hydra.callbacks:
            raise ConfigError("hydra.callbacks: takes the command titan.train; leave them out.")
        run = freeze_run(cfg, trusted=args.trusted)
    _remember(run)
    return run


def compose_trial(arguments: Sequence[str], recorded: Sequence[str] = ()) -> Run:
    """Return the checked run of a trial, here or on what its launcher reaches; see `compose_single`."""
    with _prepare(arguments, recorded, accepted=()) as (args, cfg):
        launcher = plugin.find_scheduler_launcher(cfg)
        run = freeze_run(cfg, trusted=args.trusted, remote=launcher is not None)
    _remember(run, arguments)  # a launcher is not among the run's overrides
    return run


@contextlib.contextmanager
def _prepare(
    arguments: Sequence[str], recorded: Sequence[str] = (), accepted: Sequence[str] | None = None
) -> Iterator[tuple[argparse.Namespace, Any]]:
    """Yield the parsed and checked arguments of a command line, and what Hydra composed where one run was asked for.

    What Hydra raises meanwhile becomes ConfigError.

    Args:
        recorded: see `compose_single`.
        accepted: options beside those of one run that the caller has; None: all.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting with 1
    register_configs()
    plugin.register_plugins()
    args = command_line.parse(arguments, recorded)
    with translate_errors(args.overrides):
        command_line.check(args)
        if accepted is not None:
            command_line.reject_shown(args, accepted)
        if any(getattr(args, name) for name in ("version", "help", *command_line.SHOWING_OPTIONS)):
            yield args, None
            return
        with open_hydra(args):
            cfg = compose_config(args.overrides, args.config_name)
            sweep = cfg.hydra.runtime.choices.get("sweep")
            if sweep not in (None, "null") and not args.resumed:  # a trial of a named sweep can be resumed by itself
                raise ConfigError(f"sweep={sweep}: is a sweep; add -m.")
            modules.check_hydra(cfg, args.typed)
            check_weights(cfg, args.typed)
            if cfg.hydra.verbose:  # set the levels of the loggers it names, and print what Hydra composed from
                hydra_private.compose_mode(args.overrides, args.config_name or CONFIG, RunMode.RUN, log=True)
        args.trusted = modules.list_trusted_packages(args.typed)
        args.multirun = cfg.hydra.mode == RunMode.MULTIRUN  # a file may say so
        yield args, cfg


def _remember(run: Run, words: Sequence[str] = (), leaves: Sequence[trust.Leaf] = ()) -> None:
    """Remember what a run's command line has typed, and where it puts copies of its checkpoints."""
    copies = [f"checkpoint.path={redact(run.checkpoint.path)}"] if run.checkpoint.path else []
    trust.remember_typed([*run.options, *run.overrides, *copies, *words], leaves)


def _hand_to_hydra(args: argparse.Namespace, session: SweepSession) -> int:
    names = [o.partition("=")[2] for o in args.overrides if o.startswith("name=")]
    if args.multirun and names:
        command_line.check_sweep_name(names[-1], args.overrides)
        args.overrides.append(f"hydra.sweep.dir=runs/{names[-1]}")
    with open_hydra(args) as loader:
        if args.multirun:
            session.trusted = modules.list_trusted_packages(args.typed)
            cfg = compose_config(args.overrides, args.config_name, RunMode.MULTIRUN)
            modules.check_hydra(cfg, args.typed)
            silence_sweeper(cfg)
        else:
            hydra_session.guard_loader(loader, args.config_name or CONFIG, args.overrides)
    try:
        with _redact_output() if args.cfg or args.info else contextlib.nullcontext():
            hydra_private.hand_over(args, session, str(CONF), args.config_name or CONFIG)
    except SystemExit as system_exit:
        if args.cfg and system_exit.code:
            raise ConfigError(f"--package {args.package}: no such part of the configuration; give an axis.") from None
        return system_exit.code if isinstance(system_exit.code, int) else 2
    except ValueError as error:
        raise ConfigError(describe_value_error(error, args.overrides)) from error
    finally:
        session.remove_unused()
    if session.directory and str(cfg.hydra.sweeper.get("_target_")) != GRID:
        print(describe_best(session.directory, str(cfg.sweep.objective)), end="", flush=True)
    return session.find_exit_code() if args.multirun else 0


@contextlib.contextmanager
def _redact_output() -> Iterator[None]:
    """Print what Hydra prints on stdout, with secrets redacted; drop its stderr."""
    stdout = io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        print(redact(stdout.getvalue()), end="")


AXES = {
    "recipe": "named, complete recipes: recipe=NAME",
    "sweep": "named sweeps: -m sweep=NAME",
    "model": "architecture and size",
    "dataset": "training data",
    "optimizer": "optimizer",
    "schedule": "learning rate and weight decay over the steps",
    "training": "steps, global batch, sequence length",
    "evaluation": "validation sets, tasks, averaged weights",
    "precision": "dtypes of weights, activations and matmuls",
    "parallelism": "layout: how the model and the batch are split across devices",
    "memory": "activation checkpointing",
    "compile": "torch.compile",
    "checkpoint": "when and how to save",
    "metrics": "metrics and trackers",
    "debug": "debugging options",
    "profile": "which steps are profiled",
    "cluster": "devices and nodes",
    "hooks": "own code at named moments of a run: hooks=[NAME,...]",
    "hydra/launcher": "how the trials of a sweep are launched",
}

LAUNCHERS = {
    "basic": "As local; Hydra's name of its default.",
    "local": "On this machine, as many trials at once as hydra.launcher.at_once.",
    "slurm": "As Slurm jobs, in arrays.",
}

EXAMPLES = {
    "": "the default: a small Llama on real text, 2 minutes",
    "model=llama8b parallelism=fsdp": "choices of axes",
    "training.steps=500 name=longer": "settings; results go to runs/longer",
    "-m optimizer.lr=1e-3,3e-3": "a sweep: every combination, one after the other",
    "--cfg job": "print all settings and their values, without a run",
}
NOTES = """\
The same command resumes an unfinished run of the same name. Settings of an axis: --cfg job -p AXIS.
More choices: hydra.searchpath=[file:///folder], $TITAN_CONF, or packages with a titan.plugins entry point.
Tab completion in bash: eval "$(titan-train -sc install=bash)"."""


def build_help(loader: ConfigLoader, axes: Sequence[str]) -> str:
    """Return the help text with all choices that `loader` finds, also those of plugins."""
    return format_help(
        "titan.train",
        ["[AXIS=CHOICE ...]", "[AXIS.SETTING=VALUE ...]"],
        "Pre-train a language model.",
        EXAMPLES,
        "\n".join(_list_choices(loader, axes)),
        NOTES,
    )


def _list_choices(loader: ConfigLoader, axes: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for axis in (*axes, "hooks", "hydra/launcher", "recipe", "sweep"):
        options = loader.get_group_options(axis, ObjectType.CONFIG)
        if options:
            width = max(14, *map(len, options))
            lines.append(f"  {axis}: {AXES.get(axis, '')}")
            lines += [f"    {option:<{width}} {_describe_choice(loader, axis, option)}" for option in sorted(options)]
    return lines


def _describe_choice(loader: Any, axis: str, option: str) -> str:
    for source in loader.repository.get_sources():
        file: Any
        package, *folders = source.path.split("/")
        if source.scheme() == "file":
            file = Path(source.path) / f"{axis}/{option}.yaml"
        elif source.scheme() == "pkg":
            file = importlib.resources.files(package).joinpath(*folders, f"{axis}/{option}.yaml")
        else:
            continue
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            return cut_sentences(
                [line[2:].strip() for line in lines if line.startswith("# ") and "@package" not in line]
            )
    return LAUNCHERS.get(option, "") if axis == "hydra/launcher" else ""


def cut_sentences(lines: Sequence[str]) -> str:
    """Return the first line of a comment up to its last sentence's end, or with those that complete it."""
    first = lines[0] if lines else ""
    if first.endswith((".", "?")) or len(lines) < 2:
        return first
    if whole_sentences := re.match(r".*[.?](?= [A-Z])", first):
        return whole_sentences[0]
    text = " ".join(lines)
    end = re.search(r"[.?](?= |$)", text)
    return text[: end.end()] if end else first
