"""Composition: every choice composes, fast and without torch; others add theirs; what is shown and handed on."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launchers import command, start
from launchers.command import run_command
from tests.support.machines import make_detector
from tests.support.tiers import full, select_cases
from titan.cluster import devices
from titan.errors import ConfigError
from titan.estimate import fit
from titan.run.compose import compose_run
from titan.run.hydra_session import CONF
from titan.run.run import Run
from titan.run.schema import Recipe
from titan.run.synonyms import OPTIONAL_GROUPS

pytestmark = pytest.mark.usefixtures("laptop")
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((f.parent.name, f.stem) for f in CONF.glob("*/*.yaml"))
CHOICES = [(axis, choice) for axis, choice in FILES if axis not in OPTIONAL_GROUPS]
"""Choices on one axis; recipes and sweeps choose on several, see test_recipes.py."""
NEEDED = {"hub": ["dataset.name=x"], "external": ["optimizer.cls=torch.optim.Adafactor"]}
NEEDED |= {kind: ["dataset.path=x"] for kind in ("text", "jsonl", "parquet", "chat", "prepared")}
NEEDED["mixture"] = ["+dataset@dataset.sources.a=stdlib", "dataset.weights={a: 1}"]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python on this titan, in the current directory."""
    path = os.pathsep.join(filter(None, [str(ROOT), environment.pop("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300)


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line prints that must end well and start no run."""

    def job(run: Run) -> int:
        raise RuntimeError("a run was started")

    assert run_command(arguments, job) == 0
    return capsys.readouterr().out


QUICK = (
    "checkpoint=async", "cluster=h100", "compile=block", "model=llama8b", "model=qwen3_14b", "parallelism=ep",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("axis", "choice"), select_cases([pytest.param(*c, id="=".join(c)) for c in CHOICES], QUICK))
def test_every_choice_composes(axis: str, choice: str, request: pytest.FixtureRequest) -> None:
    memory = "cluster.memory_gib=1000000"
    overrides = [f"{axis}={choice}", memory, *NEEDED.get(choice, [])]
    overrides += ["precision.emulate=true"] if axis == "precision" else []
    if any(o.startswith("compile=") and o not in ("compile=off", "compile=auto") for o in overrides):
        request.getfixturevalue("compiler")
    run = compose_run(overrides, remote=axis == "cluster")
    assert run.choices[axis] == choice
    written = {
        k: v for k, v in OmegaConf.load(CONF / axis / f"{choice}.yaml").items() if k not in ("defaults", "_target_")
    }  # type: ignore[union-attr]
    for name, value in written.items():
        if value != "auto":
            found = getattr(getattr(run, axis), str(name))
            if name == "hardware":
                found = {figure: number for figure, number in vars(found).items() if number is not None}
            assert found == value


def test_every_axis_has_choices() -> None:
    assert {axis for axis, _ in CHOICES} >= set(Recipe.axes())


@pytest.mark.full
@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["training.steps=0"]], ids=str)
def test_composing_imports_neither_torch_nor_numpy(arguments: list[str]) -> None:
    program = f"""
        import sys
        from titan.train import main
        code = main({arguments!r})
        print("HEAVY", sorted({{"torch", "numpy", "tiktoken"}} & sys.modules.keys()))
        sys.exit(code)
    """
    done = python("-c", textwrap.dedent(program))
    assert done.returncode in (0, 2)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.full
def test_composing_a_run_imports_no_torch() -> None:
    program = "import sys; from titan.run.compose import compose_run; compose_run([]); print('torch' in sys.modules)"
    assert python("-c", program).stdout == "False\n"


def test_help_lists_every_choice_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown("--help", capsys=capsys).splitlines()
    for axis in (*OPTIONAL_GROUPS, *Recipe.axes()):
        assert f"  {axis}: {command.AXES[axis]}" in lines
    for axis, choice in FILES:
        above, below = (CONF / axis / f"{choice}.yaml").read_text().splitlines()[:2]
        first = below if axis in OPTIONAL_GROUPS else above
        assert first.startswith("# ") and len(first) > 5
        assert (above == "# @package _global_") is (axis in OPTIONAL_GROUPS)
        shown_texts = [line.partition(choice)[2].strip() for line in lines if line.split(None, 1)[:1] == [choice]]
        assert any(text[:20] == first[2:22] for text in shown_texts), (axis, choice)


@pytest.mark.parametrize(
    ("comment", "text"),
    [
        pytest.param(["All of it.", "More."], "All of it.", id="line"),
        pytest.param(["A question? Answers are in:", "the next line."], "A question?", id="sentence"),
        pytest.param(["Its end (v0.2) is, of", "it, below. More."], "Its end (v0.2) is, of it, below.", id="continued"),
        pytest.param(["No end"], "No end", id="no-end"),
        pytest.param([], "", id="none"),
    ],
)
def test_help_shows_whole_sentences(comment: list[str], text: str) -> None:
    assert command.cut_sentences(comment) == text


@pytest.mark.full
def test_cfg_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    content = OmegaConf.create(shown("--cfg", "job", "training.steps=7", capsys=capsys))
    assert content.training.steps == 7
    run = compose_run([])
    for axis in Recipe.axes():
        assert set(content[axis]) - {"_target_"} == {f.name for f in dataclasses.fields(getattr(run, axis))}


@pytest.mark.full
def test_cfg_of_one_axis(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("--cfg", "job", "-p", "model", "model=llama8b", capsys=capsys)
    assert "dim: 4096" in out and "steps" not in out


def test_info_shows_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fsdp" in shown("--info", "defaults", "parallelism=fsdp", capsys=capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("model=lla", {"model=llama1b", "model=llama8b"}, id="choice"),
        pytest.param("parallelism=fsdp_", {"parallelism=fsdp_tp", "parallelism=fsdp_cp"}, id="parallelism"),
        pytest.param("paral", {"parallelism="}, id="axis"),
        pytest.param("training.se", {"training.seed=", "training.seq_len="}, id="setting"),
    ],
)
def test_completion(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"titan-train {line}"
    monkeypatch.setenv("COMP_LINE", typed)
    monkeypatch.setenv("COMP_POINT", str(len(typed)))
    assert expected <= set(shown("-sc", "query=bash", capsys=capsys).split())


@pytest.mark.full
def test_sweep_runs_every_combination_in_order(started: list[Run]) -> None:
    line = ["-m", "name=grid", "training.seed=1,2", "optimizer.lr=1e-3,3e-3", "training.steps=9"]
    assert run_command(line, start.run_local) == 0
    assert [(r.training.seed, r.optimizer.lr) for r in started] == [(1, 1e-3), (1, 3e-3), (2, 1e-3), (2, 3e-3)]
    points = [f"seed-{seed}_lr-{lr}" for seed in (1, 2) for lr in (0.001, 0.003)]
    assert [r.directory for r in started] == [str(Path.cwd() / "runs/grid" / point) for point in points]
    assert {r.training.steps for r in started} == {9}


@pytest.mark.full
@pytest.mark.parametrize(
    ("codes", "started"), [([0, 1, 0], 3), ([2, 0], 2), ([1, 2], 2), pytest.param([130, 0], 1, id="interrupted")]
)
def test_sweep_goes_on_after_a_failure_and_ends_with_its_code(
    codes: list[int], started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(codes)
    monkeypatch.setattr(start, "run_local", lambda run, **_: next(left))
    seeds = ",".join(map(str, range(len(codes))))
    assert run_command(["-m", f"training.seed={seeds}"], start.run_local) == next(c for c in codes if c)
    assert list(left) == codes[started:]


@pytest.mark.full
def test_refused_sweep_keeps_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/grid/0").mkdir(parents=True)
    Path("runs/grid/0/run.yaml").write_text("x")
    assert run_command(["-m", "name=grid", "training.steps=1,0"], start.run_local) == 2
    assert Path("runs/grid/0/run.yaml").read_text() == "x"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Somebody's folder of choices."""
    (tmp_path / "other/model").mkdir(parents=True)
    (tmp_path / "other/recipe").mkdir()
    text = "# A model of others.\ndefaults:\n  - debug\n  - _self_\nlayers: 3\n"
    (tmp_path / "other/model/theirs.yaml").write_text(text)
    text = "# @package _global_\n# A whole recipe.\ndefaults:\n  - override /parallelism: ddp\n  - _self_\n"
    (tmp_path / "other/recipe/pair.yaml").write_text(text + "training:\n  steps: 33\n")
    return tmp_path / "other"


@pytest.mark.full
def test_search_path_adds_choices_of_every_group(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (other / "sweep").mkdir()
    sweep = "# @package _global_\n# Theirs.\nhydra:\n  sweeper:\n    params:\n      training.steps: 3,0\n"
    (other / "sweep/grid.yaml").write_text(sweep)
    where = f"hydra.searchpath=[file://{other}]"
    assert compose_run([where, "model=theirs"]).model.layers == 3
    assert compose_run([where, "recipe=pair"]).training.steps == 33
    assert "grid" in shown("--help", where, capsys=capsys).split()
    assert run_command(["-m", where, "sweep=grid"], start.run_local) == 2
    assert "training.steps=0: must be at least 1 (trial 2 of the sweep" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="recipe=pair: there is no such choice"):
        compose_run(["recipe=pair"])


@pytest.mark.full
def test_config_dir_adds_a_choice(other: Path) -> None:
    runs: list[Run] = []
    assert run_command(["--config-dir", str(other), "model=theirs"], lambda run: runs.append(run) or 0) == 0  # type: ignore[func-returns-value]
    assert runs[0].model.layers == 3


@pytest.mark.full
def test_titan_conf_adds_choices(
    other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_CONF", str(other))
    assert compose_run(["model=theirs"]).model.layers == 3
    out = [line.split(None, 1) for line in shown("--help", capsys=capsys).splitlines()]
    assert ["theirs", "A model of others."] in out and ["pair", "A whole recipe."] in out
    with pytest.raises(ConfigError, match=r"did you mean 'theirs'\? Choices: .*theirs"):
        compose_run(["model=their"])


@pytest.mark.full
def test_recipe_chooses_on_several_axes_and_yields_to_the_command_line(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CONF", str(other))
    run = compose_run(["recipe=pair"])
    assert (run.training.steps, run.layout.replicate) == (33, 2)
    run = compose_run(["recipe=pair", "parallelism=single", "training.steps=5"])
    assert (run.training.steps, run.layout.replicate) == (5, 1)


@pytest.mark.parametrize("sweep", [[], ["-m", "training.seed=1,2"]], ids=["one", "sweep"])
def test_unknown_recipe_beside_a_known_one(
    sweep: list[str], other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_CONF", str(other))
    monkeypatch.setattr(start, "run_local", lambda run, **_: 0)
    assert run_command([*sweep, "recipe=pari"], start.run_local) == 2
    assert "recipe=pari: there is no such choice; did you mean 'pair'?" in capsys.readouterr().err


@pytest.mark.full
def test_installed_plugin_adds_a_choice_and_a_class(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "mypack/conf/optimizer").mkdir(parents=True)
    (site / "mypack-1.0.dist-info").mkdir()
    (site / "mypack-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mypack\nVersion: 1.0\n")
    (site / "mypack-1.0.dist-info/entry_points.txt").write_text("[titan.plugins]\nmypack = mypack\n")
    (site / "mypack/__init__.py").write_text(
        "from dataclasses import dataclass\nfrom titan.optimizer.schema import SGD\n"
        "from titan.config.settings import setting\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Lion(SGD):\n    zeal: float = setting(0.5, 'how much')\n"
    )
    (site / "mypack/conf/optimizer/lion.yaml").write_text("# Theirs.\n_target_: mypack.Lion\nzeal: 0.7\n")
    shown = python("-m", "titan.train", "--help", PYTHONPATH=str(site))
    assert ["lion", "Theirs."] in [line.split() for line in shown.stdout.splitlines()]
    program = (  # that stores a schema before titan stores any
        "from hydra.core.config_store import ConfigStore as Store\n"
        "Store.instance().store('theirs', {{}}, 'schema/optimizer')\n"
        "from titan.run.compose import compose_run\nprint(compose_run({}).optimizer)"
    )
    trusted = python("-c", program.format(["optimizer=lion", "modules=[mypack]"]), PYTHONPATH=str(site))
    assert "Lion(" in trusted.stdout and "zeal=0.7" in trusted.stdout
    refused = python("-m", "titan.train", "optimizer=lion", PYTHONPATH=str(site))
    assert refused.returncode == 2 and "modules=[mypack]" in refused.stderr


def test_third_party_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs_model.py").write_text(
        "from dataclasses import dataclass\nfrom titan.model.schema import Llama\n"
        "from titan.config.settings import setting\n\n@dataclass(frozen=True, kw_only=True)\n"
        "class Wide(Llama):\n    width: int = setting(3, 'w', at_least=1)\n"
        "from titan.hooks.schema import Hook\n@dataclass(frozen=True, kw_only=True)\n"
        "class Count(Hook):\n    above: int = setting(1, 'a')\n    def build(self):\n        return print\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["model._target_=theirs_model.Wide", "modules=[theirs_model]"]
    model = compose_run([*overrides, "+model.width=5"]).model
    assert (type(model).__name__, model.width) == ("Wide", 5)  # type: ignore[attr-defined]
    assert compose_run([*overrides, "model.width=5"]).model == model
    hook = "+hooks.h={_target_: theirs_model.Count}"
    assert compose_run([*overrides, hook, "hooks.h.above=3"]).hooks["h"].above == 3  # type: ignore[index, attr-defined]
    for line, message in {
        "model.width=0": "model.width=0: must be at least 1",
        "model.widht=5": "model.widht=5: there is no such setting; did you mean 'model.width'?",
        "+model.widht=5": "model.widht=5: there is no such setting; did you mean 'model.width'?",
        "hooks.h.abvoe=3": "hooks.h.abvoe=3: there is no such setting; did you mean 'hooks.h.above'?",
        "training.width=5": "training.width=5: there is no such setting",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            compose_run([*overrides, hook, line])
    with pytest.raises(ConfigError, match=r"model\.width=5: there is no such setting"):
        compose_run(["model.width=5"])


@pytest.mark.full
@pytest.mark.parametrize(("value", "steps"), [("1e3", 1000), ("12.0", 12), ("1_000", 1000)])
def test_whole_numbers(value: str, steps: int) -> None:
    found = compose_run([f"training.steps={value}"]).training.steps
    assert (found, type(found)) == (steps, int)


@pytest.mark.full
def test_the_last_of_two_values_holds() -> None:
    run = compose_run(["training.steps=5", "model=llama1b", "training.steps=6", "model=debug"])
    assert (run.training.steps, run.choices["model"]) == (6, "debug")


@pytest.mark.full
def test_run_is_frozen_and_pickles() -> None:
    run = compose_run(["parallelism=fsdp", "optimizer=sgd", "name=x"])
    again = pickle.loads(pickle.dumps(run))
    assert again == run and again.hydra == run.hydra
    assert set(run.hydra) == {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}
    with pytest.raises(AttributeError):
        run.name = "y"  # type: ignore[misc]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "overrides", "compute", "devices_"),
    [
        pytest.param("cpu", [], "fp32", 1, id="laptop"),
        full("cpu", ["parallelism=hsdp"], "fp32", 4, id="laptop-hsdp"),
        full("cpu", ["parallelism=fsdp", "cluster.devices=3"], "fp32", 3, id="laptop-3-ranks"),
        pytest.param("cpu", ["precision=bf16"], "bf16", 1, id="laptop-bf16"),
        pytest.param("gpu", [], "bf16", 1, id="server"),
        pytest.param("gpu", ["parallelism=fsdp"], "bf16", 8, id="server-fsdp"),
        full("gpu", ["cluster=cpu", "parallelism=fsdp"], "fp32", 2, id="server-on-its-cpu"),
        full("gpu", ["precision=fp32"], "fp32", 1, id="server-fp32"),
    ],
)
def test_defaults_follow_from_the_machine(
    kind: str, overrides: list[str], compute: str, devices_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector(kind))
    run = compose_run(overrides)
    assert (run.precision.compute, run.layout.devices) == (compute, devices_)


@pytest.mark.full
def test_a_huge_batch_composes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    demand = fit.estimate_memory
    monkeypatch.setattr(fit, "estimate_memory", lambda *given: (asked.append(given[2]), demand(*given))[1])
    assert compose_run(["training.global_batch=104857600"]).microbatches > 1000
    assert len(asked) < 100, "as many micro-batches as there are rows were tried"


@pytest.mark.full
def test_default_directory_is_named_after_model_and_layout() -> None:
    assert compose_run([]).directory.endswith("-debug-single")
    assert compose_run(["name=x"]).directory == str(Path.cwd() / "runs/x")
    assert compose_run(["hydra.run.dir=/elsewhere/y"]).directory == "/elsewhere/y"


@pytest.mark.parametrize("words", [["name=-rf"], ["-m", "name=-rf", "training.seed=1,2"]], ids=["run", "sweep"])
def test_a_name_like_an_option_is_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words, start.run_local) == 2
    assert capsys.readouterr().err.startswith("titan: name=-rf: begins with a dash, like an option; give another, or ")
