"""The body of a rank: join the process group, build the train step, train, leave."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.manager import fetch_checkpoint
from titan.checkpoint.reader import CheckpointReader
from titan.checkpoint.remote import Remote, open_remote
from titan.checkpoint.restore import find_corruption
from titan.cluster.rank_info import RankInfo
from titan.console.text import is_url, sanitize_lines
from titan.debug.activity import Activity
from titan.debug.rank_state import RankGroup, compact_ranks
from titan.debug.switches import set_switches
from titan.debug.thread_state import record_nccl_timeouts
from titan.debug.verdict import HangError
from titan.debug.watch import Watch
from titan.errors import ConfigError, RunError, describe_compiler_error, find_own_code_error
from titan.parallelism import mesh
from titan.parallelism.mesh import MODEL_PARALLEL, RunContext
from titan.run import identity
from titan.run.attempts import Attempt, use_previous_checkpoint
from titan.run.run import Run
from titan.training.build import build_train_step
from titan.training.evaluation.evaluator import StopRequestedError
from titan.training.signals import StopSignals, choose_stop_exit_code
from titan.training.trainer import Trainer, count_hook_seconds

log = logging.getLogger("titan")


def work(
    run: Run,
    attempt: Attempt,
    rank_info: RankInfo,
    store: Any = None,
    report_error: Callable[[Exception], object] = lambda error: None,
) -> int:
    """Train `run` as one of its ranks.

    Args:
        store: a store that the ranks have connected to already, under torchrun or srun.
        report_error: called with an error at once, before the clean-up, which may take as long as a save.

    Returns:
        0 when all steps are done, 130 when a signal ended them, 75 when a scheduler is to start them again.

    Raises:
        ConfigError: when no checkpoint to resume from is intact.
        RunError: when the run can't continue.
    """
    set_log_file(Path(run.directory) / "log" / f"rank-{rank_info.rank}.log")
    set_switches(run.debug)
    activity = Activity(run.cluster.timeout)
    activity.hook_timeout = run.cluster.hook_timeout
    watch = Watch(Path(run.directory), rank_info, attempt.number, activity, run.debug.hang_seconds, report_error)
    watch.judge.find_setting = partial(_find_timeout_setting, run)
    with StopSignals(rank_info.world_size == 1, rank_info.scheduled) as stop, watch:
        world = replace(_connect_ranks(run, attempt, rank_info, store), activity=activity)
        try:
            trainer = _build_trainer(run, attempt, world, stop, watch)
            exit_code = _run_trainer(trainer, report_error, watch)
        except StopRequestedError:
            return choose_stop_exit_code(stop.requeue)
        except Exception as error:
            if stop.requested and describe_compiler_error(error):
                log.warning("stopped while compiling: the signal ended the compiler too")
                return choose_stop_exit_code(stop.requeue)
            reported_error = to_user_error(run, error, watch)
            if reported_error is error:
                raise
            raise reported_error from error
        # only after success: with NCCL this waits for operations that other ranks may never start (pytorch #141510)
        world.close()
        return exit_code


def _connect_ranks(run: Run, attempt: Attempt, rank_info: RankInfo, store: Any) -> RunContext:
    """Join the process group and build this rank's groups."""
    if run.machine.device == "cuda":
        record_nccl_timeouts(Path(run.directory))
    exchanges = run.checkpoint.mode != "off" or bool(attempt.checkpoint or attempt.weights)  # about checkpoints
    timeout = run.cluster.timeout + count_hook_seconds(run)
    return mesh.connect_world(rank_info, run.layout, run.machine.device, timeout, store, exchanges)


def _build_trainer(run: Run, attempt: Attempt, world: RunContext, stop: StopSignals, watch: Watch) -> Trainer:
    """Build what trains, from the checkpoint that the attempt resumes from; the watcher learns its groups and names."""
    attempt, reader = _resolve_checkpoint(run, attempt, world)
    rank = world.rank_info
    log.info(
        "attempt %d of %s: rank %d of %d on %s", attempt.number, run.name, rank.rank, rank.world_size, world.device
    )
    watch.groups = list_groups(world)
    train_step = build_train_step(run, world, log.info)
    named_modules = [pair for stage in train_step.stages for pair in stage.named_modules() if pair[0]]
    watch.groups, watch.get_module_names = list_groups(world), lambda: {id(m): name for name, m in named_modules}
    return Trainer(run, attempt, world, train_step, stop, reader)


def _run_trainer(trainer: Trainer, report_error: Callable[[Exception], object], watch: Watch | None = None) -> int:
    """Train, and close the trainer; report an error before closing, which a hanging save would delay."""
    try:
        return trainer.train()
    except StopRequestedError:
        raise
    except Exception as error:
        reported_error = to_user_error(trainer.run, error, watch)
        if watch is not None and isinstance(reported_error, HangError):
            watch.wait_for_end()
        report_error(reported_error)
        raise
    finally:
        trainer.close()


def to_user_error(run: Run, error: Exception, watch: Watch | None = None) -> Exception:
    """Return an error that the user can act on as RunError, any other as it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return RunError(_explain_out_of_memory(run, error))
    timeout_match = re.search(
        r"Timed out waiting (\d+)ms", "\n".join(map(str, _iterate_causes(error)))
    )  # gloo; NCCL ends the process
    if timeout_match:
        hang_error = watch.find_hang_error() if watch is not None else None
        seconds = int(timeout_match[1]) / 1000 - count_hook_seconds(run)
        name = _find_timeout_setting(run, seconds)
        return hang_error or RunError(
            f"waited {seconds:g} s for the other ranks: one of them hangs, or is slower than {name} allows; "
            f"see the last lines of each rank's log in {run.directory}/log, or raise {name}."
        )
    if (sentence := describe_compiler_error(error)) is not None:
        log.error("torch.compile failed", exc_info=error)
        return RunError(sentence)
    is_user_error = isinstance(error, (ConfigError, RunError, StopRequestedError))
    own_error = None if is_user_error else find_own_code_error(error, identity.find_packages(run))
    if own_error is not None:
        log.error("your code failed", exc_info=error)
        return RunError(f"your code failed: {own_error}; correct it. The log of the rank has the traceback.")
    return error


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes: torch's pipelines wrap those of their stages."""
    while error is not None:
        yield error
        error = error.__cause__


def _find_timeout_setting(run: Run, seconds: float) -> str:
    """Return the name of the setting that a timeout comes from."""
    return "cluster.timeout" if seconds == run.cluster.timeout else "cluster.step_timeout"


def list_groups(world: RunContext) -> dict[str, RankGroup]:
    """Return this rank's process groups by their names, with the dimensions of the layout that they run along."""
    names = list(world.layout.mesh_degrees()) if world.mesh is not None else []
    named_groups = [("world", dist.group.WORLD), *((name, world.get_group(name)) for name in names)]
    named_groups += [("context", world.get_group("context")), ("model parallel", world.get_group(*MODEL_PARALLEL))]
    named_groups += [(name, m[name].get_group()) for m in world.data_meshes.values() for name in m.mesh_dim_names or ()]
    expert_meshes = {name: world.get_mesh(name, experts=True) for name in ("shard", "expert")}
    named_groups += [(f"experts' {name}", m.get_group()) for name, m in expert_meshes.items() if m is not None]
    groups: dict[str, RankGroup] = {}
    for name, group in named_groups if names else ():
        if group is not None and (group.group_name not in groups or [name] == names):
            groups[group.group_name] = RankGroup(name, compact_ranks(dist.get_process_group_ranks(group)))
    return groups


def _resolve_checkpoint(run: Run, attempt: Attempt, world: RunContext) -> tuple[Attempt, CheckpointReader | None]:
    """Return the attempt with an intact checkpoint: the one that it names, or the last complete one before it.

    The checkpoint's reader goes to the trainer, which restores from it.

    Raises:
        ConfigError: when there is none, or the initial weights are corrupt.
    """
    coordinator = Coordinator.from_world(world)
    _check_init_weights(run, attempt, coordinator)
    while attempt.checkpoint:
        folder, corruption = _fetch_checkpoint(run, attempt, coordinator)
        reader = CheckpointReader(folder)
        corruption = corruption or find_corruption(reader, coordinator, run.checkpoint.verify)
        if corruption is None:
            return replace(attempt, checkpoint=str(folder)), reader
        previous: Attempt | str | None = None
        if coordinator.rank == 0:
            try:
                previous = use_previous_checkpoint(run, attempt, corruption)
            except (ConfigError, OSError) as error:
                previous = str(error)
        previous = coordinator.broadcast(previous)
        if not isinstance(previous, Attempt):
            raise ConfigError(str(previous))
        attempt = previous
    return attempt, None


def _check_init_weights(run: Run, attempt: Attempt, coordinator: Coordinator) -> None:
    """Raise ConfigError when initial weights from a checkpoint differ from its checksums."""
    if attempt.weights is None or not coordinator.broadcast((Path(attempt.weights) / manifest.NAME).is_file()):
        return
    if corruption := find_corruption(CheckpointReader(attempt.weights), coordinator, run.checkpoint.verify):
        raise ConfigError(f"checkpoint.weights={run.checkpoint.weights}: is corrupt: {corruption}; give another one.")


def _fetch_checkpoint(run: Run, attempt: Attempt, coordinator: Coordinator) -> tuple[Path, str | None]:
    """Return the folder of the attempt's checkpoint, downloaded where it is remote, and a corruption found in it."""
    url = str(attempt.checkpoint)
    parent = url.rpartition("/")[0]
    is_copy = run.checkpoint.path is not None and parent == open_remote(run.checkpoint.path, run.directory).url
    if not (is_copy or is_url(url)):
        return Path(url), None
    try:
        return fetch_checkpoint(Remote(parent), attempt.step, Path(run.directory), coordinator), None
    except CoordinationError as error:
        if error.is_corrupt:
            return Path(run.directory), str(error)
        raise RunError(f"{url} could not be fetched ({error}); fix this and rerun the same command.") from error


def set_log_file(file: Path | None) -> None:
    """Send this process's log to a file; None: nowhere."""
    logging.raiseExceptions = False  # a full disk must not fill the terminal with tracebacks
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file) if file else logging.NullHandler()
    handler.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
    for previous in log.handlers:
        previous.close()
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class _SafeFormatter(logging.Formatter):
    """Formats lines without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize_lines(super().format(record))


def _explain_out_of_memory(run: Run, error: Exception) -> str:
    """Return torch's message with the settings that reduce memory."""
    options = [f"parallelism.microbatches={run.microbatches * 2}"] if run.microbatches < run.rank_rows else []
    options += ["memory=full"] if run.memory.checkpointing == "none" else []
    options += ["parallelism=fsdp"] if run.layout.shard == 1 else ["more devices"]
    message = str(error).split(". ")[0]
    return f"out of memory in {run.describe()}: {message}. Give one of {', '.join(options)}."


@contextmanager
def join_ranks(run: Run, rank_info: RankInfo) -> Iterator[tuple[RunContext, StopSignals]]:
    """Join the ranks of a job, and leave them at its end.

    Raises:
        ConfigError: for an error of the block that the user can fix.
        RunError: for another one that has an explanation.
    """
    set_log_file(Path(run.directory) / "log" / f"rank-{rank_info.rank}.log")
    set_switches(run.debug)
    with StopSignals(rank_info.world_size == 1, rank_info.scheduled) as stop:
        world = mesh.connect_world(
            rank_info, run.layout, run.machine.device, run.cluster.timeout, connect_exchange=True
        )
        try:
            yield world, stop
        except Exception as error:
            reported_error = to_user_error(run, error)
            if reported_error is error:
                raise
            raise reported_error from error
        world.close()  # only after success: see titan.training.worker
        set_log_file(None)  # the file of one rank is in a temporary directory


def fetch_verified(run: Run, path: str, step: int, world: RunContext, setting: str) -> CheckpointReader:
    """Return the reader of a checkpoint, which is fetched where it is a copy elsewhere; all ranks call it together.

    Args:
        run: where to fetch it to, and whether to verify checksums.
        setting: the user's setting that chose the step, for messages.

    Raises:
        ConfigError: when it differs from its checksums; unlike a run, this marks nothing.
        RunError: when it can't be fetched.
    """
    coordinator = Coordinator.from_world(world)
    if not coordinator.broadcast(Path(path).is_dir() and (Path(path) / manifest.NAME).is_file()):
        try:
            path = str(fetch_checkpoint(Remote(path.rpartition("/")[0]), step, Path(run.directory), coordinator))
        except CoordinationError as error:
            raise RunError(f"{path} could not be fetched ({error}); fix this and rerun the same command.") from error
    reader = CheckpointReader(path)
    if difference := find_corruption(reader, coordinator, run.checkpoint.verify):
        raise ConfigError(f"{setting}={step}: {path} is damaged: {difference}; give an earlier one's step.")
    return reader
