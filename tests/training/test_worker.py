"""How a rank ends: its error message and what it closes; a rank that failed does not destroy its process groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launchers import process
from tests.support.ranks import run_ranks
from tests.support.runs import begin_run, compose_tiny_run, train_run
from tests.support.tiers import full
from titan import train as training
from titan.cluster.rank_info import RankInfo
from titan.errors import RunError
from titan.generation import worker as generation
from titan.run.attempts import Attempt
from titan.run.directory import lock_directory
from titan.training import worker
from titan.training.trainer import Trainer


class Closing:
    """A trainer that fails, and records the calls."""

    def __init__(self, run: Any, error: Exception) -> None:
        self.run, self.error, self.done = run, error, list[Any]()

    def train(self) -> int:
        raise self.error

    def close(self) -> None:
        self.done.append("closed")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(ValueError("a bug"), "a bug", id="bug"),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory in", id="memory"),
        pytest.param(
            RuntimeError("x] Timed out waiting 600000ms for recv"), "waited 600 s for the other", id="timeout"
        ),
    ],
)
def test_an_error_is_reported_before_a_save_has_ended(error: Exception, message: str, tmp_path: Path) -> None:
    trainer: Any = Closing(compose_tiny_run(tmp_path), error)
    with pytest.raises(type(error)):
        worker._run_trainer(trainer, trainer.done.append)
    reported, closed = trainer.done
    assert str(reported).startswith(message)
    assert closed == "closed"


@pytest.mark.parametrize(("milliseconds", "name"), [(600000, "step_timeout"), (1800000, "timeout")])
def test_a_timeout_names_its_setting(milliseconds: int, name: str, tmp_path: Path) -> None:
    error = worker.to_user_error(
        compose_tiny_run(tmp_path), RuntimeError(f"a] Timed out waiting {milliseconds}ms for send operation")
    )
    assert isinstance(error, RunError)
    assert f"slower than cluster.{name} allows" in str(error)


def test_a_timeout_inside_of_a_pipeline_is_one_too(tmp_path: Path) -> None:
    error = RuntimeError("stage 0 failed")
    error.__cause__ = RuntimeError("a] Timed out waiting 600000ms for send operation")
    assert isinstance(worker.to_user_error(compose_tiny_run(tmp_path), error), RunError)


def destroyed() -> list[bool]:
    """Return a list that gets an entry for each time that process groups are destroyed from now on."""
    calls, real = list[bool](), dist.destroy_process_group

    def noted(*groups: Any) -> None:
        calls.append(True)
        real(*groups)

    dist.destroy_process_group = noted
    return calls


@pytest.mark.full
@pytest.mark.parametrize("fails", [full(False), True], ids=["ends", "fails"])
def test_only_a_rank_that_ends_well_destroys_its_groups(fails: bool, tmp_path: Path) -> None:
    def before(trainer: Trainer) -> list[bool]:
        def step(*clock: Any) -> Any:
            dist.barrier()  # both come here: the error is not that the other has gone
            raise RunError("no step")

        if fails:
            trainer._step = step  # type: ignore[method-assign]
        return destroyed()

    for rank in train_run(compose_tiny_run(tmp_path / "run", layout="ddp2"), before):
        assert (rank.failure, rank.extra) == (("no step", []) if fails else (None, [True]))


@pytest.mark.full
def test_a_rank_that_fails_before_training_leaves_them_alone(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path / "run", layout="ddp2")
    with lock_directory(Path(run.directory)):
        attempt = begin_run(run)
        assert isinstance(attempt, Attempt)

        def rank(number: int, size: int) -> tuple[str, list[bool], bool]:
            def fail(*arguments: Any) -> Any:
                raise RunError("no model")

            calls = destroyed()
            worker.build_train_step = fail  # type: ignore[assignment]
            try:
                worker.work(run, attempt, RankInfo(number, size, number, f"file://{tmp_path}/meeting"))
            except RunError as failure:
                return str(failure), calls, dist.is_initialized()
            return "", calls, False

        assert run_ranks(rank, 2, joined=False) == [("no model", [], True)] * 2


def test_a_rank_that_fails_to_generate_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        is_rank0, closed = False, False

        def close(self) -> None:
            self.closed = True

    class Job:
        layout = device = tokenizer = path = precision = None

    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    world, job = World(), Job()
    monkeypatch.setattr(generation.mesh, "connect_world", lambda *arguments: world)
    monkeypatch.setattr(generation, "open_weights", fail)
    with pytest.raises(RunError, match="out of memory"):
        generation.work(job, RankInfo())  # type: ignore[arg-type]
    assert not world.closed


def test_a_rank_under_torchrun_leaves_without_tidying_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = list[int]()
    monkeypatch.setattr(process.rank_info, "from_environment", lambda env: RankInfo(1, 2))
    monkeypatch.setattr(training, "main", lambda: 1 // 0)
    monkeypatch.setattr(process, "exit_now", left.append)
    monkeypatch.setattr(process.output, "protect_streams", lambda: None)  # this process keeps its own
    training.cli()
    assert left == [1]
    assert "ZeroDivisionError" in capsys.readouterr().err
