"""The examples of docs/extending.md work as they stand, from a folder outside of the repository."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.tensor import Shard

from launchers import start
from launchers.command import run_command
from tests.support import examples, task_files
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, read_step_records, train_run
from tests.support.tiers import full, select_cases
from titan import evaluate
from titan.hooks.context import Context
from titan.hooks.schema import MOMENTS
from titan.metrics.reader import read_records
from titan.run import identity
from titan.run.run import Run

SMALL = [o for o in TINY if not o.startswith(("dataset", "model.vocab", "optimizer", "schedule", "hydra.run.dir"))]
SECTIONS = ("Your own model", "Your own attention", "Your own optimizer", "Your own dataset", "Your own schedule")
OTHERS = ("terms of the loss", "sharding strategy", "evaluation task", "tracker")
TERMS, STRATEGY, TASK, TRACKER = (examples.read_section(f"Your own {name}") for name in OTHERS)
HOOKS = examples.read_section("Hooks")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with examples.write_examples(tmp_path, monkeypatch):
        (tmp_path / "poems.csv").write_text("poem\n" + "roses are red and violets are blue\n" * 300)
        yield tmp_path


def trained(overrides: str, *small: str) -> Run:
    """The run of a command, which has ended if it is on one device."""
    found: list[Run] = []

    def train(run: Run) -> int:
        found.append(run)
        return start.run_local(run) if run.layout.devices == 1 else 0

    name = () if "name=" in overrides else ("name=example",)
    assert run_command([*small, *shlex.split(overrides), *name], train) == 0
    return found[0]


EXAMPLES = [o for name in SECTIONS for o in examples.read_trainings(examples.read_section(name))]
QUICK = (
    "model=reglu parallelism=3d training.steps=5",
    "model=linear parallelism=cp training.steps=5",
    "optimizer=rmsprop optimizer.alpha=0.9 training.steps=5",
)


@pytest.mark.full
@pytest.mark.parametrize("overrides", select_cases(EXAMPLES, QUICK))
def test_an_example_trains(overrides: str, mine: Path) -> None:
    run = trained(overrides, *SMALL)
    own = (type(run.model), type(run.optimizer), type(run.schedule), type(run.dataset))
    assert sum(kind.__module__.startswith("mine.") for kind in own) == 1
    assert run.layout.devices > 1 or (mine / "runs/example/result.json").is_file()


@pytest.mark.full
def test_a_schedule_of_ones_own_is_shown_checked_and_part_of_the_ids(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["schedule=cycles", "--cfg", "job", "-p", "schedule"], lambda run: 0) == 0
    assert "_target_: mine.cycles.Cycles\ncycles: 2\n" in capsys.readouterr().out
    assert run_command([*SMALL, "schedule=cycles", "schedule.cycles=0", "name=x"], lambda run: 0) == 2
    assert "schedule.cycles=0: must be at least 1." in capsys.readouterr().err
    runs = [compose_test_run([*SMALL, "schedule=cycles", f"schedule.cycles={n}", "name=x"]) for n in (2, 3)]
    two, three = (identity.select_settings(run, science=True) for run in runs)
    assert two["schedule"] == "mine.cycles.Cycles" and "schedule.cycles" not in two
    assert three == {**two, "schedule.cycles": 3}


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [full(o) if "sharp" in o or o == "model=small training.steps=5" else o for o in examples.read_trainings(TERMS)],
)
def test_terms_of_the_loss_are_measured(overrides: str, mine: Path) -> None:
    run = trained(overrides, *(o for o in TINY if not o.startswith("training.steps")))
    wanted = set(run.training.terms) | ({"small"} if "model=small" in overrides else set())
    assert wanted
    if run.layout.devices == 1:
        found = read_step_records(run)
        assert len(found) == 5
        assert all({key for key in line if key.startswith("loss/")} == {f"loss/{n}" for n in wanted} for line in found)


@pytest.mark.full
def test_a_hook_measures(mine: Path) -> None:
    trained(examples.read_trainings(HOOKS)[0], *_hooked())
    found = [line for line in read_records(mine / "runs/norms/metrics.jsonl") if "loss" in line]
    assert len(found) == 5
    for line in found:
        blocks = [line[f"hooks/block_norms/block_{i}"] for i in range(2)]
        assert min(blocks) > 0 and sum(block**2 for block in blocks) < line["grad_norm"] ** 2


@pytest.mark.full
def test_a_hook_ends_a_run(mine: Path) -> None:
    trained(examples.read_trainings(HOOKS)[1], *_hooked())
    result = json.loads((mine / "runs/pruned/result.json").read_text())
    assert not result["finished"] and 2 < result["step"] <= 5
    assert result["ended_by"]["hook"] == "prune" and "is above 0.5" in result["ended_by"]["reason"]


def _hooked() -> list[str]:
    return [*(o for o in TINY if not o.startswith("evaluation.")), "metrics.sample_tokens=0", "evaluation.tokens=64"]


def test_the_tables_name_every_moment_and_every_public_name() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| (?:all|rank 0) \|", HOOKS, flags=re.M) == list(MOMENTS)
    table = HOOKS.partition("### The context")[2].partition("\n\n`norms`")[0]
    named = set(re.findall(r"`(\w+)(?:\(.*?\))?`", "".join(re.findall(r"^\| (.*?) \|", table, flags=re.M))))
    public = {name for name in vars(Context) if not name.startswith("_")}
    assert named == public | {"run", "directory", "rank", "world_size", "device", "step", "figures"}


@pytest.mark.full
def test_a_task_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((train, measure),) = re.findall(r"```sh\npython -m titan.train (.*?)\npython -m titan.evaluate (.*?)\n```", TASK)
    texts = [{"sentence_good": a[1], "sentence_bad": a[2]} for a in task_files.read_texts(4)]
    (mine / "pairs.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    small = [o for o in TINY if not o.startswith(("dataset", "model.vocab", "evaluation"))]
    sizes = ["training.seq_len=64", "model.vocab=4096", "metrics.sample_tokens=0"]
    given = [*small, *task_files.write_corpus(mine), *sizes, *shlex.split(train)]
    assert run_command(given, start.run_local) == 0
    last = [line for line in read_records(mine / "runs/example/metrics.jsonl") if "evaluation/pairs/acc" in line][-1]
    assert last["step"] == 5 and set(re.findall(r"evaluation/pairs/\w+", TASK)) <= last.keys()
    assert evaluate.main([*shlex.split(measure), "to=out.json"]) == 0
    assert "evaluation/pairs/acc_norm" in json.loads((mine / "out.json").read_text())["results"]["weights"]
    (mine / "pairs.jsonl").write_text('{"sentence_good": "a"}')
    assert run_command([*given, "name=other"], start.run_local) == 2
    assert "line 1 is no item of this task (KeyError: 'sentence_bad')" in capsys.readouterr().err


@pytest.mark.full
def test_a_strategy_of_ones_own(mine: Path) -> None:
    runs_ = [trained(overrides, *SMALL, "model.layers=2") for overrides in examples.read_trainings(STRATEGY)]
    assert {type(run.parallelism.groups["ffn"]).__module__ for run in runs_ if run.parallelism.groups} == {
        "mine.columns"
    }
    seen = train_run(runs_[0], lambda trainer: [p.placements for p in trainer.train_step.parameters()])
    assert all(rank.code == 0 and (Shard(1),) in rank.extra for rank in seen)


@pytest.mark.full
def test_a_tracker_of_ones_own(mine: Path) -> None:
    for number, overrides in enumerate(examples.read_trainings(TRACKER)):
        run = trained(f"{overrides} name=tracked-{number}", *SMALL)
        lines = list(csv.reader((Path(run.directory) / "curves.csv").read_text().splitlines()))
        losses = [line["loss"] for line in read_records(Path(run.directory) / "metrics.jsonl") if "loss" in line]
        digits = run.metrics.trackers["csv"].digits  # type: ignore[index, attr-defined]
        assert [row for row in lines if row[2] == "train/loss"] == [
            ["1", str(step), "train/loss", f"{loss:.{digits}g}"] for step, loss in enumerate(losses, 1)
        ]
        assert len(losses) == 5 and digits == (3, 6)[number]


def test_every_example_is_trained() -> None:
    sections = [*map(examples.read_section, SECTIONS), TERMS, STRATEGY, HOOKS, TASK, TRACKER]
    assert [len(examples.read_files(text)) for text in sections] == [2, 4, 2, 2, 2, 4, 1, 4, 2, 2]
    assert sum(len(examples.read_trainings(text)) for text in sections) == len(examples.read_trainings()) == 22
