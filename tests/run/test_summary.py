"""What a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.runs import TINY
from tests.support.tiers import select_cases
from titan.console.numbers import format_count
from titan.dataset import corpora
from titan.run import attempts, identity, summary
from titan.run.compose import compose_run
from titan.run.run import Run


def show(settings: Sequence[str]) -> Run:
    run = compose_run([*TINY, *settings, "name=x", "training.global_batch=256"])
    mix = corpora.build_mixture(run.dataset, run.training, corpora.prepare_corpora(run.dataset))
    summary.show_run(run, attempts.Attempt(1, "id", identity.compute_ids(run, {}), {}, None, 0, 0, "start"), mix, ())
    return run


pytestmark = pytest.mark.usefixtures("laptop")
OWN = "modules=[tests]"
EXTENSIONS = {
    "none": ((), []),
    "titan's own terms": (("training.z_loss=1e-4",), ["loss terms z_loss 0.0001"]),
    "an own term": (
        (OWN, "+training.loss_terms.e={_target_: tests.support.loss_terms.Entropy, coefficient: 0.1}"),
        ["loss terms e 0.1 (tests.support.loss_terms.Entropy)", "own code tests (training.loss_terms.e)"],
    ),
    "a hook and a model": (
        (OWN, "+hooks.n={_target_: tests.support.own_hooks.Norms}", "model._target_=tests.support.own_models.OwnLlama"),
        ["hooks n (tests.support.own_hooks.Norms)", "own code tests (model, hooks.n)"],
    ),
    "a package that is only imported": ((OWN,), ["own code tests (imported)"]),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "lines"),
    select_cases(
        [pytest.param(*case, id=name) for name, case in EXTENSIONS.items()],
        ("none", "titan's own terms", "a hook and a model"),
    ),
)
def test_what_is_not_titans_own_is_listed(
    settings: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    show(settings)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in printed if line.startswith(("hooks ", "loss terms ", "own code "))] == lines


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "model", "layout"),
    [
        pytest.param(
            ("model=qwen3_moe_debug", "parallelism=fsdp", "cluster.devices=4", "parallelism.expert=2"),
            "qwen3_moe_debug: {} parameters, {} active, 2 layers",
            ["fsdp: shard 4 x expert 2", "ranks 0 1 | 2 3 have different experts"],
            id="experts",
        ),
        pytest.param(("model=debug",), "debug: {} parameters, 2 layers", ["single: one device"], id="dense"),
    ],
)
def test_the_model_and_the_layout(
    settings: tuple[str, ...], model: str, layout: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = show(settings)
    shown = " ".join(capsys.readouterr().out.split())
    counts = map(format_count, (run.model.parameters(), run.model.active_parameters()))
    assert model.format(*counts) in shown
    assert all(part in shown for part in layout)
    assert ("expert" in shown.partition("layout")[2]) == ("parallelism.expert=2" in settings)


def test_an_evaluation_of_many_files_is_one_line() -> None:
    figures = {"validation_loss": 2.0} | {f"evaluation/file{i}/loss": float(i) for i in range(8)}
    line = summary.describe_evaluation(figures)
    assert line.startswith("validation loss 2.0000, file0 loss 0.0000, file1 loss")
    assert line.endswith("file5 loss 5.0000, 2 more in metrics.jsonl")
