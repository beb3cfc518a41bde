"""Runs that start from given weights, and runs whose checkpoints leave in other formats."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.composing import compose_test_run
from tests.support.ranks import RankFailedError
from tests.support.runs import (
    TINY,
    RankOutcome,
    begin_run,
    compose_tiny_run,
    read_checkpoint,
    read_step_records,
    select_weights,
    train_run,
)
from tests.support.tiers import full
from titan.checkpoint import manifest
from titan.errors import ConfigError
from titan.run import attempts
from titan.run.directory import read_attempts
from titan.run.run import Run
from titan.weights.formats import open_weights

TIED = {"untied": "false", "tied": "true"}


@pytest.mark.full
def test_an_export_without_its_package_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one two three four five six\n" * 2000)
    text = ["dataset=text", f"dataset.path={tmp_path}/a.txt", "dataset.validation=0", "model.vocab=4096"]
    settings = [word for word in TINY if not word.startswith(("dataset", "model.vocab"))]
    run = compose_test_run([*settings, *text, "checkpoint.export=hf", f"hydra.run.dir={tmp_path}/run"])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        RankFailedError, match=r"checkpoint\.export=hf: writing the tokenizer titan4k needs the package"
    ):
        train_run(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def bits_equal(state: dict[str, torch.Tensor], given: Any) -> bool:
    """Whether a state's weights are `given`, bit by bit; a tied head is left out of both."""
    ours = {name.removeprefix("model."): tensor for name, tensor in select_weights(state).items()}
    return ours.keys() == given.shapes.keys() and all(torch.equal(t, given.read(n)) for n, t in ours.items())


@pytest.fixture(scope="module")
def parent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has been trained, with its weights in Hugging Face's format in fp32 as well."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    export = ["checkpoint.export=hf", "checkpoint.export_dtype=fp32"]
    run = compose_tiny_run(folder, f"model.tied={request.param}", *export, layout="fsdp2")
    train_run(run)
    return run


def of(*kinds: str) -> pytest.MarkDecorator:
    """The parents of a test."""
    return pytest.mark.parametrize("parent", [TIED[kind] for kind in kinds], ids=kinds, indirect=True)


def tied(run: Run) -> str:
    return f"model.tied={str(run.model.tied).lower()}"


@pytest.mark.parametrize(
    ("parent", "form", "layout"),
    [
        full("true", "hf", "fsdp3", id="tied-hf-fsdp3"),
        full("true", "run", "ddp2", id="tied-run-ddp2"),
        full("true", "checkpoint", "single", id="tied-checkpoint-single"),
        full("false", "hf", "fsdp3", id="untied-hf-fsdp3"),
        full("false", "run", "single", id="untied-run-single"),
        full("false", "checkpoint", "ddp2", id="untied-checkpoint-ddp2"),
    ],
    indirect=["parent"],
)
def test_a_run_starts_from_given_weights_on_any_layout(form: str, layout: str, parent: Run, tmp_path: Path) -> None:
    (folder,) = manifest.list_complete(Path(parent.directory))
    path = {"run": parent.directory, "checkpoint": folder, "hf": folder / "hf"}[form]
    run = compose_tiny_run(tmp_path, tied(parent), f"checkpoint.weights={path}", layout=layout)
    seen = train_run(run)
    for rank in seen:
        assert bits_equal(rank.first, open_weights(folder))
        assert not any(value.any() for name, value in rank.first.items() if name.endswith(("exp_avg", "exp_avg_sq")))
    assert [line["step"] for line in read_step_records(run)] == [1, 2, 3]
    document = read_attempts(tmp_path)[0]
    assert document["parent"].startswith("weights:")
    assert document["science"]["parent"] == document["parent"]
    assert document["kind"] == "start"


@pytest.mark.full
@of("tied")
def test_a_pipeline_starts_from_given_weights(parent: Run, tmp_path: Path) -> None:
    (folder,) = manifest.list_complete(Path(parent.directory))
    layout = ["parallelism.pipeline=2", "parallelism.tensor=1", "parallelism.microbatches=4"]
    run = compose_tiny_run(tmp_path, tied(parent), f"checkpoint.weights={folder}/hf", *layout)
    state: dict[str, torch.Tensor] = {}
    for rank in train_run(run):
        state |= rank.first
    assert bits_equal(state, open_weights(folder))


@pytest.mark.full
@of("untied")
def test_where_the_weights_lie_changes_no_science_and_what_they_are_does(parent: Run, tmp_path: Path) -> None:
    def science(path: object, name: str) -> str:
        (tmp_path / name).mkdir()
        attempt = begin_run(compose_tiny_run(tmp_path / name, tied(parent), f"checkpoint.weights={path}"))
        assert isinstance(attempt, attempts.Attempt)
        return attempt.ids.science

    (folder,) = manifest.list_complete(Path(parent.directory))
    shutil.copytree(folder / "hf", tmp_path / "moved")
    assert science(folder / "hf", "a") == science(tmp_path / "moved", "b")
    other = compose_tiny_run(tmp_path / "other", tied(parent), "training.seed=1", "checkpoint.export=hf")
    train_run(other)
    (different,) = manifest.list_complete(tmp_path / "other")
    assert science(different / "hf", "c") != science(folder / "hf", "d")


@pytest.mark.full
@of("untied")
def test_a_run_from_given_weights_goes_on_from_its_own_checkpoint(parent: Run, tmp_path: Path) -> None:
    shutil.copytree(manifest.list_complete(Path(parent.directory))[0] / "hf", tmp_path / "hf")
    settings = [tied(parent), f"checkpoint.weights={tmp_path}/hf"]
    last = train_run(compose_tiny_run(tmp_path / "run", *settings))[0].last
    shutil.rmtree(tmp_path / "hf")
    again = train_run(compose_tiny_run(tmp_path / "run", *settings, "training.steps=4"))[0]
    assert all(torch.equal(again.first[name], tensor) for name, tensor in last.items())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        pytest.param(
            ["model.ffn=40"], r"the weights are of another model than model.ffn=40; give model.ffn=48", id="ffn"
        ),
        pytest.param(["checkpoint.resume={folder}"], r"checkpoint.resume=\S+ contains weights already", id="both"),
    ],
)
@of("untied")
def test_weights_that_do_not_fit_are_refused(settings: list[str], said: str, parent: Run, tmp_path: Path) -> None:
    (folder,) = manifest.list_complete(Path(parent.directory))
    more = [setting.format(folder=folder) for setting in settings]
    run = compose_tiny_run(tmp_path, tied(parent), f"checkpoint.weights={folder}", "training.steps=9", *more)
    with pytest.raises(ConfigError, match=rf"checkpoint.weights=\S+: .*{said}"):
        begin_run(run)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "mode"), [full("fsdp3", "async"), ("single", "sync")])
def test_every_checkpoint_leaves_in_another_format(mode: str, layout: str, tmp_path: Path) -> None:
    how = ["checkpoint.every=2", f"checkpoint={mode}", "checkpoint.export=hf", "checkpoint.export_dtype=fp32"]
    run = compose_tiny_run(tmp_path, *how, "training.steps=4", layout=layout)
    train_run(run)
    for folder, step in zip(manifest.list_complete(tmp_path), (2, 4), strict=True):
        assert bits_equal(read_checkpoint(run, step), open_weights(folder / "hf"))
        config = json.loads((folder / "hf" / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["max_position_embeddings"] == run.training.seq_len


@pytest.mark.full
def test_meta_format_leaves_too(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "checkpoint.export=meta", "checkpoint.export_dtype=fp32", layout="fsdp2")
    seen: list[RankOutcome] = train_run(run)
    (folder,) = manifest.list_complete(tmp_path)
    assert (folder / "meta" / "consolidated.00.pth").is_file()
    assert bits_equal(seen[0].last, open_weights(folder / "meta"))
