"""`python -m titan.evaluate`: checkpoints, averages and exported weights, equal to a reference on the same items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import task_files
from tests.support.composing import compose_test_run
from tests.support.runs import read_checkpoint, select_weights, train_run
from tests.support.tiers import full
from tests.training.test_evaluation import BASE, difference
from titan import convert, evaluate
from titan.evaluation.items import TaskItem
from titan.evaluation.schema import Task
from titan.evaluation.scores import compute_scores
from titan.metrics.reader import read_records
from titan.run.run import Run
from titan.run.trust import remember_typed
from titan.training.evaluation.request import EXCLUDED_OVERRIDES
from titan.training.recompose import build_command
from titan.training.replay.request import EXCLUDED_OVERRIDES as REPLAY_EXCLUDED_OVERRIDES

FORMATS = ("hellaswag", "arc", "lambada")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluated")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """A finished run with two checkpoints and tasks, whose model has learned a little."""
    paths = task_files.write_tasks(folder)
    more = ["checkpoint=sync", "checkpoint.every=2", "training.steps=4", "optimizer=adamw", "optimizer.lr=1e-2"]
    given = [*BASE, *task_files.write_corpus(folder), *task_files.build_settings(paths), *more, "evaluation.ema=0.5"]
    made = compose_test_run([*given, f"hydra.run.dir={folder}/run"])
    train_run(made)
    remember_typed(made.overrides)
    return made


def evaluated(run: Run | Path, to: Path, *words: str) -> dict[str, Any]:
    source = run.directory if isinstance(run, Run) else run
    assert evaluate.main([str(source), *words, f"to={to}"]) == 0
    found: dict[str, Any] = json.loads(to.read_text())
    return found


def files(run: Run) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in Path(run.directory).rglob("*")}


@pytest.mark.full
def test_the_last_checkpoint_has_the_figures_of_the_run(run: Run, tmp_path: Path) -> None:
    before = files(run)
    found = evaluated(run, tmp_path / "out.json")
    last = [line for line in read_records(Path(run.directory) / "metrics.jsonl") if "validation_loss" in line][-1]
    assert found["results"]["weights"] == {key: last[key] for key in found["results"]["weights"]}
    assert found["results"]["ema"] == {key: last[f"ema/{key}"] for key in found["results"]["ema"]}
    assert "evaluation/hellaswag/acc_norm_low" in last and found["step"] == 4
    assert files(run) == before


@pytest.mark.full
def test_other_layouts_and_chosen_tasks(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["step=2", f"tasks=[lambada:{folder}/lambada.jsonl]", "tokens=128", "limit=3"]
    one = evaluated(run, tmp_path / "one.json", *words)
    two = evaluated(run, tmp_path / "two.json", *words, "parallelism=fsdp")
    assert difference(two["results"]["weights"], one["results"]["weights"]) < 2e-5
    assert {key.split("/")[1] for key in one["results"]["weights"] if "/" in key} == {"lambada"}


@pytest.mark.full
def test_an_average_is_that_of_the_checkpoints(run: Run, folder: Path, tmp_path: Path) -> None:
    """As measured of a checkpoint whose weights are replaced by the mean."""
    found = evaluated(run, tmp_path / "out.json", "average=2", "tasks=[]")
    assert found["steps"] == [2, 4]
    mean = {
        name: (a + read_checkpoint(run, 4)[name]) / 2 for name, a in select_weights(read_checkpoint(run, 2)).items()
    }
    reference = compose_test_run(
        [*run.overrides, "evaluation.tasks=null", "checkpoint=off", f"hydra.run.dir={tmp_path}/x"]
    )

    def replace_weights(trainer: Any) -> None:
        restore = trainer.restore_state

        def restored() -> None:
            restore()
            for name, parameter in trainer.train_step.named_parameters():
                parameter.data.copy_(mean[f"model.{name}"])
            trainer.step = trainer.run.training.steps

        trainer.restore_state = restored

    train_run(reference, replace_weights)
    last = read_records(tmp_path / "x" / "metrics.jsonl")[-1]
    assert found["results"]["average of 2"]["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["results"]["weights"]["validation_loss"] != found["results"]["average of 2"]["validation_loss"]


@pytest.fixture(scope="module")
def exported(run: Run, folder: Path) -> Path:
    assert convert.main([str(run.directory), f"to={folder}/exported"]) == 0
    return folder / "exported"


def test_exported_weights_score_as_the_reference(exported: Path, folder: Path, tmp_path: Path) -> None:
    """The reference computes each continuation alone with transformers; lm-evaluation-harness its own way."""
    tasks = ",".join(f"{name}:{folder}/{name}.jsonl" for name in FORMATS)
    found = evaluated(exported, tmp_path / "out.json", f"tasks=[{tasks}]", "precision=fp32", "training.seq_len=64")
    for name in FORMATS:
        items = Task(path=f"{folder}/{name}.jsonl", format=name).build()  # type: ignore[arg-type]
        for likelihoods in references(exported, items):
            expected = {
                f"evaluation/{name}/{key}": figure.value for key, figure in compute_scores(items, likelihoods).items()
            }
            assert difference({key: found["results"]["weights"][key] for key in expected}, expected) < 2e-5


def references(exported: Path, items: tuple[TaskItem, ...]) -> list[Any]:
    """Log-likelihoods of each choice, and whether it is greedy, by two other programs."""
    import transformers
    from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    pairs = [(item.context, item.delimiter + choice) for item in items for choice in item.choices]
    found = [np.array([alone(model, tokenizer, *pair) for pair in pairs])]
    harness = HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=1)
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    return [*found, np.array(harness.loglikelihood(requests, disable_tqdm=True), dtype=np.float64)]


@torch.no_grad()
def alone(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is greedy, as the harness defines them."""
    spaces = len(context) - len(context.rstrip())
    context, continuation = context[: len(context) - spaces], context[len(context) - spaces :] + continuation
    whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
    first = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    first, whole = first - max(0, len(whole) - 65), whole[-65:]  # the harness leaves out the context's beginning
    logits = model(torch.tensor([whole[:-1]])).logits[0].float().log_softmax(-1)[first - 1 :]
    targets = torch.tensor(whole[first:])
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["step=3"], "step=3: the run has no such complete checkpoint; give one of 2, 4.", id="step"),
        pytest.param(["step=2", "average=3"], "the run has 1 complete checkpoint up to step 2", id="one-checkpoint"),
        pytest.param(["limit=3", "tasks=[]"], "limit=3: there are no tasks whose items it limits", id="limit"),
        pytest.param(["average=3"], "average=3: the run has 2 complete checkpoints up to step 4", id="average"),
        pytest.param(["tasks=[x]"], "tasks=[x]: give FORMAT:FILE with one of hellaswag, arc, lambada", id="task"),
        full(["sets=[/no.txt]"], "sets=[/no.txt]: there is no file /no.txt; correct the path.", id="set"),
        full(["tasks=[]", "tokens=0"], "there is nothing to measure", id="nothing"),
        pytest.param(["to=/no/dir/x.json"], "to=/no/dir/x.json: there is no directory /no/dir", id="to"),
        full(["model.dim=64"], "model.dim was 32, and its command gives 64 here", id="model"),
    ],
)
def test_wrong_settings_end_with_2(
    run: Run, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(run.directory), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_sets_of_one_name_are_rejected(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a" / "b.txt", tmp_path / "c" / "b.txt"]
    for file in files:
        file.parent.mkdir()
        file.write_text("text")
    assert evaluate.main([str(run.directory), f"sets=[{files[0]},{files[1]}]"]) == 2
    assert "two files have the same name" in capsys.readouterr().err


def test_weights_of_no_run_need_something_to_measure(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(exported)]) == 2
    assert "is no run, so there is nothing to measure; give tasks or sets." in capsys.readouterr().err
    assert evaluate.main([str(exported), "step=3"]) == 2
    assert evaluate.main(["--help"]) == 0


def test_what_a_run_of_before_measured_is_known(run: Run) -> None:
    """Its command line adds tasks with a plus sign; a replay measures nothing."""
    given = ["evaluation.tokens=64", "+evaluation.tasks.x.path=x.jsonl", "metrics.plot=false"]
    document = {"overrides": given, "layout": {}, "config": {"precision": {"compute": "fp32"}}}
    kept, _ = build_command(document, [], EXCLUDED_OVERRIDES)
    assert kept[:2] == ["evaluation.tokens=64", "+evaluation.tasks.x.path=x.jsonl"] and "plot" not in str(kept)
    replayed, _ = build_command(document, [], REPLAY_EXCLUDED_OVERRIDES)
    assert "evaluation" not in str(replayed)
