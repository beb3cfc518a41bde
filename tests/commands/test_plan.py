"""`python -m titan.plan`."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


RunPlan = Callable[..., tuple[str, str]]


@pytest.fixture
def run_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPlan:
    """Return what plans in an empty folder, and returns stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        assert plan.main(words) == code
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    return run


def read_json(name: str = "a.json") -> Any:
    return json.loads(Path(name).read_text())


def test_one_run(run_plan: RunPlan) -> None:
    out, _ = run_plan(*RUN, "cluster.price=2.5", "to=a.json")
    for text in ("8 x NVIDIA H100", "weights", "matmuls", "tokens/s per device", "MFU", "device-hours", "cost",
                 "faster with"):  # fmt: skip
        assert text in out
    assert len(out.splitlines()) <= 40
    found = read_json()
    for name in ("step_seconds", "tokens_per_second_per_device", "memory_gib", "device_hours", "cost"):
        assert found[name]["low"] < found[name]["value"] < found[name]["high"], name
    for name in ("step_seconds", "memory_gib"):
        assert sum(found["parts"][name].values()) == pytest.approx(found[name]["value"])


@pytest.mark.full
def test_what_gradients_in_bf16_save_is_stated(run_plan: RunPlan) -> None:
    settings = ["parallelism.pipeline=4", "parallelism.shard=2", "parallelism.microbatches=4", "memory=full"]
    assert re.search(r"GiB less with precision\.accumulate=bf16, which rounds", run_plan(*RUN, *settings)[0])
    assert "precision.accumulate" not in run_plan(*RUN, *settings, "precision.accumulate=bf16")[0]


@pytest.mark.full
def test_a_search(run_plan: RunPlan) -> None:
    out, _ = run_plan(*RUN, "training.global_batch=65536", "plan.search=true", "plan.keep=3", "to=a.json")
    assert "the fastest that fit" in out and "front" in out
    assert len(read_json()["search"]["best"]) == 3


@pytest.mark.full
def test_a_grid_is_planned_and_leaves_nothing_but_its_files(run_plan: RunPlan, tmp_path: Path) -> None:
    out, _ = run_plan("-m", *RUN[:3], *RUN[4:], "parallelism=ddp,fsdp", "name=grid", "to=[a.html,a.json]")
    assert "parallelism=ddp" in out and "parallelism=fsdp" in out and "2 trials" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]
    found = read_json()
    assert [trial["trial"] for trial in found["trials"]] == ["parallelism=ddp", "parallelism=fsdp"]
    hours = [trial["device_hours"]["value"] for trial in found["trials"]]
    assert found["device_hours"] == pytest.approx(sum(hours)) and min(hours) > 0
    assert "Plan of 2 trials" in Path("a.html").read_text()


GRID = ("-m", "model=llama8b", "dataset=synthetic", "checkpoint=off", "parallelism=fsdp", "training.seq_len=8192",
        "training.global_batch=524288", "name=grid")  # fmt: skip


def test_hardware_is_compared_with_its_cost(run_plan: RunPlan) -> None:
    out, _ = run_plan(*GRID, "cluster=h100,b200", "cluster.price=2", "to=a.json")
    first, second = (trial["cost"]["value"] for trial in read_json()["trials"])
    assert first > second and f"cost {first + second:.3g}" in out
    assert re.search(r"cluster=h100 .* 8 +2\.\d+ +\d\.\d+  2\.\d+ s of matmuls\n", out)
    assert re.search(r"cluster=b200 .* 4 +1\.\d+ +2\.\d+\n", out)
    assert "effect of" not in out  # both learn the same, so no seeds are needed
    assert "trial 2 of the sweep: is the same as another" in run_plan(*GRID, "cluster=h100,h100", code=2)[1]


@pytest.mark.full
def test_micro_batches_and_what_is_slower_are_columns(run_plan: RunPlan) -> None:
    out, _ = run_plan(*GRID, "cluster=h100", "memory=full,none", "to=a.html")
    assert re.search(r"memory=full .* 31.8 +4 +3\.57  1\.56 s of recomputation\n", out)
    assert re.search(r"memory=none .* 65.6 +8 +2\.96\n", out)
    assert "<th>micro-batches</th>" in Path("a.html").read_text()


OWN = ("modules=[tests]", "model._target_=tests.support.own_models.OwnLlama", "dataset=synthetic", "cluster=h100",
       "parallelism=fsdp")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), [("linear", "LinearCore"), ("gated", "GatedAttention")])
def test_modules_of_ones_own_have_no_intervals(kind: str, name: str, run_plan: RunPlan) -> None:
    out, _ = run_plan(*OWN, f"+model.attention={kind}")
    assert f"intervals    none, because tests.support.own_models.{name} is not titan's" in out
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
def test_the_first_line_names_no_other_layout(words: list[str], expected: str, run_plan: RunPlan) -> None:
    assert run_plan("model=llama1b", "dataset=synthetic", "cluster=h100", *words)[0].startswith(expected)


@pytest.mark.full
def test_warnings_of_a_search_are_of_the_shown_layout(run_plan: RunPlan) -> None:
    line = ["model=qwen3_30b_a3b", "dataset=synthetic", "cluster=h100", "cluster.nodes=2", "training.seq_len=4096"]
    search = ["training.global_batch=1048576", "plan.search=true", "parallelism.tensor=2"]
    assert run_plan(*line, *search)[1] == ""
    _, warned = run_plan(*line, *search, "parallelism.expert=1")
    assert warned.count("parallelism.expert=1: each of 2 tensor ranks has whole experts") == 1


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
        full(["-m", *RUN, "training.seed=1,2", "plan.trace=true"], "plan.trace=true: takes one run; leave out -m.",
             id="traced grid"),
        full(["--cfg", "job"], "--cfg: is an option of titan.train", id="cfg"),
    ],
)  # fmt: skip
def test_bad_input(arguments: list[str], message: str, run_plan: RunPlan) -> None:
    assert message in run_plan(*arguments, code=2)[1]


@pytest.mark.full
def test_the_command_lines_of_a_page_plan_to_its_figures(run_plan: RunPlan) -> None:
    given = [
        *RUN, "model.layers=4", "training.seq_len=2048", "training.global_batch=16384", "memory.checkpointing=full",
    ]  # fmt: skip
    out, _ = run_plan(*given, "plan.search=true", "plan.keep=2", "to=[a.html,a.json]")
    assert "written: a.html" in out
    train = "python -m titan.train "
    page = Path("a.html").read_text()
    first, best, *_ = (html.unescape(x) for x in re.findall(rf'<code class="command">({train}[^<]*)', page))
    assert shlex.split(first.removeprefix(train)) == given
    run_plan(*shlex.split(best.removeprefix(train)), "to=b.json")
    for name in ("step_seconds", "memory_gib"):
        assert read_json("b.json")[name] == pytest.approx(read_json()["search"]["best"][0][name])


@pytest.mark.full
def test_secrets_are_not_written(run_plan: RunPlan) -> None:
    run_plan(*RUN, "name=https://me:hush@host/x", "to=a.html")
    assert "hush" not in (page := Path("a.html").read_text()) and "@host/x" in page


@pytest.mark.full
def test_a_large_run_fits_one_screen(run_plan: RunPlan) -> None:
    lines = run_plan("recipe=bench_405b_512")[0].splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 120
    assert any(re.search(r"tokens: [\d.]+ days \(.* device-hours \(", line) for line in lines)


EXAMPLES = list(plan.COMMAND.examples)


@pytest.mark.parametrize("example", select_cases(EXAMPLES, ("recipe=train_8b cluster.price=2.5",)))
def test_the_examples_of_the_help(example: str, run_plan: RunPlan) -> None:
    run_plan(*shlex.split(example))


def test_the_help_lists_settings_in_columns(run_plan: RunPlan) -> None:
    lines = run_plan("--help")[0].partition("Settings:\n")[2].partition("\n\n")[0].splitlines()
    assert {re.split(r"[=]", line.strip())[0] for line in lines} >= {"plan.search", "plan.keep", "to"}
    assert len({match.end() for line in lines if (match := re.match(r"  \S+ +", line))}) == 1


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from titan import plan; code = plan.main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, *RUN, f"to={tmp_path}/a.html"]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.full
def test_a_trace_agrees_with_the_model_and_is_in_every_output(run_plan: RunPlan) -> None:
    """Two independent figures: the closed form, and the real step's operations one by one."""
    given = ["model=llama1b", "parallelism=fsdp", "cluster=h100", "dataset=synthetic", "compile=off", "checkpoint=off"]
    out, _ = run_plan(*given, "training.global_batch=131072", "plan.trace=true", "to=[a.json,a.html]")
    found, page = read_json(), Path("a.html").read_text()
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
def test_a_sweep_where_nothing_can_be_written(
    run_plan: RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers.plugin.os.access", lambda *_: False)  # root may write everywhere
    _, error = run_plan("-m", *RUN, "training.seed=1,2", "name=x", code=2)
    assert f"hydra.sweep.dir=runs/x: {tmp_path} can't be written; choose another" in error


SEARCHED = [
    "model=llama1b", "model.layers=2", "dataset=synthetic", "checkpoint=off", "cluster=h100", "compile=block",
    "training.global_batch=65536", "plan.search=true", "plan.keep=4",
]  # fmt: skip


@pytest.mark.full
def test_a_search_needs_no_layout_and_keeps_typed_degrees(run_plan: RunPlan) -> None:
    out, _ = run_plan(*SEARCHED, "parallelism.tensor=4", "to=a.json")
    assert "8 x NVIDIA H100" in out and "the fastest of the search" in out
    assert out.startswith("model=") and " parallelism=" not in out.splitlines()[0]
    layouts = [result["layout"] for result in read_json()["search"]["best"]]
    assert len(layouts) == 4 and {layout["tensor"] for layout in layouts} == {4}
    assert {math.prod(layout.values()) for layout in layouts} == {8}


@pytest.mark.full
def test_a_search_keeps_typed_settings(run_plan: RunPlan) -> None:
    typed = ["memory=full", "parallelism.schedule=GPipe", "parallelism.pipeline=2", "parallelism.microbatches=4"]
    run_plan(*SEARCHED, *typed, "to=a.json")
    results = read_json()["search"]["best"]
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
def test_a_search_that_can_not_work(words: list[str], expected: str, run_plan: RunPlan) -> None:
    _, error = run_plan(*SEARCHED, *words, code=2)
    assert re.search(expected, error) and "this machine" not in error


@pytest.mark.full
def test_the_fastest_results_are_traced(run_plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    live = LiveMemory(Region("F", 0, 0, 0), {"weights": 2.0**30})
    rank = RankResult(0, 5, live, None, (live, live), RankTime(SecondsByCause(), {}, (0,)))
    step = TracedStep((rank,), StepTime({"matmuls": 0.25}, 8, 8), 0.1)

    def trace(run: Run, settings: plan.PlanSettings) -> TracedStep:
        traced.append(str(run.layout))
        return step

    monkeypatch.setattr(plan, "_trace_step", trace)
    out, _ = run_plan(*SEARCHED, "plan.trace=true", "to=a.html")
    assert len(traced) == plan.TRACED_RESULTS  # the plan is the first result
    assert "traced 3  0.25 s" in out and "3: 0.25 s and" in Path("a.html").read_text()
