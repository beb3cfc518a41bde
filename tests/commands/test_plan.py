"""`python -m titan.plan`."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import full, select_cases
from titan import plan
from titan.console.numbers import format_rounded
from titan.estimate.block_time import SecondsByCause
from titan.estimate.step_time import StepTime
from titan.estimate.traced.events import Region
from titan.estimate.traced.memory import LiveMemory
from titan.estimate.traced.replay import RankResult, RankTime, TracedStep
from titan.run.run import Run

RUN = ["model=llama1b", "dataset=synthetic", "checkpoint=off", "parallelism=fsdp", "cluster=h100", "compile=block"]


def test_one_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*RUN, "cluster.price=2.5", f"to={file}"]) == 0
    out = capsys.readouterr().out
    for text in (
        "8 x NVIDIA H100",
        "weights",
        "matmuls",
        "tokens/s per device",
        "MFU",
        "device-hours",
        "cost",
        "faster with",
    ):
        assert text in out
    assert len(out.splitlines()) <= 40
    found = json.loads(file.read_text())
    for name in ("step_seconds", "tokens_per_second_per_device", "memory_gib", "device_hours", "cost"):
        assert found[name]["low"] < found[name]["value"] < found[name]["high"], name
    for name in ("step_seconds", "memory_gib"):
        assert sum(found["parts"][name].values()) == pytest.approx(found[name]["value"])


@pytest.mark.full
def test_what_gradients_in_bf16_save_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["parallelism.pipeline=4", "parallelism.shard=2", "parallelism.microbatches=4", "memory=full"]
    assert plan.main([*RUN, *settings]) == 0
    assert re.search(r"GiB less with precision\.accumulate=bf16, which rounds", capsys.readouterr().out)
    assert plan.main([*RUN, *settings, "precision.accumulate=bf16"]) == 0
    assert "precision.accumulate" not in capsys.readouterr().out


@pytest.mark.full
def test_a_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*RUN, "training.global_batch=65536", "plan.search=true", "plan.keep=3", f"to={file}"]) == 0
    out = capsys.readouterr().out
    assert "the fastest that fit" in out and "front" in out
    assert len(json.loads(file.read_text())["search"]["best"]) == 3


@pytest.mark.full
def test_a_grid_is_planned_and_leaves_nothing_but_its_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main(["-m", *RUN[:3], *RUN[4:], "parallelism=ddp,fsdp", "name=grid", "to=[g.html,g.json]"]) == 0
    out = capsys.readouterr().out
    assert "parallelism=ddp" in out and "parallelism=fsdp" in out and "2 trials" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.html", "g.json"]
    found = json.loads(Path("g.json").read_text())
    assert [trial["trial"] for trial in found["trials"]] == ["parallelism=ddp", "parallelism=fsdp"]
    hours = [trial["device_hours"]["value"] for trial in found["trials"]]
    assert found["device_hours"] == pytest.approx(sum(hours)) and min(hours) > 0
    assert "Plan of 2 trials" in Path("g.html").read_text()


GRID = ("-m", "model=llama8b", "dataset=synthetic", "checkpoint=off", "parallelism=fsdp", "training.seq_len=8192",
        "training.global_batch=524288", "name=grid")  # fmt: skip


def test_hardware_is_compared_with_its_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main([*GRID, "cluster=h100,b200", "cluster.price=2", "to=g.json"]) == 0
    out = capsys.readouterr().out
    first, second = (trial["cost"]["value"] for trial in json.loads(Path("g.json").read_text())["trials"])
    assert first > second and f"cost {first + second:.3g}" in out
    assert re.search(r"cluster=h100 .* 8 +2\.\d+ +\d\.\d+  2\.\d+ s of matmuls\n", out)
    assert re.search(r"cluster=b200 .* 4 +1\.\d+ +2\.\d+\n", out)
    assert "effect of" not in out  # both learn the same, so no seeds are needed
    assert plan.main([*GRID, "cluster=h100,h100"]) == 2
    assert "trial 2 of the sweep: is the same as another" in capsys.readouterr().err


@pytest.mark.full
def test_micro_batches_and_what_is_slower_are_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main([*GRID, "cluster=h100", "memory=full,none", "to=g.html"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"memory=full .* 31.8 +4 +3\.57  1\.56 s of recomputation\n", out)
    assert re.search(r"memory=none .* 65.6 +8 +2\.96\n", out)
    assert "<th>micro-batches</th>" in Path("g.html").read_text()


OWN = ("modules=[tests]", "model._target_=tests.support.own_models.OwnLlama", "dataset=synthetic", "cluster=h100",
       "parallelism=fsdp")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", ["linear", "gated"])
def test_modules_of_ones_own_have_no_intervals(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*OWN, f"+model.attention={kind}"]) == 0
    out = capsys.readouterr().out
    named = {"linear": "LinearCore", "gated": "GatedAttention"}[kind]
    assert f"intervals    none, because tests.support.own_models.{named} is not titan's" in out
    assert " to " not in out and "published" not in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["parallelism.shard=4", "parallelism.context=2"], "model=llama1b: 1.24B", id="typed degrees"),
        pytest.param(["parallelism=fsdp"], "model=llama1b parallelism=fsdp: 1.24B", id="choice"),
        pytest.param(["parallelism=single"], "model=llama1b parallelism=single: 1.24B", id="single"),
    ],
)
def test_the_first_line_names_no_other_layout(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["model=llama1b", "dataset=synthetic", "cluster=h100", *words]) == 0
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.full
def test_warnings_of_a_search_are_of_the_shown_layout(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["model=qwen3_30b_a3b", "dataset=synthetic", "cluster=h100", "cluster.nodes=2", "training.seq_len=4096"]
    search = ["training.global_batch=1048576", "plan.search=true", "parallelism.tensor=2"]
    assert plan.main([*line, *search]) == 0
    assert capsys.readouterr().err == ""
    assert plan.main([*line, *search, "parallelism.expert=1"]) == 0
    assert capsys.readouterr().err.count("parallelism.expert=1: each of 2 tensor ranks has whole experts") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["plan.serach=true"], "there is no such setting", id="setting"),
        pytest.param(["to=plan.txt"], "unknown file format; use one of .html, .json", id="format"),
        pytest.param(["to=nowhere/plan.html"], "there is no directory nowhere", id="directory"),
        pytest.param(["to=a.html", "to=b.json"], "to is given twice", id="twice"),
        pytest.param([*RUN, "plan.fit=runs"], "plan.fit=runs: was removed; leave it out, and measure", id="fit"),
        pytest.param(["plan.whole=true"], "plan.whole=true: takes effect with plan.trace=true only", id="whole"),
        pytest.param(["plan.keep=3"], "plan.keep=3: takes effect with plan.search=true only", id="keep"),
        full([*RUN, "parallelism.tensor=3"], "parallelism", id="layout"),
        full([*RUN, "cluster.hardware.memory_gb_per_second=null"], "operations needs it", id="figure"),
        full([*RUN[:3], "parallelism=single", "model=debug"], "titan.calibrate", id="this-machine"),
        full(["-m", *RUN, "training.seed=0,1", "plan.search=true"], "leave out -m", id="grid"),
        full(["--cfg", "job"], "--cfg: is an option of titan.train", id="cfg"),
    ],
)  # fmt: skip
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_the_command_lines_of_a_page_plan_to_its_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        *RUN,
        "model.layers=4",
        "training.seq_len=2048",
        "training.global_batch=16384",
        "memory.checkpointing=full",
    ]
    assert plan.main([*given, "plan.search=true", "plan.keep=2", "to=[a.html,a.json]"]) == 0
    page, found = Path("a.html").read_text(), json.loads(Path("a.json").read_text())
    train = "python -m titan.train "
    lines = [html.unescape(line) for line in re.findall(rf'<code class="command">({train}[^<]*)', page)]
    first, best = lines[0], lines[1]
    assert shlex.split(first.removeprefix(train)) == given
    assert plan.main([*shlex.split(best.removeprefix(train)), "to=b.json"]) == 0
    again = json.loads(Path("b.json").read_text())
    for name in ("step_seconds", "memory_gib"):
        assert again[name] == pytest.approx(found["search"]["best"][0][name])
    assert "written: a.html" in capsys.readouterr().out


@pytest.mark.full
def test_secrets_are_not_written(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    assert plan.main([*RUN, "name=https://me:hush@host/x", f"to={file}"]) == 0
    assert "hush" not in file.read_text() and "@host/x" in file.read_text()


@pytest.mark.full
def test_a_large_run_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["recipe=bench_405b_512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 120
    assert any(re.search(r"tokens: [\d.]+ days \(.* device-hours \(", line) for line in lines)


EXAMPLES = list(plan.COMMAND.examples)


@pytest.mark.parametrize(
    "example",
    select_cases(EXAMPLES, ("recipe=train_8b cluster.price=2.5",)),
)
def test_the_examples_of_the_help(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main(shlex.split(example)) == 0


def test_the_help_lists_settings_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Settings:\n")[2].partition("\n\n")[0].splitlines()
    assert {re.split(r"[=]", line.strip())[0] for line in lines} >= {"plan.search", "plan.keep", "to"}
    assert len({re.match(r"  \S+ +", line).end() for line in lines if re.match(r"  \S+ +", line)}) == 1  # type: ignore[union-attr]


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from titan import plan; code = plan.main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, *RUN, f"to={tmp_path}/a.html"], capture_output=True).returncode
        == 0
    )


@pytest.mark.full
def test_a_trace_agrees_with_the_model_and_is_in_every_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two independent figures: the closed form, and the real step's operations one by one."""
    monkeypatch.chdir(tmp_path)
    given = ["model=llama1b", "parallelism=fsdp", "cluster=h100", "dataset=synthetic", "compile=off", "checkpoint=off"]
    assert plan.main([*given, "training.global_batch=131072", "plan.trace=true", "to=[a.json,a.html]"]) == 0
    out, found, page = capsys.readouterr().out, json.loads(Path("a.json").read_text()), Path("a.html").read_text()
    trace, parts = found["trace"], found["parts"]["memory_gib"]
    live = sum(gib for name, gib in parts.items() if name not in ("context", "allocator"))
    assert trace["step_seconds"] == pytest.approx(found["step_seconds"]["value"], rel=0.1)
    assert trace["ranks"][0]["live_gib"] == pytest.approx(live, rel=0.05)
    assert trace["ranks"][0]["live_gib"] < trace["ranks"][0]["reserved_gib"] < trace["memory_gib"]
    assert sum(trace["parts"]["step_seconds"].values()) == pytest.approx(trace["step_seconds"])
    assert f"step       {format_rounded(trace['step_seconds'])} s, of which" in out
    assert "Memory over the traced step" in page
    assert f"peak {format_rounded(trace['ranks'][0]['live_gib'])} GiB: backward of the head" in page


@pytest.mark.full
def test_a_trace_takes_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan.main(["-m", *RUN, "training.seed=1,2", "plan.trace=true"]) == 2
    assert "plan.trace=true: takes one run; leave out -m." in capsys.readouterr().err


@pytest.mark.full
def test_a_sweep_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launchers.plugin.os.access", lambda *_: False)  # root may write everywhere
    assert plan.main(["-m", *RUN, "training.seed=1,2", "name=x"]) == 2
    assert f"hydra.sweep.dir=runs/x: {tmp_path} can't be written; choose another" in capsys.readouterr().err


SEARCHED = [
    "model=llama1b", "model.layers=2", "dataset=synthetic", "checkpoint=off", "cluster=h100", "compile=block",
    "training.global_batch=65536", "plan.search=true", "plan.keep=4",
]  # fmt: skip


@pytest.mark.full
def test_a_search_needs_no_layout_and_keeps_typed_degrees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*SEARCHED, "parallelism.tensor=4", f"to={file}"]) == 0
    out = capsys.readouterr().out
    assert "8 x NVIDIA H100" in out and "the fastest of the search" in out
    assert out.startswith("model=") and " parallelism=" not in out.splitlines()[0]
    layouts = [result["layout"] for result in json.loads(file.read_text())["search"]["best"]]
    assert len(layouts) == 4 and {layout["tensor"] for layout in layouts} == {4}
    assert {math.prod(layout.values()) for layout in layouts} == {8}


@pytest.mark.full
def test_a_search_keeps_typed_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    typed = ["memory=full", "parallelism.schedule=GPipe", "parallelism.pipeline=2", "parallelism.microbatches=4"]
    file = tmp_path / "plan.json"
    assert plan.main([*SEARCHED, *typed, f"to={file}"]) == 0
    capsys.readouterr()
    results = json.loads(file.read_text())["search"]["best"]
    assert len(results) == 4
    kept = {(r["memory"], r["schedule"], r["layout"]["pipeline"], r["microbatches"]) for r in results}
    assert kept == {("full", "GPipe", 2, 4)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            ["parallelism.tensor=3"], "parallelism.tensor=3: no layout on 8 devices .* one of 1, 2, 4, 8", id="degree"
        ),
        pytest.param(["precision=mxfp8"], "the cluster has NVIDIA H100", id="precision"),
        pytest.param(
            ["cluster.memory_gib=2", "parallelism=ddp"], "with .*parallelism.tensor=1.* fits 2 GiB", id="memory"
        ),
    ],
)
def test_a_search_that_can_not_work(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*SEARCHED, *words]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error) and "this machine" not in error


@pytest.mark.full
def test_the_fastest_results_are_traced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traced: list[str] = []
    live = LiveMemory(Region("F", 0, 0, 0), {"weights": 2.0**30})
    rank = RankResult(0, 5, live, None, (live, live), RankTime(SecondsByCause(), {}, (0,)))
    step = TracedStep((rank,), StepTime({"matmuls": 0.25}, 8, 8), 0.1)

    def trace(run: Run, settings: plan.PlanSettings) -> TracedStep:
        traced.append(str(run.layout))
        return step

    monkeypatch.setattr(plan, "_trace_step", trace)
    assert plan.main([*SEARCHED, "plan.trace=true", f"to={tmp_path / 'plan.html'}"]) == 0
    assert len(traced) == plan.TRACED_RESULTS  # the plan is the first result
    assert "traced 3  0.25 s" in capsys.readouterr().out
    assert "3: 0.25 s and" in (tmp_path / "plan.html").read_text()
