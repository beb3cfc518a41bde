"""Files of a folder that only the command line names start no programs and read no secrets, unless the user says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.command import run_command
from tests.support.runs import TINY, begin_run
from titan.run.hydra_session import explain_file_risk
from titan.run.run import Run

HEAD = "# @package _global_\n"
SETUP = "module load a && b"
FILES = {
    "cluster/site.yaml": f"defaults: [cpu, _self_]\nsetup: ['{SETUP}']\nenvironment: {{CXX: x}}\n",
    "cluster/quiet.yaml": "defaults: [cpu, _self_]\npartition: x\nsetup: []\nenvironment: null\n",
    "recipe/site.yaml": HEAD + "defaults: [override /cluster: site]\n",
    "recipe/wide.yaml": HEAD + "model: {ffn: 96}\ntraining: {measured: '${oc.env:HOME}/x'}\n",
    "recipe/secret.yaml": HEAD + "dataset: {cache: '${oc.env:MY_TOKEN}'}\n",
    "recipe/whole.yaml": HEAD + "later: {setup: [x]}\ncluster: ${later}\n",
    "recipe/env_set.yaml": HEAD + "hydra: {job: {env_set: {CXX: x}}}\n",
    "recipe/callback.yaml": HEAD + "hydra: {callbacks: {a: {_target_: titan.files.atomic.write_atomic}}}\n",
    "recipe/logging.yaml": HEAD + "hydra: {hydra_logging: {handlers: {a: {class: logging.FileHandler}}}}\n",
    "recipe/overrides.yaml": HEAD + "hydra: {overrides: {task: ['cluster.setup=[x]']}}\n",
    "recipe/swept.yaml": HEAD + "hydra: {mode: MULTIRUN, sweeper: {params: {cluster.setup: '[x]'}}}\n",
    "recipe/sampler.yaml": HEAD + "hydra: {sweeper: {sampler: {_target_: os.system}}}\n",
    "recipe/moved.yaml": HEAD + "defaults: [/recipe/names@cluster.environment: names]\n",
    "recipe/names/names.yaml": "LD_PRELOAD: x\n",
    "recipe/class.yaml": HEAD + "defaults: [override /optimizer: external]\noptimizer: {cls: mine.Opt}\n",
    "recipe/class_below.yaml": HEAD + "defaults: [/recipe/part@optimizer: part]\n",
    "recipe/part/part.yaml": "cls: mine.Opt\n",
    "recipe/label.yaml": HEAD + "sweep: {question: 'https://host/x'}\ndataset: {path: '${sweep.question}'}\n",
    "recipe/joined.yaml": HEAD + "dataset: {path: '${oc.env:HOME,https}://host/x'}\n",
    "recipe/space.yaml": HEAD + "metrics: {trackers: {a: {_target_: titan.metrics.schema.Trackio, space: them/x}}}\n",
    "recipe/cache.yaml": HEAD + "dataset: {cache: elsewhere}\n",
    "recipe/folder.yaml": HEAD + "hydra: {run: {dir: '${oc.env:HOME}/x'}}\n",
    "recipe/below.yaml": HEAD + "hydra: {run: {dir: 'theirs/${name}'}}\n",
    "theirs.yaml": "hydra: {searchpath: ['pkg://json.conf']}\n",
    "train.yaml": "defaults: [/train@_here_, _self_]\nhydra: {searchpath: ['pkg://json.conf']}\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configuration files of somebody else."""
    for name, text in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_text(text)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MY_TOKEN", "x")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


@pytest.fixture
def compose(folder: Path) -> Callable[..., tuple[int, list[Run]]]:
    """Carry out a command line with the folder; return its exit code, and the run that it starts."""

    def make(*words: str, option: str | None = None) -> tuple[int, list[Run]]:
        runs: list[Run] = []
        option = option or f"hydra.searchpath=[file://{folder}]"
        line = [*(o for o in TINY if not o.startswith(("hydra.run.dir", "cluster="))), *option.split(), *words]
        return run_command(line, lambda run: bool(runs.append(run))), runs

    return make


PLAIN = (
    "${oc.env:HOME}/x", "${oc.env:HOME,/x}", "${oc.decode:${oc.env:COUNT}}", "${oc.decode:'[1,2]'}", "${model.dim}",
)  # fmt: skip
SECRET = (
    "${oc.env:MY_TOKEN}", "${ oc.env : 'MY_TOKEN' , x}", "${oc.decode:${oc.env:MY_TOKEN}}", "${oc.env:${name}}",
    "${oc.${name}:HOME}", "${oc.decode:${name}}", "${oc.decode:$\\{oc.env\\:MY_TOKEN\\}}",
)  # fmt: skip


@pytest.mark.parametrize("value", [*PLAIN, *SECRET])
def test_which_interpolations_read_a_secret(value: str) -> None:
    assert explain_file_risk("sweep.question", value) == ("reads a secret" if value in SECRET else None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cluster=site"], f"cluster.setup=[{SETUP}]: FOLDER/cluster/site.yaml sets this, which decides"),
        (["recipe=site"], "export TITAN_CONF=FOLDER, or give cluster.setup=VALUE here"),
        (["cluster=site", "cluster.setup=[]"], "cluster.environment.CXX=x: "),
        (["cluster=site", "cluster.setup=[]", "cluster.environment={CC: x}"], "cluster.environment.CXX=x: "),
        (["recipe=secret"], "dataset.cache=${oc.env:MY_TOKEN}: FOLDER/recipe/secret.yaml sets this"),
        (["recipe=whole"], "later.setup=[x]: "),
        pytest.param(["recipe=env_set"], "hydra.job.env_set.CXX=x: ", marks=pytest.mark.full),
        (["recipe=callback"], "hydra.callbacks.a._target_=titan.files.atomic.write_atomic: "),
        pytest.param(
            ["recipe=logging"], "hydra.hydra_logging.handlers.a.class=logging.FileHandler: ", marks=pytest.mark.full
        ),
        (["recipe=overrides"], "hydra.overrides.task="),
        (["recipe=swept"], "cluster.setup=[x]: "),
        (["recipe=sampler"], "hydra.sweeper.sampler._target_=os.system: "),
        (["recipe=class"], "optimizer.cls=mine.Opt: FOLDER/recipe/class.yaml sets this, which decides which code is"),
        (["recipe=class_below"], "optimizer.cls=mine.Opt: FOLDER/recipe/part/part.yaml sets this"),
        (["recipe=label"], "dataset.path=${sweep.question}: "),
        (["recipe=joined"], "dataset.path=${oc.env:HOME,https}://host/x: "),
        (["recipe=space"], "metrics.trackers.a.space=them/x: "),
        (["recipe=cache"], "dataset.cache=elsewhere: "),
        (["recipe=folder"], "hydra.run.dir=${oc.env:HOME}/x: "),
        (["recipe=moved"], "cluster.environment.LD_PRELOAD=x: FOLDER/recipe/names/names.yaml"),
        (["-m", "cluster=cpu,site"], f"cluster.setup=[{SETUP}]: "),
        pytest.param(["-m", "training.seed=0,1", "cluster=site"], f"cluster.setup=[{SETUP}]: ", marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_rejected(
    words: list[str],
    sentence: str,
    folder: Path,
    compose: Callable[..., tuple[int, list[Run]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compose(*words) == (2, [])
    assert sentence.replace("FOLDER", str(folder)) in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    ["--config-dir conf", "--config-path conf --config-name train", "--config-dir conf --config-name theirs"],
)
def test_the_options_name_such_folders_too(
    option: str, compose: Callable[..., tuple[int, list[Run]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compose("cluster=site", option=option) == (2, [])
    setting = "hydra.searchpath=[pkg://json.conf]: " if "name" in option else "cluster.setup="
    assert setting in capsys.readouterr().err


@pytest.mark.full
def test_a_choice_that_leads_out_of_the_own_folders(
    folder: Path, compose: Callable[..., tuple[int, list[Run]]], capsys: pytest.CaptureFixture[str]
) -> None:
    outside = "../" * 20 + str(folder).lstrip("/")
    assert compose(f"cluster={outside}/cluster/site", option="name=x") == (2, [])
    assert f"{folder}/cluster/site.yaml sets this" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("words", [["cluster=quiet"], ["recipe=wide"], ["recipe=below"]], ids=" ".join)
def test_other_settings_need_no_trust(words: list[str], compose: Callable[..., tuple[int, list[Run]]]) -> None:
    assert compose(*words)[0] == 0


@pytest.mark.full
def test_a_folder_of_ones_own(
    folder: Path, compose: Callable[..., tuple[int, list[Run]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_CONF", "conf")
    for option in (None, "name=x", "--config-dir conf"):
        code, (run,) = compose("cluster=site", option=option)
        assert (code, run.cluster.setup) == (0, (SETUP,))


@pytest.mark.full
def test_what_is_typed_counts_now_and_later(compose: Callable[..., tuple[int, list[Run]]], folder: Path) -> None:
    typed = [f"cluster.setup=['{SETUP}']", "cluster.environment.CXX=x"]
    code, (run,) = compose("cluster=site", *typed, "name=first")
    assert code == 0 and run.cluster.environment == {"CXX": "x"}
    Path(run.directory).mkdir(parents=True)
    begin_run(run)
    assert compose(option="resume=runs/first")[0] == 0
    code, (run,) = compose("cluster=site")
    assert (code, run.cluster.setup) == (0, (SETUP,))
    (folder / "cluster/site.yaml").write_text("defaults: [cpu, _self_]\nsetup: [other]\n")
    assert compose("cluster=site")[0] == 2


@pytest.mark.full
def test_trials_of_a_sweep_take_typed_values(
    compose: Callable[..., tuple[int, list[Run]]], capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["cluster=site", "cluster.setup=[]", "cluster.environment.CXX=x", "training.seed=0,1", "name=both"]
    assert compose("-m", "hydra/launcher=slurm", "hydra.launcher.dry_run=true", *typed)[0] == 0
    assert "2 trials" in capsys.readouterr().out
