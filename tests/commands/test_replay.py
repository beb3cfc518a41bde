"""`python -m titan.replay`: a repeated step is the run's own, and shows what differs, on any layout."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.corruption import flip_bit
from tests.support.matrix import EXACT, MODEL
from tests.support.runs import compose_tiny_run, read_step_records, train_run
from tests.support.tiers import full, select_cases
from titan import replay
from titan.checkpoint import select
from titan.numerics.differences import compare_fingerprints
from titan.numerics.fingerprints import fingerprint_tensor
from titan.run.directory import read_attempts
from titan.run.run import Run
from titan.training import recompose
from titan.training.replay.request import find_changes

SETTINGS = ("optimizer=sgd", "optimizer.lr=0.1", "training.steps=7", "checkpoint.every=3", *MODEL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on one device, with checkpoints of steps 3, 6 and 7."""
    return trained(tmp_path_factory.mktemp("run") / "first", *SETTINGS)


def trained(directory: Path, *settings: str, layout: str = "single") -> Run:
    """A finished run, which records the command line that a user would have given."""
    made = compose_tiny_run(directory, *settings, "checkpoint.keep=9", layout=layout)
    train_run(made)
    return made


def replayed(run: Run, folder: Path, *words: str) -> dict[str, Any]:
    assert replay.main([run.directory, *words, f"to={folder}/seen.json"]) == 0
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


def files(run: Run) -> dict[str, tuple[int, bytes]]:
    found = (file for file in Path(run.directory).rglob("*") if file.is_file())
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in found}


@pytest.mark.full
@pytest.mark.parametrize("step", [full(1), 5, full(4), full(7)])
def test_a_step_is_bitwise_that_of_the_run(run: Run, tmp_path: Path, step: int) -> None:
    before = files(run)
    seen, own = replayed(run, tmp_path, f"step={step}"), read_step_records(run)[step - 1]
    keys = ("loss", "grad_norm", "lr", "rows", "batch_hash", "tokens")
    assert {key: seen["record"][key] for key in keys} == {key: own[key] for key in keys}
    assert files(run) == before


@pytest.mark.full
def test_a_copy_of_a_checkpoint_serves_too(tmp_path: Path) -> None:
    made = trained(tmp_path / "runs" / "first", *SETTINGS, f"checkpoint.path=file://{tmp_path}/elsewhere")
    shutil.rmtree(tmp_path / "runs" / "first" / "checkpoints")
    seen = replayed(made, tmp_path, "step=5")
    assert seen["record"]["loss"] == read_step_records(made)[4]["loss"]
    flip_bit(tmp_path / "elsewhere" / "first" / "step-3" / "__0_0.distcp")
    assert replay.main([made.directory, "step=5"]) == 1


def test_copies_that_can_not_be_read_here_do_not_matter(run: Run) -> None:
    found = select.list_candidates(
        Path(run.directory), "unknown://bucket/x", read_attempts(Path(run.directory))[0]["run_id"]
    )
    assert sorted(found) == [3, 6, 7]


def test_the_largest_losses_are_those_of_the_step(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, tokens = (replayed(run, tmp_path, "step=5", "tokens=128")[key] for key in ("record", "tokens"))
    assert "from the checkpoint of step 3 (1 step before step 5), " in capsys.readouterr().err
    assert len(tokens) == 128 == record["valid_tokens"]
    assert math.fsum(t["loss"] for t in tokens) / 128 == pytest.approx(record["loss"], rel=1e-6)
    assert [t["loss"] for t in tokens] == sorted((t["loss"] for t in tokens), reverse=True)
    assert {t["row"] for t in tokens} == set(range(record["rows"][0], record["rows"][1] + 1))


@pytest.mark.full
def test_a_step_of_ranks_is_repeated_on_one_device(tmp_path: Path) -> None:
    made = trained(tmp_path / "run", *SETTINGS, "debug.audit=2", layout="fsdp2")
    seen, own = replayed(made, tmp_path, "step=5", "parallelism=single"), read_step_records(made)[4]
    assert (seen["record"]["rows"], seen["record"]["batch_hash"]) == (own["rows"], own["batch_hash"])
    assert all(abs(seen["record"][key] / own[key] - 1) <= EXACT for key in ("loss", "grad_norm"))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["parallelism=tp", *map(full, ("parallelism=fsdp_tp", "parallelism=3d", "parallelism=4d"))]
)
def test_all_layouts_see_the_same(run: Run, tmp_path: Path, layout: str) -> None:
    alone, split = (replayed(run, tmp_path, "step=5", words) for words in ("parallelism=single", layout))
    assert [t["row"] for t in split["tokens"]] == [t["row"] for t in alone["tokens"]]
    assert list(split["statistics"]) == list(alone["statistics"])
    for name, values in alone["statistics"].items():
        assert split["statistics"][name]["rms"] == pytest.approx(values["rms"], rel=EXACT)
        assert split["statistics"][name]["largest"] == pytest.approx(values["largest"], rel=EXACT)
    compared = replayed(run, tmp_path, "step=5", "parallelism=single", f"against={layout}")
    assert compared["verdict"].startswith("no fault of layout or model") and compared["findings"] == []
    assert 0 < max(compared["differences"].values()) <= EXACT


@pytest.mark.full
def test_the_first_layer_that_differs_is_named(run: Run, tmp_path: Path) -> None:
    seen = replayed(run, tmp_path, "step=5", "against=model.norm_eps=0.01")
    assert "in fp32 the first difference is in the forward pass of layers.0.attention_norm" in seen["verdict"]
    assert seen["differences"]["forward/tok_embeddings"] == 0


@pytest.mark.full
def test_compiled_code_is_compared_compiled(compiler: None, tmp_path: Path) -> None:
    eager = trained(tmp_path / "run", *SETTINGS, "precision=bf16", "compile=off")
    seen = replayed(eager, tmp_path, "step=5", "against=compile=block")
    assert seen["record"]["grad_norm"] != seen["against"]["record"]["grad_norm"]
    assert "bitwise" not in seen["verdict"] and seen["verdict"].startswith("no fault of layout or model: all that was")
    assert "layers.0.attention_norm" in seen["answers"][-1] and "inside of compiled code in B" in seen["answers"][-1]
    assert "forward/layers.0" in seen["differences"] and "forward/layers.0.attention_norm" not in seen["differences"]
    assert any("randomly rounded repetitions" in answer for answer in seen["answers"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run like the first one, whose updates are twice as large, without checkpoints."""
    changes = ("optimizer.lr=0.2", "training.steps=3", "checkpoint=off")
    return trained(tmp_path_factory.mktemp("run") / "other", *SETTINGS, *changes)


def test_the_first_step_that_differs_is_found(
    run: Run, other: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = replayed(run, tmp_path, f"against={other.directory}")
    out = capsys.readouterr().out
    assert "the runs differ first at step 2, whose loss differs by " in out
    assert seen["record"]["step"] == 2 and seen["differences"] == {}
    assert seen["verdict"].startswith("weights have drifted before step 2: ")
    assert "so activations are not compared" in seen["verdict"]
    assert len(seen["weights"]) > 10 and max(seen["weights"].values()) > 1e-4
    assert f"the same step from the weights of {run.directory}" in out
    advised = out.partition("python -m titan.replay ")[2].splitlines()[0]
    assert advised == f"{run.directory} step=2 start=0 against=optimizer.lr=0.2"
    assert replay.main(shlex.split(advised)) == 0
    assert "relative difference of" not in out


@pytest.mark.parametrize(
    ("overrides", "other_overrides", "changes"),
    [
        (["optimizer.lr=0.1"], ["optimizer.lr=0.2"], ["optimizer.lr=0.2"]),
        (["precision.matmuls=float8_rowwise", "parallelism=tp"], ["parallelism=fsdp"],
         ["precision.matmuls=null", "parallelism=fsdp"]),
        (["precision=fp32", "+model.norm_eps=0.01"], [], ["precision=bf16", "model.norm_eps=1e-5"]),
        (["training.seed=0", "optimizer.momentum=0.5"], [], []),
        (["dataset.path=data"], [], ["dataset.path='two words'"]),
    ],
    ids=["value", "value-of-the-first", "choice-of-the-first", "equal-or-unknown", "quoted"],
)  # fmt: skip
def test_the_advised_replay_has_the_settings_of_the_other_run(
    overrides: list[str], other_overrides: list[str], changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": {"norm_eps": 1e-5}, "precision": {"matmuls": None}, "training": {"seed": 0}}
    other = {"choices": {"precision": "bf16"}, "config": {**config, "dataset": {"path": "two words"}}}
    first_config = {"model": {"norm_eps": 0.01}, "precision": {"matmuls": "float8_rowwise"}, "training": {"seed": 0}}
    documents = {"a": {"overrides": overrides, "config": first_config}, "b": {"overrides": other_overrides, **other}}
    monkeypatch.setattr(recompose, "read_run_attempts", lambda name: [documents[name]])
    assert find_changes("a", "b") == changes


@pytest.mark.parametrize(
    ("values", "other_values", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([math.inf, 1.0], [math.inf, 1.0], 0.0),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([math.inf, 1.0], [torch.finfo(torch.float32).max, 1.0], math.inf),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_are_not_finite_equal_themselves_only(
    values: list[float], other_values: list[float], distance: float, dtype: torch.dtype
) -> None:
    a, b = fingerprint_tensor(torch.tensor(values)), fingerprint_tensor(torch.tensor(other_values, dtype=dtype))
    assert compare_fingerprints(a, b)[0] == distance


def test_runs_that_agree_have_no_step_to_look_at(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([run.directory, f"against={run.directory}"]) == 0
    assert "the runs agree to rounding (bitwise) in all 7 common steps, 1 to 7" in capsys.readouterr().out


@pytest.mark.full
def test_a_later_step_names_the_one_to_look_at(
    run: Run, other: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = replayed(run, tmp_path, "step=3", "start=0", f"against={other.directory}")
    assert seen["verdict"].startswith("weights have drifted before step 3")
    assert "the runs differ since step 2, whose loss differs by" in capsys.readouterr().out
    same = replayed(run, tmp_path, "step=5", f"against={run.directory}")
    assert set(same["weights"].values()) == {0.0} and same["verdict"].startswith("both are the same, bitwise")


@pytest.mark.full
def test_equal_initial_weights_show_the_module_that_differs(run: Run, tmp_path: Path) -> None:
    wrong = trained(tmp_path / "wrong", *SETTINGS, "model.norm_eps=0.01")
    seen = replayed(run, tmp_path, f"against={wrong.directory}")
    assert seen["record"]["step"] == 1 and set(seen["weights"].values()) == {0.0}
    assert "in fp32 the first difference is in the forward pass of layers.0.attention_norm" in seen["verdict"]


@pytest.mark.full
def test_other_batches_are_not_compared(run: Run, tmp_path: Path) -> None:
    other_seed = trained(tmp_path / "seed", *SETTINGS, "training.seed=1")
    seen = replayed(run, tmp_path, f"against={other_seed.directory}")
    assert seen["record"]["step"] == 1 and seen["differences"] == {}
    assert seen["verdict"].startswith("the batches of step 1 differ (rows ")
    assert seen["verdict"].endswith("so its activations are not compared")


REFUSED = {
    "no run": (["nowhere", "step=3"], "nowhere: there is no such directory"),
    "two runs": (["RUN", "RUN", "step=3"], ": is another run; give against="),
    "no step": (["RUN"], "step=0: give the step to look at, or against=RUN, another run"),
    "no step of other settings": (["RUN", "against=precision=bf16"], "step=0: give the step to look at"),
    "a step behind the last": (["RUN", "step=8"], "step=8: the run in"),
    "no checkpoint before": (["RUN", "step=3"], "no complete checkpoint before this step, the first is of step 3"),
    "no such checkpoint": (["RUN", "step=7", "start=4"], "start=4: the run has no complete checkpoint of this step"),
    "other data": (["RUN", "step=7", "dataset.seed=5"], "the data here are not those of the run"),
    "against nothing": (["RUN", "step=7", "against=nothing"], "against=nothing: is no run's directory"),
    "an unknown setting": (["RUN", "step=7", "optimizer.lrr=1"], "optimizer.lrr"),
}  # fmt: skip


@pytest.mark.parametrize(
    "words, sentence",
    select_cases(
        [pytest.param(*case, id=name) for name, case in REFUSED.items()],
        ("no run", "two runs", "no step", "no checkpoint before", "against nothing"),
    ),
)
def test_what_can_not_be_replayed_is_refused(
    run: Run, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([run.directory if word == "RUN" else word for word in words]) == 2
    assert sentence in capsys.readouterr().err
