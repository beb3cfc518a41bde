"""The body of a rank: join the others, assemble, train, leave."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from titan.checkpoint import manifest
from titan.checkpoint.coordinator import CoordinationError, Coordinator
from titan.checkpoint.remote import Remote, is_url, of
from titan.checkpoint.restore import damage
from titan.checkpoint.transfer import fetched
from titan.cluster.rank_info import RankInfo
from titan.console.text import safe_lines
from titan.debug.switches import set_switches
from titan.errors import ConfigError, RunError
from titan.parallelism import mesh
from titan.parallelism.mesh import World
from titan.run.attempts import Attempt, use_previous_checkpoint
from titan.run.run import Run
from titan.training.build import build
from titan.training.evaluation import StopRequested
from titan.training.signals import StopSignals, exit_code_of_stop
from titan.training.trainer import Trainer

log = logging.getLogger("titan")


def work(
    run: Run,
    attempt: Attempt,
    rank_info: RankInfo,
    store: Any = None,
    failed: Callable[[Exception], object] = lambda error: None,
) -> int:
    """Train `run` as one of its ranks.

    Args:
        run: the experiment.
        attempt: which execution of it this is.
        place: this rank.
        store: what the ranks have met at already, under torchrun or srun.
        failed: told of an error at once, before anything is put in order, which may take as long as a save does.

    Returns:
        0 when all steps are done, 130 when a signal ended them, 75 when a scheduler's did that is to start them again.

    Raises:
        RunError: when the run can't go on, in a plain sentence.
    """
    _log_to(Path(run.directory) / "log" / f"rank-{rank_info.rank}.log")
    set_switches(run.debug)
    with StopSignals(rank_info.world_size == 1, rank_info.scheduled) as stop:
        world = mesh.connect(
            rank_info, run.layout, run.machine.device, run.cluster.timeout, store, _needs_exchange(run, attempt)
        )
        try:
            attempt = _resolve_checkpoint(run, attempt, world)
            log.info(
                "attempt %d of %s: rank %d of %d on %s",
                attempt.number,
                run.name,
                rank_info.rank,
                rank_info.world_size,
                world.device,
            )
            train_step = build(run, world, log.info)
            ended = _trained(Trainer(run, attempt, world, train_step, stop), failed)
        except StopRequested:
            return exit_code_of_stop(stop.again)
        except Exception as error:
            if stop.asked and _of_the_compiler(error):
                log.warning("stopped while compiling: the signal ended the compiler too")
                return exit_code_of_stop(stop.again)
            plain = _user_error(run, error)
            if plain is error:
                raise
            raise plain from error
        # At no other end: with NCCL that waits for operations that other ranks have begun or not (pytorch #141510).
        world.close()
        return ended


def _trained(trainer: Trainer, failed: Callable[[Exception], object]) -> int:
    """Train, and close what the trainer has opened; of an error tell first."""
    try:
        return trainer.train()
    except StopRequested:
        raise
    except Exception as error:
        failed(_user_error(trainer.run, error))
        raise
    finally:
        trainer.close()


def _user_error(run: Run, error: Exception) -> Exception:
    """An error as a sentence, where it is the user's to act on."""
    if isinstance(error, torch.OutOfMemoryError):
        return RunError(_out_of_memory(run, error))
    if waited := re.search(r"Timed out waiting (\d+)ms", str(error)):  # gloo's words; NCCL ends the process itself
        return RunError(_timed_out(run, int(waited[1]) / 1000))
    return error


def _timed_out(run: Run, seconds: float) -> str:
    name = "step_timeout" if seconds == run.cluster.step_seconds else "timeout"
    return (
        f"waited {seconds:g} s for the other ranks: one of them stands still, or is slower than cluster.{name} allows; "
        f"see what each did last in {run.directory}/log, or raise cluster.{name}."
    )


def _of_the_compiler(error: Exception) -> bool:
    """Whether torch.compile failed: its compiler is a process of its own, to which a terminal's Ctrl-C goes as well."""
    return type(error).__module__.startswith(("torch._inductor", "torch._dynamo"))


def _needs_exchange(run: Run, attempt: Attempt) -> bool:
    """Whether the ranks have anything to say of checkpoints."""
    return run.checkpoint.mode != "off" or bool(attempt.checkpoint or attempt.weights)


def _resolve_checkpoint(run: Run, attempt: Attempt, world: World) -> Attempt:
    """The attempt, from a checkpoint whose content is whole: the one that it names, or the complete one before it.

    Raises:
        ConfigError: when there is none.
    """
    coordinator = Coordinator(world.rank_info.rank, world.rank_info.world_size, world.aside)
    _check_init_weights(run, attempt, coordinator)
    while attempt.checkpoint:
        folder, wrong = _fetched(run, attempt, coordinator)
        wrong = wrong or damage(folder, coordinator, run.checkpoint.verify)
        if wrong is None:
            return replace(attempt, checkpoint=str(folder))
        word = coordinator.broadcast(_previous_attempt(run, attempt, wrong) if coordinator.rank == 0 else None)
        if not isinstance(word, Attempt):
            raise ConfigError(str(word))
        attempt = word
    return attempt


def _check_init_weights(run: Run, attempt: Attempt, coordinator: Coordinator) -> None:
    """Refuse given weights whose checksums differ, where they are a checkpoint's."""
    if attempt.weights is None or not coordinator.broadcast((Path(attempt.weights) / manifest.NAME).is_file()):
        return
    if wrong := damage(Path(attempt.weights), coordinator, run.checkpoint.verify):
        raise ConfigError(f"checkpoint.weights={run.checkpoint.weights}: is damaged: {wrong}; give another one.")


def _fetched(run: Run, attempt: Attempt, coordinator: Coordinator) -> tuple[Path, str | None]:
    """The folder of the attempt's checkpoint, brought here where it is elsewhere; and what is damaged in it.

    Raises:
        RunError: when it can't be brought here, for a reason that may pass.
    """
    url = str(attempt.checkpoint)
    parent = url.rpartition("/")[0]
    copies = run.checkpoint.path is not None and parent == of(run.checkpoint.path, run.directory).url
    if not (copies or is_url(url)):
        return Path(url), None
    try:
        return fetched(Remote(parent), attempt.step, Path(run.directory), coordinator), None
    except CoordinationError as error:
        if error.damaged:
            return Path(run.directory), str(error)
        raise RunError(f"{url} could not be fetched ({error}); mend that, and give the same command again.") from error


def _previous_attempt(run: Run, attempt: Attempt, wrong: str) -> Attempt | str:
    try:
        return use_previous_checkpoint(run, attempt, wrong)
    except (ConfigError, OSError) as error:
        return str(error)


def _log_to(file: Path) -> None:
    logging.raiseExceptions = False  # a full disk shall not fill the terminal too
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(_Safe("%(asctime)s %(levelname)s %(message)s"))
    for old in log.handlers:
        old.close()
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class _Safe(logging.Formatter):
    """Writes lines without secrets and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_lines(super().format(record))


def _out_of_memory(run: Run, error: Exception) -> str:
    ways = [f"parallelism.microbatches={run.microbatches * 2}"] if run.microbatches < run.rank_rows else []
    ways += ["memory=full"] if run.memory.checkpointing == "none" else []
    ways += ["parallelism=fsdp"] if run.layout.shard == 1 else ["more devices"]
    first = str(error).split(". ")[0]
    return f"out of memory in {run.describe()}: {first}. Give one of {', '.join(ways)}."
