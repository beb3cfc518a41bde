"""What Hydra's options and its own node do in titan, `resume=DIR`, and what every command has."""

from __future__ import annotations

import importlib
import logging
import os
import re
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import titan
from launchers import start
from launchers.command import run_command
from tests.measure import command as measure
from tests.support.runs import TINY, begin_run
from tests.support.tiers import full
from titan import compare, convert, data, generate, prepare, status, train
from titan.cluster.schema import Cluster
from titan.config.modules import check_hydra
from titan.console.text import format_message
from titan.errors import ConfigError, exit_code
from titan.run import attempts, command_line, summary, synonyms
from titan.run.command_line import quote_value
from titan.run.compose import compose_run
from titan.run.directory import lock_directory
from titan.run.run import Run
from titan.sweep.schema import SlurmLaunch

pytestmark = pytest.mark.usefixtures("laptop")


def ran(*words: str) -> list[Run]:
    """The runs that a command line would start, in this process."""
    runs: list[Run] = []
    assert run_command(words, lambda run: runs.append(run) or 0) == 0  # type: ignore[func-returns-value]
    return runs


def begun(*words: str) -> Run:
    """A run of which an attempt has begun, as far as its directory knows."""
    (run,) = ran(*TINY, *words)
    Path(run.directory).mkdir(parents=True)
    begin_run(run)
    return run


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["training.seed=1,2", "-m", "name=g"], id="in-the-middle"),
        full(["training.seed=1,2", "name=g", "--multirun"], id="last"),
        full(["hydra.mode=MULTIRUN", "training.seed=1,2", "name=g"], id="hydra.mode"),
    ],
)
def test_a_grid_may_be_asked_for_anywhere(words: list[str], started: list[Run]) -> None:
    assert run_command(words, start.run_local) == 0
    assert [run.training.seed for run in started] == [1, 2]


@pytest.mark.full
def test_resume_is_the_command_line_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/wide.yaml").write_text("# @package _global_\ntraining:\n  bad_steps: 7\n")
    where = [f"hydra.searchpath=[file://{tmp_path}/conf]", "recipe=wide"]
    first = begun(*where, "+hydra.job.env_set.A=b", "parallelism=ddp", "name=a b")
    command = summary.build_next_command(first, {"finished": False})
    assert command == "python -m titan.train 'resume=runs/a b'"
    (again,) = ran("resume=runs/a b")
    for name in ("directory", "name", "model", "training", "layout", "cluster", "options"):
        assert getattr(again, name) == getattr(first, name)
    assert (again.training.bad_steps, dict(again.cluster.environment or {})) == (7, {"A": "b"})
    (more,) = ran("resume=runs/a b", "training.steps=9", "parallelism=fsdp")
    assert (more.training.steps, more.layout.shard, more.directory) == (9, 2, first.directory)
    assert summary.build_next_command(first, {"finished": True}).endswith("training.steps=6")


@pytest.mark.full
@pytest.mark.parametrize(
    ("word", "advice"),
    [
        pytest.param("resume=runs/x/checkpoints/step-2", "=runs/x/checkpoints/step-2 name=", id="checkpoint"),
        pytest.param("resume=last", "there is no run; runs/ holds runs; give one of them, such as runs/x", id="last"),
    ],
)
def test_a_run_that_is_not_there_is_answered_with_one(
    word: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(begun("name=x").directory) / "checkpoints/step-2").mkdir(parents=True)
    assert run_command([word], lambda run: 0) == 2
    assert advice in capsys.readouterr().err


@pytest.mark.full
def test_resume_of_a_point_of_a_named_grid(started: list[Run]) -> None:
    line = ["-m", "sweep=learning_rate", "optimizer.lr=1e-3", "training.seed=5", "name=g", *TINY]
    assert run_command(line, start.run_local) == 0
    Path(started[0].directory).mkdir(parents=True, exist_ok=True)
    begin_run(started[0])
    (again,) = ran(f"resume={started[0].directory}")
    assert (again.training.seed, again.directory, again.name) == (5, started[0].directory, started[0].name)


@pytest.mark.full
def test_resume_of_a_grid_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "run_local", lambda run, **_: 0)
    assert run_command(["-m", "training.seed=1,2", "name=g"], start.run_local) == 0
    assert run_command(["resume=runs/g"], start.run_local) == 2
    assert "resume=runs/g: holds a sweep, and none of its trials has begun" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("text", [full("runs/x"), "a b", "it's", full("a,b=c"), full("a\\'b"), "{x}", full("50%"), "ä"])
def test_any_directory_can_be_quoted(text: str) -> None:
    assert compose_run([f"hydra.run.dir={quote_value('/q/' + text)}"]).directory == f"/q/{text}"


CALLBACK = """
    import os
    from hydra.core.hydra_config import HydraConfig
    from hydra.experimental.callback import Callback

    def note(what):
        with open("calls", "a") as file:
            print(what, os.environ.get("SET"), file=file)

    class Noting(Callback):
        def on_run_start(self, config, **more): note("run_start")
        def on_job_start(self, config, **more): note("job_start " + os.path.basename(config.hydra.runtime.output_dir))
        def on_job_end(self, config, job_return, **more): note(f"job_end {job_return.status.name}")
        def on_run_end(self, config, **more): note("run_end")
        def on_multirun_start(self, config, **more): note("multirun_start")
        def on_multirun_end(self, config, **more): note("multirun_end")
"""
NOTING = ["modules=[noting]", "+hydra.callbacks.a._target_=noting.Noting", "+hydra.job.env_set.SET=1"]


@pytest.mark.parametrize(
    ("words", "code", "calls"),
    [
        full(["name=r"], 0, ["run_start", "job_start r", "job_end COMPLETED", "run_end"], id="run"),
        pytest.param(["name=r"], 1, ["run_start", "job_start r", "job_end FAILED", "run_end"], id="failed-run"),
        full(
            ["-m", "training.seed=1,2", "name=g"],
            0,
            [
                "multirun_start", "job_start seed-1", "job_end COMPLETED", "job_start seed-2", "job_end COMPLETED",
                "multirun_end",
            ],
            id="grid",
        ),
    ],
)  # fmt: skip
def test_callbacks(words: list[str], code: int, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("noting.py").write_text(textwrap.dedent(CALLBACK))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    importlib.invalidate_caches()
    monkeypatch.setattr(start, "run_local", lambda run, **_: code)
    assert run_command([*words, *NOTING], start.run_local) == code
    seen = Path("calls").read_text().splitlines()
    assert [line.rpartition(" ")[0] for line in seen] == calls
    assert {line.rpartition(" ")[2] for line in seen if "job" in line} == {"1"}


@pytest.mark.full
def test_env_set_holds_where_the_run_is_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = ran(*TINY, "+hydra.job.env_set.SET=b", "cluster.environment={MORE:c}", "name=x")
    seen: list[tuple[str | None, str | None]] = []
    monkeypatch.setattr(
        start, "_start_ranks", lambda *_: seen.append((os.environ.get("SET"), os.environ.get("MORE"))) or 0
    )
    assert start.run_local(run) == 0
    assert seen == [("b", "c")]
    assert not {"SET", "MORE"} & set(os.environ)


@pytest.mark.parametrize(("subdir", "there"), [full("conf", {"conf"}, id="named"), full("null", set(), id="none")])
def test_output_subdir(subdir: str, there: set[str]) -> None:
    run = begun(f"hydra.output_subdir={subdir}", "name=x")
    folders = {file.name for file in Path(run.directory).iterdir() if file.is_dir()}
    assert folders == there
    assert all((Path(run.directory) / folder / "overrides.yaml").is_file() for folder in there)
    attempts.withdraw_attempt(run, attempts.Attempt(1, "", None, {}, None, 0, 0, "start"))  # type: ignore[arg-type]
    assert list(Path(run.directory).iterdir()) == []


@pytest.mark.full
def test_verbose_says_what_was_composed(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        assert ran("hydra.verbose=true", "name=x")
        assert "Config search path" in capsys.readouterr().out
    finally:
        root.handlers, root.level = handlers, level
        root.manager._clear_cache()  # type: ignore[attr-defined]


@pytest.mark.full
def test_output_dir_can_be_named_in_a_value() -> None:
    run = compose_run(["checkpoint.path=${hydra:runtime.output_dir}/copies", "name=x"])
    assert run.checkpoint.path == f"{run.directory}/copies"


@pytest.mark.full
def test_hydras_own_launcher_is_the_local_one(started: list[Run]) -> None:
    assert run_command(["-m", "hydra/launcher=basic", "training.seed=1,2", "name=g"], start.run_local) == 0
    assert len(started) == 2


def test_other_launchers_keys_name_settings_that_there_are() -> None:
    known = {f"cluster.{name}" for name in Cluster.__dataclass_fields__} | {"name"}
    known |= {f"hydra.launcher.{name}" for name in SlurmLaunch.__dataclass_fields__}
    assert {ours.partition("=")[0] for ours in synonyms.SUBMITIT.values() if ours} <= known
    page = (Path(__file__).resolve().parents[2] / "docs/slurm.md").read_text()
    for key, ours in synonyms.SUBMITIT.items():
        assert f"`{key}`" in page and ours.partition("=")[0] in page


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        pytest.param("training.seed=range(0,1)", "", id="one integer"),
        pytest.param("training.seed=range(1)", "", id="stop only"),
        pytest.param("training.seed=range(0,1,1)", "", id="integers with step"),
        pytest.param("training.steps=range(100,200,150)", "", id="one step"),
        pytest.param("optimizer.lr=range(1e-4,5e-4,1)", "", id="floats with step"),
        pytest.param("optimizer.lr=range(start=1e-4,stop=5e-4,step=1)", "", id="floats with named step"),
        pytest.param("optimizer.lr=range(1e-4,5e-4)", "is one value, because its step is 1", id="floats"),
        pytest.param("optimizer.lr=shuffle(range(1e-4,5e-4))", "is one value", id="shuffled floats"),
        pytest.param("optimizer.lr=range(0.5)", "is one value", id="float stop only"),
        pytest.param("training.seed=range(5,1)", "has no values", id="empty"),
    ],
)
def test_ranges_of_one_value(word: str, problem: str) -> None:
    arguments = command_line.parse(["-m", word])
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        command_line.check(arguments)


@pytest.mark.parametrize("module", [train, prepare, generate, status, compare, convert, data, measure])
def test_version(module: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main(["--version"]) == 0  # type: ignore[attr-defined]
    assert capsys.readouterr().out.startswith(f"titan {titan.__version__} (torch ")


@pytest.mark.parametrize(
    ("module", "words", "sentence"),
    [
        pytest.param(status, ["runs", "seconds=1e300"], "seconds=1e300: must be at most 86400.", id="status"),
        pytest.param(status, ["runs", "watch=maybe"], "watch=maybe: expected true or false or null", id="status-type"),
        pytest.param(generate, ["x", "prompt=a", "max_tokens=1e30"], "at most 1000000000.", id="generate"),
        pytest.param(generate, ["x", "prompt=a", "temperature=nan"], "at least 0 and finite.", id="generate-nan"),
        pytest.param(generate, ["", "prompt=a"], "MODEL is missing", id="generate-empty"),
        pytest.param(compare, [".", "baseline=x\ty"], "control character", id="compare"),
        pytest.param(compare, [".", "margin=-1"], "margin=-1: must be above 0.", id="compare-negative"),
        pytest.param(convert, ["a", "to=b", "shard_gb=1e300"], "at most 1000000000.", id="convert"),
        pytest.param(convert, ["a", "to="], "to=: is empty", id="convert-empty"),
        pytest.param(prepare, ["dataset.workers=1e9"], "at most 4096.", id="prepare"),
        pytest.param(prepare, ["dataset={}"], "dataset={}: changes nothing", id="prepare-nothing"),
        pytest.param(data, ["step=99999999999"], "is not a number or a range", id="data"),
        pytest.param(data, ["characters=-1"], "characters=-1: must be at least 0.", id="data-negative"),
        pytest.param(measure, ["rounds=0"], "rounds=0: must be at least 1.", id="measure"),
        pytest.param(measure, ["suite=x"], "suite=x: choose one of cpu, gpu", id="measure-suite"),
        pytest.param(measure, ["to=no/x.json"], "to=no/x.json: there is no directory no", id="measure-json"),
    ],
)
def test_every_command_refuses_in_a_sentence(
    module: object, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(words) == 2  # type: ignore[attr-defined]
    error = capsys.readouterr().err
    assert error.startswith("titan: ") and sentence in error and len(error.splitlines()) == 1


@pytest.mark.full
def test_status_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = begun("name=x")
    assert status.main(["runs/x"]) == 1
    out = capsys.readouterr().out
    assert "runs/x: 1 run: 1 stopped" in out and "python -m titan.train resume=runs/x resumes it" in out
    with lock_directory(Path(run.directory)):
        assert status.main(["runs/x", "watch=false"]) == 0
    assert "1 run: 1 running" in capsys.readouterr().out
    (Path(run.directory) / "result.json").write_text('{"finished": true, "step": 3}')
    assert status.main(["runs/x"]) == 0
    assert "1 run: 1 finished" in capsys.readouterr().out


def test_a_message_is_one_line() -> None:
    assert format_message("a\n" + "x" * 1000 + " b\0") == "a\\n" + "x" * 97 + "…" + "x" * 40 + " b\\x00"


@pytest.mark.full
def test_a_refused_run_leaves_nothing_in_a_folder_of_others() -> None:
    Path("mine.txt").touch()
    assert run_command([*TINY, "hydra.run.dir=."], start.run_local) == 2
    assert [file.name for file in Path.cwd().iterdir()] == ["mine.txt"]


@pytest.mark.full
def test_a_place_that_can_not_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compose_run([*TINY, "hydra.run.dir=a/b/c"])
    made = os.mkdir

    def full(path: str, *more: int) -> None:
        if str(path).endswith("c"):
            raise OSError(28, "No space left on device")
        made(path, *more)

    monkeypatch.setattr(os, "mkdir", full)
    assert exit_code(lambda: start.run_local(run)) == 2
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("part", "name", "reason"),
    [
        pytest.param("callbacks", "hydra.experimental.callbacks.LogJobReturnCallback", "", id="callback"),
        pytest.param("callbacks", "logging.FileHandler", "and logging is a module of Python; take it out", id="python"),
        pytest.param("callbacks", "titan.files.atomic.write_json", "which is no hydra.experimental.c", id="function"),
        pytest.param("launcher", "hydra_plugins.titan.SlurmLauncher", "", id="launcher"),
        pytest.param("launcher", "hydra_plugins.other.SlurmLauncher", "which is no launcher; leave it out", id="other"),
    ],
)
def test_hydra_may_import_what_titan_knows(part: str, name: str, reason: str) -> None:
    node = {"_target_": name, "setup": ["a command"]}
    cfg = OmegaConf.create({"hydra": {part: {"a": node} if part == "callbacks" else node}})
    words = re.escape(f"names {name}, {reason}")
    with pytest.raises(ConfigError, match=words) if reason else nullcontext():
        check_hydra(cfg, [])
