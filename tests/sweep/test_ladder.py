"""Ladders: sizes and lengths by rule, batches, a prediction that is written before the largest size runs, its score."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers import start
from launchers.command import plan_command, run_command
from launchers.start import run_local
from tests.support.composing import compose_test_run
from tests.support.made_weights import write_checkpoint
from tests.support.runs import TINY
from tests.support.tiers import full
from titan.errors import RunError
from titan.model.schema import Llama
from titan.run.run import Run
from titan.sweep import ladder, ladder_law, ledger, predictions
from titan.sweep.predictions import PredictedLoss
from titan.sweep.schema import Sweep

TINY_LADDER = [
    *(o for o in TINY if not o.startswith(("model.", "training.steps", "evaluation.tokens", "cluster="))),
    "cluster=cpu", "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2",
    "model.ffn=48", "model.vocab=64", "evaluation.tokens=64", "compile=off", "sweep=ladder",
    "sweep.sizes=[8,16,24,32]", "sweep.lengths=[1,2,4]",
    "sweep.seeds=1",
]  # fmt: skip
FLOOR, SCATTER = 1.5, 0.002


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class FakeTrainer:
    """Stands for training: writes checkpoints and losses by a law, and keeps the order of runs."""

    def __init__(self, changes: Callable[[Run], float] = lambda run: 0.0) -> None:
        self.runs: list[Run] = []
        self.changes = changes
        self.fails: Callable[[int], bool] = lambda number: False

    def __call__(self, run: Run, **_: Any) -> int:
        self.runs.append(run)
        if self.fails(len(self.runs)):
            raise RunError("killed")
        directory = Path(run.directory)
        for step in run.checkpoint.at:
            write_checkpoint(directory, step)
        body = ladder.count_body(run.model)
        loss = FLOOR + 40 * body**-0.4 + 60 * run.training.total_tokens**-0.35 + SCATTER * math.sin(11 * len(self.runs))
        content = {"finished": True, "step": run.training.steps, "validation_loss": loss + self.changes(run)}
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").write_text(json.dumps(content))
        return 0


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    made = FakeTrainer()
    monkeypatch.setattr(start, "run_local", made)
    return made


def climb(*overrides: str) -> int:
    return run_command(["-m", *TINY_LADDER, "name=s", *overrides], run_local)


def read(name: str) -> Any:
    return json.loads((Path("runs/s") / name).read_text())


def read_record() -> list[Any]:
    return [json.loads(line) for line in predictions.find_record().read_text().splitlines()]


BASE = Llama(dim=256, layers=6, heads=4, kv_heads=2, ffn=640, vocab=4096)


@given(
    st.builds(lambda heads, group: (heads * group, heads), st.integers(1, 8), st.integers(1, 4)),
    st.sampled_from([8, 16, 64]),
    st.integers(1, 40),
    st.integers(1, 12),
)
def test_a_size_has_heads_of_the_same_width_and_the_rest_in_proportion(
    heads: tuple[int, int], head: int, layers: int, times: int
) -> None:
    base = replace(BASE, dim=heads[0] * head, heads=heads[0], kv_heads=heads[1], layers=layers, ffn=8 * heads[0] * head)
    scaled = ladder.scale_model(base, times * head)
    assert (scaled.dim, scaled.heads, scaled.head_size) == (times * head, times, head)
    assert scaled.heads % scaled.kv_heads == 0 and scaled.heads // scaled.kv_heads <= base.heads // base.kv_heads
    assert abs(scaled.layers - base.layers * scaled.dim / base.dim) <= max(0.5, scaled.layers * (scaled.layers == 1))
    assert scaled.ffn == 8 * scaled.dim and scaled.vocab == base.vocab
    assert ladder.scale_model(base, base.dim) == base


def test_the_vocabulary_is_no_part_of_the_parameters() -> None:
    for tied in (False, True):
        small, large = (ladder.count_body(replace(BASE, vocab=vocab, tied=tied)) for vocab in (64, 4096))
        assert small == large == sum(BASE.block_parameters(k) for k in range(BASE.layers)) + BASE.dim


def test_branches_end_at_their_lengths_and_read_the_same_batches() -> None:
    base = compose_test_run([*TINY, "model.dim=32", "model.heads=4", "evaluation.tokens=64"])
    variant = ladder.Variant((), base)
    found = ladder.build_ladder([variant], Sweep(sizes=(16, 24, 8), lengths=(30.0, 60.0), seeds=3))
    assert [(trunk.model.dim, trunk.seed) for trunk in found.trunks] == [(8, 0), (8, 1), (8, 2), (16, 0), (24, 0)]
    for trunk in found.trunks:
        assert trunk.lr == pytest.approx(base.optimizer.lr * 32 / trunk.model.dim, rel=1e-5)
        assert trunk.steps == trunk.rungs[-1].branch_step > trunk.rungs[0].branch_step > trunk.warmup
        for rung in trunk.rungs:
            asked = rung.length * trunk.parameters
            assert asked <= rung.tokens == rung.steps * 128 < asked + 128
            assert rung.decay_steps == round(0.2 * rung.steps)
    trunk = found.trunks[0]
    steps = trunk.steps + sum(rung.decay_steps for rung in trunk.rungs)
    assert sum(tokens for tokens, _ in ladder.list_costs(trunk)) == 128 * steps


def test_a_ladder_predicts_before_the_largest_runs_and_scores_it(
    trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert climb("sweep.seeds=2") == 0
    dims = [run.model.dim for run in trainer.runs]
    assert dims == [8, 8, 16, 24, *[8] * 6, *[16] * 3, *[24] * 3, 32, *[32] * 3]
    is_trunk = [run.checkpoint.decay_steps is None for run in trainer.runs]
    assert is_trunk == [True] * 4 + [False] * 12 + [True] + [False] * 3
    assert {run.training.global_batch for run in trainer.runs} == {128}
    begun = [event["time"] for event in ledger.read_events(Path("runs/s")) if event["event"] == "started"]
    written = Path("runs/s/prediction.json").stat().st_mtime
    assert sum(time <= written for time in begun) == 16, "before any run of the largest size"
    content, (line,) = read("prediction.json"), read_record()
    assert [run["dim"] for run in content["runs"]] == [8] * 6 + [16] * 3 + [24] * 3 and len(content["losses"]) == 3
    largest = content["losses"][-1]
    last = trainer.runs[-1]
    assert (largest["n"], largest["n_all"]) == (ladder.count_body(last.model), last.model.parameters())
    assert line["d"] == last.training.total_tokens and line["loss"] == read("score.json")["scores"][-1]["loss"]
    assert largest["low"] < line["loss"] < largest["high"] and line["inside"] is True
    shown = capsys.readouterr().out
    assert "your predictions so far: 1 of 1 inside 90 %" in shown and "dim 32 (predicted)" in shown


VARIANTS = ("optimizer.weight_decay=0.1,0.3",)


def make_wins(run: Run) -> float:
    """The change of the loss with the larger weight decay: the law of one that needs 0.7 of the tokens."""
    tokens = run.training.total_tokens
    wins = run.optimizer.weight_decay == 0.3
    return 60 * ((tokens / 0.7) ** -0.35 - tokens**-0.35) if wins else 0.0


@pytest.mark.full
def test_a_ladder_over_variants_predicts_and_scores_each(
    trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.changes = make_wins
    assert climb(*VARIANTS, "sweep.seeds=2") == 0
    rows: dict[float, list[tuple[int, int, int]]] = {}
    for run in trainer.runs:
        rows.setdefault(run.optimizer.weight_decay, []).append((run.model.dim, run.training.seed, run.training.steps))
    assert rows[0.1] == rows[0.3] and len(trainer.runs) == 2 * 20, "the same sizes, seeds and lengths"
    begun = [event["time"] for event in ledger.read_events(Path("runs/s")) if event["event"] == "started"]
    written = Path("runs/s/prediction.json").stat().st_mtime
    assert sum(time <= written for time in begun) == 32, "before any run of the largest size"
    prediction, score = read("prediction.json"), read("score.json")
    labels = ["optimizer.weight_decay=0.1", "optimizer.weight_decay=0.3"]
    assert [loss["variant"] for loss in prediction["losses"]] == [labels[0]] * 3 + [labels[1]] * 3
    assert [line["variant"] for line in read_record()] == labels and prediction["shared"] is True
    (speedup,) = prediction["speedups"]
    assert speedup["flops"]["low"] < 0.7 < speedup["flops"]["high"] < 1 and speedup["variant"] == labels[1]
    assert len(score["speedups"]) == 12 and {found["pairs"] for found in score["speedups"]} == {1, 2}
    assert all(found["flops"]["low"] < 0.715 and 0.7 < found["flops"]["high"] < 0.8 for found in score["speedups"])
    assert all(entry["inside"] for entry in score["scores"]) and len(score["scores"]) == 6
    shown = capsys.readouterr().out
    assert f"{labels[1]} against {labels[0]}, as measured at each rung" in shown
    assert f"dim 32, {labels[1]} (predicted)" in shown and "2 of 2 inside 90 %" in shown


@pytest.mark.full
def test_the_baseline_of_a_ladder_over_variants_is_chosen(trainer: FakeTrainer) -> None:
    trainer.changes = make_wins
    assert climb(*VARIANTS, "sweep.baseline={optimizer.weight_decay:0.30}") == 0
    (speedup,) = read("prediction.json")["speedups"]
    assert speedup["baseline"] == "optimizer.weight_decay=0.3" and speedup["flops"]["value"] > 1.2


def make_best_rate(run: Run) -> float:
    """The change of the loss by a learning rate that is best at 0.02 / sqrt(width / 8)."""
    return 0.2 * math.log(run.optimizer.lr / (0.02 / math.sqrt(run.model.dim / 8))) ** 2


@pytest.mark.full
def test_rates_are_tuned_at_the_smallest_sizes(trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.changes = make_best_rate
    trainer.fails = lambda count: count == 12
    given = ("sweep.lr_rule=tuned", "optimizer.lr=5e-3", "sweep.tuned_factors=[0.25,0.5,1,2]")
    assert climb(*given) == 1
    trainer.fails = lambda count: False
    assert climb(*given) == 0 and len(trainer.runs) == 1 + 8 + 16, "what has finished is not trained again"
    tuning, rest = trainer.runs[:8], trainer.runs[8:]
    assert [run.model.dim for run in tuning] == [8] * 4 + [16] * 4
    assert [run.optimizer.lr for run in tuning[:4]] == [0.005, 0.01, 0.02, 0.04]
    assert {run.training.steps for run in tuning[:4]} == {21}, "the longest length"
    rates = {run.model.dim: run.optimizer.lr for run in rest}
    assert rates == pytest.approx({dim: 0.02 / math.sqrt(dim / 8) for dim in (8, 16, 24, 32)}, rel=0.02)
    shown = capsys.readouterr().out
    assert "tuning before that: 8 runs" in shown and "the end of what" not in shown
    assert re.search(r"learning rates tuned: 0\.05\d* / width\^0\.(4[89]|5[012])\n", shown)


@pytest.mark.parametrize(
    ("best", "power", "is_edge"),
    [
        pytest.param(lambda width: 0.02 * (8 / width) ** 0.5, 0.5, False, id="between"),
        pytest.param(lambda width: 0.02 * (8 / width) ** 2, 1.0, False, id="no-steeper-than-width"),
        pytest.param(lambda width: 0.008 * (width / 8), 0.0, False, id="no-rise"),
        pytest.param(lambda width: 10.0, 1.0, True, id="edge"),
    ],
)
def test_the_rule_of_tuned_rates(best: Callable[[int], float], power: float, is_edge: bool) -> None:
    base = compose_test_run([*TINY, "model.dim=32", "model.heads=4", "evaluation.tokens=64"])
    base = replace(base, optimizer=replace(base.optimizer, lr=0.005))
    sweep = Sweep(sizes=(8, 16, 24, 32), lengths=(30.0, 60.0), lr_rule="tuned", tuned_factors=(0.125, 0.25, 0.5, 1, 2))
    variant = ladder.Variant((), base)
    made = ladder.build_ladder([variant], sweep)
    runs = ladder_law.list_tuning_runs(made, sweep)
    losses = [3 + math.log(run.lr / best(run.trunk.model.dim)) ** 2 for run in runs]
    losses[0] = math.inf  # it diverged
    tuned = ladder_law.find_best_rates(runs, losses)
    assert [rate.is_edge for rate in tuned] == [is_edge] * 2
    assert any("wider sweep.tuned_factors" in line for line in ladder_law.describe_tuned(tuned)) == is_edge
    rates = ladder_law.extrapolate_rates(tuned)
    small, large = (rates.compute(variant, ladder.scale_model(base.model, dim), 10) for dim in (8, 32))
    assert small / large == pytest.approx(4**power, rel=0.02)
    if not is_edge:
        assert small * rates.compute(variant, ladder.scale_model(base.model, 16), 10) == pytest.approx(
            best(8) * best(16), rel=0.05
        )


@pytest.mark.full
def test_a_miss_is_recorded_as_a_miss(trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.changes = lambda run: 1.0 if run.model.dim == 32 else 0.0
    assert climb() == 0
    assert [line["inside"] for line in read_record()] == [False]
    assert "0 of 1 inside 90 %" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("number", [full(2), 8, 13, full(14), full(16)])
def test_the_same_command_goes_on_where_a_ladder_stopped(trainer: FakeTrainer, number: int) -> None:
    """The prediction stays as it was written, and no run that has finished begins again."""
    trainer.fails = lambda count: count == number
    assert climb() == 1
    has_prediction = Path("runs/s/prediction.json").exists()
    assert has_prediction == (number > 12)
    before = Path("runs/s/prediction.json").read_bytes() if has_prediction else b""
    trainer.fails = lambda count: False
    assert climb() == 0 and climb() == 0
    finished = [run.directory for run in trainer.runs]
    failed = finished.pop(number - 1)
    assert len(set(finished)) == len(finished) == 16 and failed in finished
    assert len(read_record()) == 1
    if has_prediction:
        assert Path("runs/s/prediction.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        full(lambda text: text.replace('"value": ', '"value": 1'), [], "it was changed", id="changed"),
        full(lambda text: text[:100], [], "can't be used", id="cut"),
        full(None, [], "a prediction would come too late", id="gone-once-the-largest-has-begun"),
        full(lambda text: text, ["optimizer.lr=5e-3"], "a ladder with other settings", id="of-another-ladder"),
    ],
)
def test_a_prediction_stays_as_it_was_made(
    change: Callable[[str], str] | None,
    overrides: list[str],
    words: str,
    trainer: FakeTrainer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert climb() == 0
    runs, file = len(trainer.runs), Path("runs/s/prediction.json")
    file.unlink() if change is None else file.write_text(change(file.read_text()))
    assert climb(*overrides) == 2
    assert words in capsys.readouterr().err and len(trainer.runs) == runs


@pytest.mark.full
def test_a_ladder_goes_on_on_other_machines(trainer: FakeTrainer) -> None:
    trainer.fails = lambda count: count == 15
    assert climb() == 1
    trainer.fails = lambda count: False
    assert climb("cluster.time=1:00:00", "hydra.launcher.at_once=1") == 0
    assert len(trainer.runs) == 17


@pytest.mark.full
def test_a_plan_has_all_runs_and_starts_none(trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    planned: list[Any] = []
    command = ["-m", *TINY_LADDER, "name=s", "cluster=h100", "cluster.nodes=1"]
    assert plan_command(command, lambda run: 1, lambda trials: planned.extend(trials) or [0] * len(trials)) == 0
    assert len(planned) == 16 and not trainer.runs and not Path("runs").exists()
    (total,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("all "))
    assert total[1] == "16" and total[-1] != "unknown"


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        full(["sweep.sizes=[8]"], "a law with a floor needs 3 sizes below", id="one-size"),
        pytest.param(["sweep.sizes=[8,16,8,32]"], "a law with a floor needs 3 sizes below", id="two-below"),
        full(["sweep.lengths=[1]"], "sweep.sizes, sweep.lengths: below the largest size, ", id="one-length"),
        full(["sweep.sizes=[8,16,24,256]"], "times the compute of the largest rung", id="too-far"),
        full(["sweep.sizes=[8,12,24,32]"], "12 has no whole number of heads", id="heads"),
        full(["sweep.lengths=[0.01,1]"], "too few for a warm-up", id="short"),
        full(["sweep.lengths=[1,1.001,2,4]"], "two of them decay over as many steps at width 8", id="close"),
        full(["model.dim=32,64"], "a ladder decides it, so it can't be an axis", id="varied-size"),
        full(["sweep.lengths=1,2,4"], "sweep.lengths=1,2,4: is a list", id="no-list"),
        full(["training.seed=1,2"], "a ladder decides it, so it can't be an axis", id="varied-seed"),
        pytest.param(["training.seq_len=32,64"], "has another training.seq_len than", id="varied-rows"),
        full(["parallelism=single,ddp"], "learns the same as parallelism=single", id="same-variants"),
        full(["optimizer=adamw,muon", "sweep.baseline={optimizer:lion}"], "is none of the", id="no-baseline"),
        full(["schedule=cosine"], "give schedule=wsd", id="cosine"),
        full(["schedule.decay=0"], "schedule.decay=0: the branches", id="no-decay"),
        full(["training.steps=10"], "training.steps=10: a ladder decides it", id="steps"),
        full(["training.tokens=1e4"], "training.tokens=10000.0: a ladder decides it", id="tokens"),
        full(["sweep.budget=flops"], "sweep.budget=flops: a ladder decides", id="budget"),
        full(["checkpoint=off"], "checkpoint.mode=off: a ladder", id="no-checkpoints"),
        full(["evaluation.tokens=0"], "evaluation.tokens=0: a ladder", id="no-evaluation"),
        full(["optimizer.lr=auto"], "optimizer.lr=auto: the rule is of runs with 215M", id="lr-auto"),
        full(["sweep.lr_rule=tuned", "sweep.tuned_sizes=4"], "and fewer sizes than sweep.sizes has, 4", id="tuned-all"),
        full(["optimizer.lr=auto", "sweep.lr_rule=width"], "is a rule, and so is sweep.lr_rule=width", id="two-rules"),
        full(["model=qwen3_moe_debug"], "there is no rule for model.", id="experts"),
        full(
            ["hydra/launcher=slurm", "hydra.launcher.wait=false"], "hydra.launcher.wait=false: a ladder", id="no-wait"
        ),
    ],
)
def test_what_can_not_work(
    overrides: list[str], message: str, trainer: FakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {override.partition("=")[0] for override in overrides}
    given = [override for override in TINY_LADDER if override.partition("=")[0] not in names]
    assert run_command(["-m", *given, "name=s", *overrides], run_local) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not trainer.runs and not Path("runs").exists()


class TestPredictions:
    LOSS = PredictedLoss(24, 1000, 2000, 5000, 3.0, 2.9, 3.1, 0.9)

    def test_the_first_one_stays(self, tmp_path: Path) -> None:
        predictions.write_once(tmp_path, "a", "t1", [self.LOSS], {"runs": []})
        predictions.write_once(tmp_path, "b", "t2", [self.LOSS], {"runs": []})
        found = predictions.read(tmp_path)
        assert found is not None and (found.key, found.time, found.losses) == ("a", "t1", (self.LOSS,))
        assert os.listdir(tmp_path) == ["prediction.json"]

    def test_a_line_that_a_kill_cut_short_is_stated_and_lost_alone(self, tmp_path: Path) -> None:
        for number in range(3):
            (own := tmp_path / str(number)).mkdir()
            predictions.write_once(own, str(number), "t", [self.LOSS], {})
            found = predictions.read(own)
            assert found is not None
            predictions.add_score(tmp_path, found, self.LOSS, 3.0 + number, "now")
            predictions.add_score(tmp_path, found, self.LOSS, 3.0 + number, "now")
            if number == 0:
                with predictions.find_record().open("a") as file:
                    file.write('{"digest": "x", "lev')
        record = predictions.read_record(0.9)
        assert (record.inside, record.scored, record.damaged) == (1, 3, 1)
        assert "1 of 3 inside 90 %" in record.describe() and "1 damaged" in record.describe()


@pytest.mark.full
def test_a_ladder_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one of four sizes and three lengths: its branches begin where their trunks were."""
    monkeypatch.setattr(start, "run_local", lambda run, **_: run_local(run))  # in this process, which is faster
    assert climb() == 0
    content = read("prediction.json")
    assert [run["loss"] > 0 for run in content["runs"]] == [True] * 9 and len(read_record()) == 1
    for run in content["runs"]:
        attempt = Path(run["directory"], "run.yaml").read_text()
        assert f"model.dim={run['dim']}" in attempt and "checkpoints/step-" in attempt
