"""`hydra/sweeper=optuna`: which trials a study asks for, what it gets of them, kills, and early ends."""

from __future__ import annotations

import importlib.metadata
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from launchers.command import run_command
from launchers.search import study as spaces
from launchers.search.pool import HOOK, TrialPool, run_search
from launchers.search.study import STORAGE, check_settings, open_study
from launchers.search.sweeper import check_packages
from launchers.session import RESULTS, SweepSession
from launchers.slurm import state
from launchers.slurm.sweep import SlurmSweep
from launchers.start import run_local
from launchers.trials import Trial
from tests.support.runs import TINY, compose_test_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.files.run_directory import STOP_REQUEST
from titan.run.run import Run
from titan.sweep.ledger import SweepSpec
from titan.sweep.schema import OptunaSearch, SlurmLaunch, Sweep

optuna = pytest.importorskip("optuna", minversion="4")
SEARCH = ["-m", "hydra/sweeper=optuna", *TINY, "name=s"]
INTERVAL = "optimizer.lr=tag(log,interval(1e-4,1e-1))"
RATE = ["optimizer.lr=tag(log,interval(1e-4,1e-1))"]


@pytest.fixture(scope="module")
def run() -> Run:
    return compose_test_run([*TINY, "evaluation.tokens=64", "evaluation.every=2", "training.steps=10"])


def build_space(*overrides: str) -> spaces.Space:
    return spaces.build_space(OverridesParser.create().parse_overrides(list(overrides)))


class Kill(BaseException):
    """Ends a search as a kill does: its trials stay as they are."""


class FakeLauncher:
    """A launcher that runs a function in place of each trial, one at a time; the exit code 130 of one is Ctrl-C."""

    def __init__(self, root: Path, run: Run, objective: Callable[[dict[str, float], Path], int]) -> None:
        self.root, self.run, self.objective, self.started = root, run, objective, list[str]()
        self.session = SweepSession()

    def expand_one(self, values: Sequence[str], number: int) -> Trial:
        identity = "_".join(values)
        if "bad" in identity:
            raise ConfigError("these values can't work together.")
        return Trial(identity, tuple(values), replace(self.run, directory=str(self.root / identity)))

    def expand(self, overrides: Sequence[Sequence[str]], number: int, fixed: frozenset[str]) -> list[Trial]:
        return [self.expand_one(overrides[0], number)]

    def check_inputs(self, batch: Sequence[Trial]) -> None:
        pass

    def check_feedback(self, batch: Sequence[Trial]) -> float:
        return float("inf")

    def launch_pool(self, source: TrialPool) -> None:
        running: list[Trial] = []
        while running := [*running, *source.ask()]:
            assert len(running) <= source.settings.n_jobs
            trial = running.pop(0)
            self.started.append(trial.id)
            code = self._run(trial)
            source.tell(trial, code)
            if code == 130:
                raise KeyboardInterrupt

    def search(self, settings: OptunaSearch, *overrides: str) -> Any:
        """Run a study in this process until it ends or is stopped; return its trials."""
        space = build_space(*overrides)
        with suppress(KeyboardInterrupt):
            run_search(self, settings, Sweep(), space, [], lambda: None)
        with open_study(self.root, settings, "minimize", space, []) as study:
            return study.get_trials()

    def _run(self, trial: Trial) -> int:
        folder = Path(trial.run.directory)
        folder.mkdir(exist_ok=True)
        values = {o.partition("=")[0]: float(o.partition("=")[2]) for o in trial.varied}
        return self.objective(values, folder)


def finish(folder: Path, loss: float | None, **more: Any) -> int:
    content = {"finished": True, "step": 10, "science_id": "a", "validation_loss": loss} | more
    (folder / "result.json").write_text(json.dumps(content))
    return 0


def square(values: dict[str, float], folder: Path) -> int:
    return finish(folder, (values["optimizer.lr"] - 0.01) ** 2)


@pytest.mark.parametrize(
    ("override", "values", "kind"),
    [
        pytest.param("a=1,b,null", ("1", "b", "null"), "CategoricalDistribution", id="choice"),
        pytest.param("a=[1,2],[3]", ("[1,2]", "[3]"), "CategoricalDistribution", id="lists"),
        pytest.param("a=range(1,8,3)", (1, 7, 3), "IntDistribution", id="range-without-its-end"),
        pytest.param("a=range(0,1,0.25)", (0.0, 0.75, 0.25), "FloatDistribution", id="floats"),
        pytest.param("a=range(0,1,0.3)", (0.0, 0.9, 0.3), "FloatDistribution", id="floats-that-round"),
        pytest.param("a=range(0.7,0.0,-0.2)", (0.1, 0.7, 0.2), "FloatDistribution", id="downwards"),
        pytest.param("a=interval(1,5)", (1.0, 5.0, None), "FloatDistribution", id="interval"),
        pytest.param("a=tag(log,int(interval(1,5)))", (1, 5, 1), "IntDistribution", id="whole-numbers"),
    ],
)
def test_values_as_typed_become_distributions(override: str, values: tuple[Any, ...], kind: str) -> None:
    made: Any = build_space(override)["a"]
    assert type(made).__name__ == kind
    assert values == (made.choices if "Cat" in kind else (made.low, made.high, made.step))
    assert getattr(made, "log", False) == ("log" in override)


@pytest.mark.parametrize("override", ["a=range(0,1,0.3)", "a=range(0.1,0.8,0.2)", "a=range(1,8,3)"])
def test_a_grid_has_all_values_of_a_range(override: str) -> None:
    (typed,) = OverridesParser.create().parse_overrides([override])
    values = spaces.list_values("a", build_space(override)["a"])
    assert values == pytest.approx([float(value) for value in typed.sweep_string_iterator()])
    assert all(build_space(override)["a"]._contains(value) for value in values)


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_a_study_asks_for_trials_and_learns(tmp_path: Path, run: Run, sampler: str) -> None:
    machine = FakeLauncher(tmp_path, run, square)
    varied = ["optimizer.lr=1e-3,1e-2,1e-1", "training.seed=0,1"] if sampler == "grid" else RATE
    settings = OptunaSearch(n_trials=30, n_jobs=3, sampler=sampler, startup_trials=10)  # type: ignore[arg-type]
    trials = machine.search(settings, *varied)
    assert len(trials) == len(set(machine.started)) == (6 if sampler == "grid" else 30)
    best = yaml.safe_load((tmp_path / RESULTS).read_text())
    assert best["best_value"] == min(trial.value for trial in trials)
    if sampler == "tpe":  # it draws nearer to the minimum than the ten random trials at first
        distances = [abs(math.log(trial.params["optimizer.lr"] / 0.01)) for trial in trials]
        assert sum(distances[20:]) < sum(distances[:10])


def test_after_a_kill_the_running_trials_come_first_and_finished_ones_not_again(tmp_path: Path, run: Run) -> None:
    def kill_third(values: dict[str, float], folder: Path) -> int:
        if len(machine.started) == 3:
            raise Kill
        return square(values, folder)

    machine, settings = FakeLauncher(tmp_path, run, kill_third), OptunaSearch(n_trials=6, n_jobs=2, sampler="random")
    with pytest.raises(Kill):
        machine.search(settings, *RATE)
    file = tmp_path / STORAGE
    file.write_bytes(file.read_bytes() + b'{"op_code":6,"wor')  # a line that the kill cut short
    again = FakeLauncher(tmp_path, run, square)
    trials = again.search(settings, *RATE)
    assert again.started[0] == machine.started[2] and not set(machine.started[:2]) & set(again.started)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 6
    assert len({*machine.started, *again.started}) == 6  # the sampler does not draw its first values again
    assert len(again.search(replace(settings, n_trials=7), *RATE)) == 7


def test_a_stopped_trial_is_left_to_the_next_command(tmp_path: Path, run: Run) -> None:
    machine, settings = FakeLauncher(tmp_path, run, lambda values, folder: 130), OptunaSearch(n_trials=1)
    assert [trial.state.name for trial in machine.search(settings, *RATE)] == ["RUNNING"]
    again = FakeLauncher(tmp_path, run, square)
    assert [trial.state.name for trial in again.search(settings, *RATE)] == ["COMPLETE"]
    assert again.started == machine.started


@pytest.mark.parametrize(
    ("loss", "code", "worst", "expected"),
    [
        pytest.param(2.0, 0, None, ("COMPLETE", 2.0), id="finished"),
        pytest.param(None, 0, None, ("COMPLETE", float("inf")), id="not-finite"),
        pytest.param(2.0, 1, None, ("FAIL", None), id="failed"),
        pytest.param(2.0, 1, 99.0, ("COMPLETE", 99.0), id="failed-with-a-value"),
    ],
)
def test_what_the_study_gets(
    tmp_path: Path, run: Run, loss: float | None, code: int, worst: float | None, expected: tuple[str, Any]
) -> None:
    machine = FakeLauncher(tmp_path, run, lambda values, folder: finish(folder, loss) or code)
    space, settings, sweep = build_space(*RATE), OptunaSearch(n_trials=1), Sweep(worst=worst)
    with open_study(tmp_path, settings, "minimize", space, []) as study:
        pool = TrialPool(study, space, settings, sweep, float("inf") if worst is None else worst, machine.expand_one)
        (trial,) = pool.ask()
        pool.tell(trial, machine._run(trial))
        (trial_state,) = study.get_trials()
    assert (trial_state.state.name, trial_state.value) == expected


def test_failures_in_a_row_end_the_search(tmp_path: Path, run: Run) -> None:
    machine = FakeLauncher(tmp_path, run, lambda values, folder: 1)
    assert len(machine.search(OptunaSearch(n_trials=20, max_failures=3), *RATE)) == 3


def test_values_that_do_not_go_together_count_as_failed(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = FakeLauncher(tmp_path, run, lambda values, folder: finish(folder, 1.0))
    trials = machine.search(OptunaSearch(sampler="grid"), "a=1,bad,2")
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "these values can't work together" in capsys.readouterr().out


def test_the_values_of_a_running_trial_are_not_run_beside_it(tmp_path: Path, run: Run) -> None:
    machine = FakeLauncher(tmp_path, run, lambda values, folder: finish(folder, 1.0))
    trials = machine.search(OptunaSearch(n_trials=6, n_jobs=3, sampler="random"), "a=1,1.0")
    assert [trial.value for trial in trials] == [1.0] * 6


def prune(root: Path, run: Run, settings: OptunaSearch, name: str, every: int, gains: Sequence[float]) -> list[Any]:
    """Run a grid of trials that end at 1, 2, 3 and so on, in turn; those that are asked to end do so, as a run does.

    Args:
        root: of the study.
        run: of ten steps.
        settings: of the sweeper.
        name: the setting that varies.
        every: steps between evaluations.
        gains: what each loses of its loss in the last two steps.
    """

    def evaluate(values: dict[str, float], folder: Path) -> int:
        level, gain = values[name], gains[round(values[name]) - 1]
        (folder / STOP_REQUEST).unlink(missing_ok=True)
        for step in range(every, 10, every):
            record = {"step": step, "validation_loss": level + 1 / step + gain}
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0}) + "\n" + json.dumps(record) + "\n")
            pool.prune()
            if (folder / STOP_REQUEST).exists():
                reason = (folder / STOP_REQUEST).read_text()
                return finish(folder, level, finished=False, step=step, ended_by={"hook": HOOK, "reason": reason})
        return finish(folder, level)

    schedule: Any = replace(run.schedule, decay=0.4)  # type: ignore[type-var]
    changed = replace(run, evaluation=replace(run.evaluation, every=every), schedule=schedule)
    machine = FakeLauncher(root, changed, evaluate)
    space = build_space(f"{name}={','.join(str(k + 1) for k in range(len(gains)))}")
    with open_study(root, settings, "minimize", space, []) as study:
        pool: Any = TrialPool(study, space, settings, Sweep(), float("inf"), machine.expand_one)
        while batch := pool.ask():
            pool.tell(batch[0], machine._run(batch[0]))
        assert pool.codes == [0] * len(gains)
        return study.get_trials()


@pytest.mark.parametrize("pruner", ["median", "successive_halving", "hyperband"])
def test_a_trial_whose_losses_are_high_is_asked_to_end(tmp_path: Path, run: Run, pruner: str) -> None:
    """What varies leaves the shape of the curve as it is: trials end at any evaluation."""
    settings = OptunaSearch(sampler="grid", pruner=pruner, startup_trials=1)  # type: ignore[arg-type]
    first, *others = prune(tmp_path, run, settings, "training.seed", 2, [0.0] * 9)
    assert first.state.name == "COMPLETE" and first.intermediate_values == {n: 1 + 0.5 / n for n in (1, 2, 3, 4)}
    assert "PRUNED" in [trial.state.name for trial in others]
    pruned = next(trial for trial in others if trial.state.name == "PRUNED")
    assert len(pruned.intermediate_values) < 4
    if pruner == "median":
        assert {trial.state.name for trial in others} == {"PRUNED"}


@pytest.mark.parametrize("pruner", ["median", "successive_halving", full("hyperband")])
def test_no_trial_ends_before_its_learning_rate_has_decayed(tmp_path: Path, run: Run, pruner: str) -> None:
    """It falls after step 6 of ten, to half its peak in step 9."""
    settings = OptunaSearch(sampler="grid", pruner=pruner, startup_trials=1)  # type: ignore[arg-type]
    trials = prune(tmp_path, run, settings, "optimizer.lr", 1, [0.0] * 9)
    ends = [max(trial.intermediate_values) for trial in trials if trial.state.name == "PRUNED"]
    assert ends and set(ends) == {9}


@pytest.mark.parametrize("name", ["optimizer.lr", "training.seed"])
def test_the_margin_ends_trials_that_are_further_behind_than_any_made_up(tmp_path: Path, run: Run, name: str) -> None:
    """The sixth trial makes up 3.5 in its last steps; trials after the tenth end where they are further behind."""
    gains = [0.0] * 14
    gains[5] = 3.5
    trials = prune(tmp_path, run, OptunaSearch(sampler="grid", pruner="margin"), name, 1, gains)
    ended = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert [trial.number for trial in ended] == [10, 11, 12, 13]
    assert {max(trial.intermediate_values) for trial in ended} == ({9} if name == "optimizer.lr" else {1})
    (stopped,) = (tmp_path / f"{name}=11").glob("result.json")
    reason = json.loads(stopped.read_text())["ended_by"]["reason"]
    assert (
        "pruner=margin ended it after evaluation" in reason and "further above the best than the 2.5 that any" in reason
    )
    assert "of 10 trials made up from there (rank correlation of their losses there with their ends: 0.9" in reason


@pytest.mark.parametrize(
    ("change", "direction", "varied", "fixed", "message"),
    [
        pytest.param({}, "maximize", RATE, [], "direction=minimize", id="direction"),
        pytest.param({}, "minimize", ["optimizer.lr=1,2"], [], "optimizer.lr has other choices", id="choices"),
        pytest.param({}, "minimize", ["training.seed=0,1"], [], "optimizer.lr, training.seed", id="other-names"),
        pytest.param({}, "minimize", [*RATE, "training.seed=0,1"], [], "of training.seed", id="one-more"),
        pytest.param({}, "minimize", RATE, ["model=llama1b"], "model=llama1b", id="settings"),
        pytest.param({}, "minimize", RATE, ["cluster.time=1h"], None, id="cluster"),
        pytest.param({"study_name": "b"}, "maximize", RATE, ["model=llama1b"], None, id="another-study"),
    ],
)
def test_a_study_continues_with_the_same_settings_only(
    tmp_path: Path, change: dict[str, Any], direction: str, varied: list[str], fixed: list[str], message: str | None
) -> None:
    settings = OptunaSearch()
    with open_study(tmp_path, settings, "minimize", build_space(*RATE), []) as study:
        study.tell(study.ask(build_space(*RATE)), 1.0)
        with pytest.raises(ConfigError, match="another command has this study"):  # noqa: SIM117
            with open_study(tmp_path, settings, "minimize", build_space(*RATE), []):
                pass
    opened = open_study(tmp_path, replace(settings, **change), direction, build_space(*varied), fixed)
    if message is None:
        with opened:
            return
    with pytest.raises(ConfigError, match=message), opened:
        pass


@pytest.mark.parametrize(
    ("varied", "message"),
    [
        pytest.param(["optimizer.lr=1e-3,1e-2", "model.dim=interval(1,2)"], "optimizer.lr is a choice", id="numbers"),
        pytest.param(["a=x,y", "b=x,y", "c=interval(1,2)"], "a and b are a choice", id="several"),
        pytest.param([*RATE, "a=range(1,8,3)", "b=int(interval(1,5))"], None, id="numbers-of-a-range"),
    ],
)
def test_cmaes_takes_numbers_only(varied: list[str], message: str | None) -> None:
    settings = OptunaSearch(sampler="cmaes")
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_settings(settings, build_space(*varied))


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["evaluation.tokens=64"], "hydra/sweeper=optuna: nothing varies", id="nothing"),
        pytest.param(
            [INTERVAL, "evaluation.tokens=64", "hydra.sweeper.pruner=median"],
            "give evaluation.every below",
            id="pruner",
        ),
        full(
            [INTERVAL, "evaluation.tokens=64", "hydra.sweeper.pruner=median", "evaluation.every=1", "training.steps=4"],
            "may end only after the learning rate has decayed", id="pruner-before-the-decay",
        ),
        pytest.param([INTERVAL, "hydra.sweeper.sampler=gird"], "hydra.sweeper.sampler=gird", id="sampler"),
        full([INTERVAL, "hydra.sweeper.storage=sqlite:///a"], "is no file", id="storage"),
        full([INTERVAL, "evaluation.tokens=64", "hydra.sweeper.sampler=grid"], "has an interval", id="grid"),
        full([INTERVAL], "sweep.objective=validation_loss: evaluation.tokens=0", id="no-objective"),
        full(["optimizer.lr=interval(1,-1)", "evaluation.tokens=64"], "optimizer.lr=interval", id="interval"),
        pytest.param(
            [INTERVAL, "optimizer=adamw,muon", "evaluation.tokens=64", "hydra.sweeper.sampler=cmaes"],
            "hydra.sweeper.sampler=cmaes: optimizer is a choice of values, which it can't learn from; take "
            "hydra.sweeper.sampler=tpe, or give an interval.", id="cmaes-and-a-choice",
        ),
        full(["model.head_dim=4,3", "evaluation.tokens=64"], "nothing was started", id="corner"),
        full(
            [INTERVAL, "evaluation.tokens=64", "hydra/launcher=slurm", "hydra.launcher.wait=false"],
            "hydra.launcher.wait=false", id="no-wait",
        ),
    ],
)  # fmt: skip
def test_what_can_not_work_is_one_sentence(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command([*SEARCH, *overrides], run_local) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.glob("runs/s/*/run.yaml"))


@pytest.mark.full
def test_a_search_of_real_runs_is_killed_goes_on_and_prunes(tmp_path: Path) -> None:
    overrides = [
        "evaluation.tokens=64", "evaluation.every=20", "training.steps=1200", "metrics.sample_tokens=0",
        "schedule.decay=0.95",
        "hydra.sweeper.sampler=grid", "hydra.sweeper.startup_trials=1", "hydra.sweeper.pruner=median",
        "optimizer.lr=1e-2,1e-3,1e-6",
    ]  # fmt: skip
    command = [sys.executable, "-m", "titan.train", *SEARCH, *overrides]
    root = tmp_path / "runs/s"
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (root / "lr-0.001/run.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "lr=0.01" not in "".join(line for line in again.stdout.splitlines() if line.startswith("["))
    results = {f.parent.name: json.loads(f.read_text()) for f in root.glob("*/result.json")}
    assert results["lr-0.01"]["finished"] and len(results) == 3
    assert results["lr-1e-6"]["ended_by"]["hook"] == HOOK and results["lr-1e-6"]["step"] < 1200
    assert "study: 1 complete, 2 pruned" in again.stdout and "best: optimizer.lr=0.01" in again.stdout
    compared = subprocess.run(
        [sys.executable, "-m", "titan.compare", str(root)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "2 were ended early by a hook" in compared.stdout and "failed" not in compared.stdout.lower()


def finish_one(values: dict[str, float], folder: Path) -> int:
    return finish(folder, 1.0)


ENDS = [
    pytest.param({"n_trials": 3}, [finish_one], RATE, "finished: 3 of 3 trials of the study; python -m titan.compare ",
                 "study: 3 complete (hydra.sweeper.n_trials=3)", id="finished"),
    pytest.param({"n_trials": 3}, [finish_one] * 2, RATE,
                 "finished: 3 of 3 trials of the study; nothing to do; python -m titan.compare ",
                 "study: 3 complete", id="nothing-to-do"),
    pytest.param({"n_trials": 3}, ["stop"], RATE,
                 "finished: 1 of 3 trials of the study; the same command continues it; python -m titan.compare ",
                 "study: 1 complete, 1 not finished", id="stopped"),
    pytest.param({"n_trials": 3}, ["stop", finish_one], RATE,
                 "finished: 3 of 3 trials of the study; python -m titan.compare ", "study: 3 complete", id="resumed"),
    pytest.param({"n_trials": 2}, [lambda values, folder: 1], RATE,
                 "finished: 0 of 2 trials of the study; python -m titan.status ", "study: 2 failed", id="failed"),
    pytest.param({"n_trials": 20, "sampler": "grid"}, [finish_one], ["a=1,2,3"],
                 "finished: 3 of 3 trials of the study; python", "study: 3 complete", id="grid"),
    pytest.param({"n_trials": 4, "sampler": "grid"}, [finish_one], ["a=1,2,3", "b=1,2"],
                 "finished: 4 of 4 trials of the study; python",
                 "2 of 6 combinations have not begun; hydra.sweeper.n_trials=6 runs all", id="a-part-of-a-grid"),
    pytest.param({"n_trials": 1, "sampler": "grid"}, [lambda values, folder: 1], ["a=1,2"],
                 "finished: 0 of 1 trial of the study; python", "1 of 2 combinations has not begun; ",
                 id="one-of-a-grid-is-left"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "commands", "varied", "line", "more"), ENDS)
def test_the_end_counts_the_trials_of_the_study(
    options: dict[str, Any],
    commands: list[Any],
    varied: list[str],
    line: str,
    more: str,
    tmp_path: Path,
    run: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command that stops ends with Ctrl-C in its second trial."""
    for body in commands:
        capsys.readouterr()
        launcher = FakeLauncher(tmp_path, run, stop_second if body == "stop" else body)
        with pytest.raises(KeyboardInterrupt) if body == "stop" else nullcontext():
            run_search(launcher, OptunaSearch(**options), Sweep(), build_space(*varied), [], lambda: None)
    out = capsys.readouterr().out
    assert line in out and more in out
    assert ("not begun" in out) == ("not begun" in more)


def stop_second(values: dict[str, float], folder: Path) -> int:
    return 130 if list(folder.parent.glob("*/result.json")) else finish(folder, 1.0)


def test_slurm_jobs_are_submitted_one_after_another(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs run at a time; a job that has ended is replaced by that of the next trial."""
    machine, submitted = FakeLauncher(tmp_path, run, square), list[int]()

    def run_job(self: SlurmSweep, shape: object, submission: Any) -> list[str]:
        folders = [Path(line) for line in submission.trial_list.with_suffix(".runs").read_text().splitlines()]
        submitted.append(len(folders))
        for folder in folders:
            folder.mkdir(exist_ok=True)
            finish(folder, 1.0 + sum(submitted))
        return [f"{100 + len(submitted)}_{i}" for i in range(len(folders))]

    monkeypatch.setattr(SlurmSweep, "_check_settings", lambda self: None)
    monkeypatch.setattr(SlurmSweep, "_run_sbatch", run_job)
    monkeypatch.setattr(state, "read_array_limit", lambda: 100)
    monkeypatch.setattr(state, "is_available", lambda: False)
    space, settings = build_space(*RATE), OptunaSearch(n_trials=5, n_jobs=2)
    with open_study(tmp_path, settings, "minimize", space, []) as study:
        pool = TrialPool(study, space, settings, Sweep(), float("inf"), machine.expand_one)
        launch = SlurmLaunch(snapshot=False, poll_seconds=0.01)
        SlurmSweep(tmp_path, [], launch, SweepSpec()).launch_pool(pool)
        trials = study.get_trials()
    assert submitted == [2, 2, 1] and pool.codes == [0] * 5 and not pool.active
    assert [trial.value for trial in trials] == [3.0, 3.0, 5.0, 5.0, 6.0]
    assert capsys.readouterr().out.count("finished") == 5


def test_an_old_or_missing_optuna_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.10.1")
    with pytest.raises(ConfigError, match=r"needs optuna 4, and 2\.10\.1 is installed; pip install -e"):
        check_packages(OptunaSearch())

    def find_nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", find_nothing)
    with pytest.raises(ConfigError, match="needs optuna; pip install"):
        check_packages(OptunaSearch())
