"""titan.api: what notebooks and scripts call."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from launchers import start
from tests.support.runs import TINY
from titan import api, law
from titan import plan as plan_command
from titan.console.numbers import format_rounded
from titan.errors import ConfigError, RunError
from titan.report.render import law_report

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = f"""
import sys
from titan import api
result = api.train(api.compose(*{TINY!r}, "name=cell", *sys.argv[1:]))
print("RESULT", result.finished, result.step, len(result.losses), "torch" in sys.modules)
"""


def python(directory: Path, *arguments: str, text: str | None = None) -> str:
    """What a fresh Python prints in a directory."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, input=text, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> api.Result:
    """A run of three steps in this process."""
    folder = tmp_path_factory.mktemp("api")
    run = api.compose(*TINY, "checkpoint.every=2", "evaluation.tokens=256", f"hydra.run.dir={folder}/run")
    return api.train(run, in_process=True)


def test_it_imports_without_torch(tmp_path: Path) -> None:
    read = "import sys; from titan import api; print('torch' in sys.modules)"
    assert python(tmp_path, "-c", read) == "False\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "text"),
    [pytest.param(["-c", SCRIPT], None, id="python-c"), pytest.param(["-", "parallelism=ddp"], SCRIPT, id="stdin")],
)
def test_train_without_a_main_file(tmp_path: Path, arguments: Sequence[str], text: str | None) -> None:
    assert "RESULT True 3 3 False" in python(tmp_path, *arguments, text=text)


def test_the_result_is_what_the_run_wrote(trained: api.Result) -> None:
    wrote = json.loads((trained.directory / "result.json").read_text())
    assert (trained.finished, trained.step, trained.tokens, trained.exit_code) == (True, 3, 3 * 128, 0)
    assert (trained.first_loss, trained.last_loss) == (wrote["first_loss"], wrote["last_loss"])
    assert trained.checkpoint == trained.directory / "checkpoints" / "step-3"
    assert trained.losses.tolist()[::2] == [trained.first_loss, trained.last_loss]


@pytest.mark.full
def test_a_finished_run_is_not_trained_again(trained: api.Result) -> None:
    again = api.train(api.compose(f"resume={trained.directory}"), in_process=True)
    assert again.values == trained.values
    assert len(api.open_run(trained.directory).attempts) == 1


def test_open_run(trained: api.Result) -> None:
    saved = api.open_run(str(trained.directory))
    assert saved.result == trained
    assert saved.config["model"]["dim"] == 32
    assert [attempt.kind for attempt in saved.attempts] == ["start"]
    assert [checkpoint.step for checkpoint in saved.checkpoints] == [2, 3]
    assert saved.checkpoints[-1].path == trained.checkpoint
    assert saved.metrics["step"].tolist() == [1, 2, 3]
    assert saved.metrics["step"].dtype == np.int64
    assert np.isfinite(saved.metrics["validation_loss"]).tolist() == [False, False, True]
    assert all(len(text) == 16 for text in saved.metrics["batch_hash"])
    assert "rows" not in saved.metrics


@pytest.mark.full
def test_frame_has_a_row_per_step(trained: api.Result) -> None:
    pytest.importorskip("pandas")
    frame = api.open_run(trained.directory).frame()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["loss"].to_numpy().tolist() == trained.losses.tolist()


def made(directory: Path, lines: Sequence[dict[str, Any]], starts: Sequence[int]) -> api.SavedRun:
    """A run's directory with metrics, and an attempt from each of the steps `starts`."""
    config = {"training": {"steps": 5}}
    content = {"run_id": "r", "ids": {"science": "s"}, "science": {}, "config": config, "overrides": []}
    documents = [{"attempt": number, "from_step": step, **content} for number, step in enumerate(starts, 1)]
    (directory / "run.yaml").write_text("".join("---\n" + yaml.safe_dump(document) for document in documents))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return api.SavedRun(directory)


def test_metrics_are_those_of_the_attempt_that_counts(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0, "attempt": 1}, {"step": 2, "loss": 4.0, "attempt": 1},
        {"step": 2, "validation_loss": 4.5, "attempt": 1}, {"step": 3, "loss": 3.0, "attempt": 1},
        {"step": 2, "loss": None, "attempt": 2},
    ]  # fmt: skip
    metrics = made(tmp_path, lines, [0, 1]).metrics
    assert metrics["step"].tolist() == [1, 2]
    assert metrics["loss"][0] == 5.0
    assert np.isnan(metrics["loss"][1])
    assert "validation_loss" not in metrics


def test_records_of_one_step_become_one_row(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 5.0, "time": 1.0, "attempt": 1},
        {"step": 1, "validation_loss": 4.5, "time": 2.0, "attempt": 1},
    ]
    metrics = made(tmp_path, lines, [0]).metrics
    assert {name: column.tolist() for name, column in metrics.items()} == {
        "step": [1], "loss": [5.0], "validation_loss": [4.5], "time": [1.0], "attempt": [1],
    }  # fmt: skip


def test_a_result_of_an_earlier_attempt_is_not_the_runs(tmp_path: Path) -> None:
    saved = made(tmp_path, [{"step": 4, "loss": 1.0, "attempt": 2}], [0, 3])
    (tmp_path / "result.json").write_text(json.dumps({"finished": False, "step": 3, "attempt": 1}))
    assert saved.result is None
    outcome = api._read_outcome(tmp_path, 130)
    assert (outcome.finished, outcome.step, outcome.exit_code) == (False, 4, 130)


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        pytest.param(["modle=debug"], "did you mean 'model'", id="name"),
        pytest.param(["training.steps=0"], "training.steps=0: must be at least 1", id="range"),
        pytest.param(["-m", "optimizer.lr=1e-3,1e-2"], "-m: is an option of titan.train", id="sweep"),
        pytest.param(["--help"], "--help: is an option of titan.train", id="help"),
        pytest.param(["hydra/launcher=slurm", "cluster=h100"], "hydra/launcher=slurm: takes the command", id="slurm"),
        pytest.param(
            ["+hydra.callbacks.a._target_=hydra.experimental.callbacks.LogJobReturnCallback"],
            "hydra.callbacks: takes the command",
            id="callbacks",
        ),
    ],
)
def test_compose_rejects(overrides: Sequence[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        api.compose(*TINY, *overrides)
    assert sentence in str(rejected.value)


@pytest.mark.full
@pytest.mark.parametrize("parallelism", ["single", "ddp"])
def test_an_error_of_ranks_is_raised(tmp_path: Path, parallelism: str, capfd: pytest.CaptureFixture[str]) -> None:
    diverging = ["optimizer=sgd", "optimizer.lr=1e30", "training.bad_steps=1", "schedule.warmup=0"]
    run = api.compose(*TINY, *diverging, f"parallelism={parallelism}", f"hydra.run.dir={tmp_path}/run")
    with pytest.raises(RunError) as failed:
        api.train(run)
    assert "training.bad_steps=1" in str(failed.value)
    assert str(failed.value) in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "reasons", "kind", "message"),
    [
        pytest.param(1, ["a: b."], RunError, "a: b.", id="one"),
        pytest.param(2, ["a=b: can't be."], ConfigError, "a=b: can't be.", id="rejected"),
        pytest.param(1, ["first", "last"], RunError, "last", id="restarted"),
        pytest.param(1, [], RunError, "/nowhere: the run ended with exit code 1; see log/ in it.", id="none"),
    ],
)
def test_train_raises_what_the_launcher_reports(
    code: int, reasons: list[str], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_local(run: api.Run, apart: bool, report: Callable[[str], object]) -> int:
        print("titan: what is printed is not read", file=sys.stderr)
        for reason in reasons:
            report(reason)
        return code

    monkeypatch.setattr(start, "run_local", run_local)
    with pytest.raises(kind) as failed:
        api.train(api.compose(*TINY, "hydra.run.dir=/nowhere"))
    assert str(failed.value) == message


@pytest.mark.full
def test_train_takes_the_main_thread(tmp_path: Path) -> None:
    run, errors = api.compose(*TINY, f"hydra.run.dir={tmp_path}/run"), []

    def body() -> None:
        try:
            api.train(run)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert errors == ["api.train: handles signals, which only the main thread can; call it from there."]


@pytest.mark.full
def test_a_rank_of_torchrun_starts_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.compose(*TINY, f"hydra.run.dir={tmp_path}/run")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="rank 1 of 2 of torchrun or srun"):
        api.train(run)


@pytest.mark.full
def test_law_gives_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{n},{d},{2 + 40 * n**-0.3 + 80 * d**-0.3}" for n in (1e7, 3e7, 9e7) for d in (2e8, 8e8, 3.2e9)]
    (tmp_path / "runs.csv").write_text("\n".join(["N,D,loss", *rows]))
    monkeypatch.chdir(tmp_path)
    found = api.law("runs.csv", target="200M,8B", replicates=100)
    assert law.main(["runs.csv", "target=200M,8B", "replicates=100", "to=a.json"]) == 0
    assert json.loads(law_report.format_json(found)) == json.loads(Path("a.json").read_text())
    (corpus,) = found.corpora
    assert corpus.laws[0].floor.plain == pytest.approx(2, abs=0.05)
    target = corpus.rungs[-1]
    assert (target.n, target.d, target.is_fitted, target.loss) == (2e8, 8e9, False, None)
    assert "floor E" in str(found) and "&lt;" not in found._repr_html_()
    with pytest.raises(ConfigError, match=r"no-runs\.csv: there is no such file"):
        api.law(["no-runs.csv"])


def test_compare_gives_findings(trained: api.Result) -> None:
    found = api.compare([trained.directory], margin=0.5)
    assert found.margin == 0.5
    assert [run.step for arm in found.variants for run in arm.runs] == [3]
    assert api.compare(trained.directory).title == found.title
    assert found.headline and found.headline in repr(found) and len(repr(found)) < 400
    assert found._repr_html_().startswith("<p>")


@pytest.mark.parametrize(
    ("directory", "options", "sentence"),
    [
        pytest.param("nowhere", {}, "nowhere: there is no such directory", id="directory"),
        pytest.param(".", {"margin": 0.0}, "margin=0: must be above 0", id="range"),
    ],
)
def test_compare_rejects(directory: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        api.compare([directory], **options)


def test_open_run_rejects_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        api.open_run(tmp_path)
    with pytest.raises(ConfigError, match="there is no such directory"):
        api.open_run(tmp_path / "gone")


@pytest.mark.full
def test_a_plan_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["model=llama8b", "parallelism=fsdp", "cluster=h100", "dataset=synthetic", "cluster.price=2"]
    found = api.plan(*given)
    assert plan_command.main(given) == 0
    assert f"step         {format_rounded(found.step_seconds.value)} s" in capsys.readouterr().out
    assert found.cost is not None and found.cost.value == pytest.approx(2 * found.device_hours.value)
    with pytest.raises(ConfigError, match=r"-m: a sweep takes the command titan\.plan"):
        api.plan("-m", *given, "training.seed=1,2")


@pytest.mark.full
def test_notebooks_get_short_lines_and_tables() -> None:
    run = replace(api.compose("model=debug", "name=a"), name="a<b")
    assert repr(run).startswith("Run(name=a<b, model=debug, ") and len(repr(run)) < 250
    assert ">a&lt;b</td>" in run._repr_html_()
    plan = api.plan("model=llama8b", "parallelism=fsdp", "cluster=h100", "dataset=synthetic")
    facts = r"step=.* s \(.*, speed=.*, MFU=.* % .*, memory=.* GiB .* of 79.0, fits, device-hours=.*"
    assert re.fullmatch(rf"Plan\({facts}\)", repr(plan))
    assert plan._repr_html_().count("<tr>") == 5
    assert dir(api) == sorted(api.__all__)


def continue_greedily(module: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The most likely tokens after some others."""
    ids = list(tokens)
    for _ in range(count):
        ids.append(int(module.head(module(torch.tensor([ids])))[0, -1].argmax()))
    return ids[len(tokens) :]


def test_the_loaded_module_is_the_one_that_generates(trained: api.Result) -> None:
    loaded = api.load(trained)
    (row,) = api.generate(trained, tokens=(1, 2, 3), max_tokens=4, temperature=0, dtype="fp32")
    assert row["tokens"] == continue_greedily(loaded.module, (1, 2, 3), 4) and row["text"] is None
    assert loaded.tokenizer is None and not any(weight.requires_grad for weight in loaded.module.parameters())
    earlier = api.load(trained.directory, step=2).module
    assert not torch.equal(earlier.head.weight, loaded.module.head.weight)
    assert repr(loaded) == "LoadedModel(module=LlamaModel, parameters=19.6k, tokenizer=none)"


@pytest.mark.full
@pytest.mark.parametrize("layout", [["parallelism=tp"], ["parallelism=pp"], ["precision=bf16_pure"]], ids=str)
def test_a_module_of_any_layout_has_the_loss_of_the_run(layout: list[str], tmp_path: Path) -> None:
    given = [*TINY, "model.heads=4", "model.kv_heads=2", "evaluation.tokens=256", f"hydra.run.dir={tmp_path}/run"]
    result = api.train(api.compose(*given, *layout), quiet=True)
    module = api.load(result).module
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    measured = api.evaluate(result, "parallelism=single")["weights"]["validation_loss"]
    assert measured == pytest.approx(result.validation_loss, rel=1e-5)


@pytest.mark.full
def test_converted_weights_are_loaded_as_they_were(trained: api.Result, tmp_path: Path) -> None:
    folder = api.convert(trained, tmp_path / "exported", dtype="keep")
    assert torch.equal(api.load(folder).module.head.weight, api.load(trained).module.head.weight)


@pytest.mark.full
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        pytest.param(lambda run: api.load(run, step=9), "step-9: there is no such directory", id="step"),
        pytest.param(lambda run: api.load("no-run"), "no-run: there is no such directory", id="directory"),
        pytest.param(lambda run: api.generate(run, max_tokens=0), "max_tokens=0: must be at least 1", id="range"),
        pytest.param(lambda run: api.generate(run, "a", lenght=1), "lenght=1: there is no such setting", id="name"),
        pytest.param(lambda run: api.generate(run, "a"), "has no tokenizer to read a prompt with", id="tokenizer"),
        pytest.param(lambda run: api.evaluate(run, sets=["no.txt"]), "there is no file no.txt", id="file"),
        pytest.param(lambda run: api.convert(run, run), "is inside", id="target"),
        pytest.param(lambda run: api.sweep("optimizer.lr=1,0", *TINY), r"optimizer.lr=0: .*trial 2", id="trial"),
        pytest.param(lambda run: api.sweep("--help"), "--help: is an option of titan.train", id="option"),
    ],
)
def test_what_can_not_work_is_raised(
    call: Callable[[api.Result], object], sentence: str, trained: api.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.directory.parent)
    with pytest.raises(ConfigError, match=sentence):
        call(trained)


def test_weights_of_a_class_that_is_not_trusted_are_not_loaded(trained: api.Result, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.directory / "checkpoints/step-3", tmp_path / "step-3")
    content = json.loads((folder / "manifest.json").read_text())
    content["model"]["_target_"] = "mod_evil.Model"
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="TITAN_MODULES=mod_evil"):
        api.load(folder)


def test_a_run_that_has_saved_nothing_says_so(tmp_path: Path) -> None:
    made(tmp_path, [], [0])
    with pytest.raises(ConfigError, match="is a run without a complete checkpoint"):
        api.load(tmp_path)


def test_a_sweep_returns_its_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_local(run: api.Run, apart: bool, report: Callable[[str], object]) -> int:
        if run.training.seed == 1:
            raise RunError("the loss is lost.")
        result = {"finished": True, "step": 3, "validation_loss": 4.5, "last_loss": 5.0}
        (Path(run.directory) / "result.json").write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(start, "run_local", run_local)
    found = api.sweep(*TINY, "training.seed=0,1", f"hydra.sweep.dir={tmp_path}/s", quiet=True)
    assert capfd.readouterr() == ("", "")
    assert found.directory == tmp_path / "s" and os.fspath(found) == str(tmp_path / "s")
    assert [(t.overrides, t.reason) for t in found.trials] == [
        (("training.seed=0",), None), (("training.seed=1",), "the loss is lost."),
    ]  # fmt: skip
    assert found.list_facts()["training.seed=1"] == "failed: the loss is lost."
    frame = found.frame()
    assert frame["training.seed"].tolist() == [0, 1] and frame["validation_loss"].tolist()[0] == 4.5


def test_quiet_prints_nothing_and_raises(
    trained: api.Result, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = api.compose(f"resume={trained.directory}")
    capfd.readouterr()
    assert api.train(run, quiet=True).values == trained.values

    def run_local(run: api.Run, apart: bool, report: Callable[[str], object]) -> int:
        os.write(1, b"a rank's\n")
        print("lost", file=sys.stderr)
        report("the loss is lost.")
        return 1

    monkeypatch.setattr(start, "run_local", run_local)
    with pytest.raises(RunError, match=r"the loss is lost\."):
        api.train(run, quiet=True)
    assert capfd.readouterr() == ("", "")


def test_runs_and_comparisons_are_tables(trained: api.Result, tmp_path: Path) -> None:
    saved = api.open_run(trained.directory)
    assert repr(saved).startswith(f"SavedRun(directory={trained.directory}, state=finished, step 3, last_loss=")
    assert ">validation_loss</th>" in saved._repr_html_() and len(repr(trained)) < 300
    unfinished = made(tmp_path, [{"step": 4, "loss": 1.25, "attempt": 1}], [0])
    assert repr(unfinished) == f"SavedRun(directory={tmp_path}, state=unfinished, step 4, last_loss=1.25)"
    frame = api.compare(saved).frame()
    assert frame["step"].tolist() == [3] and frame["directory"].tolist() == [str(trained.directory)]
