"""Code of others is imported only when the user names its package, and after all else is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from launchers import start
from launchers.command import run_command
from tests.support.machines import make_detector
from tests.support.runs import TINY, begin_run
from tests.support.tiers import full, select_cases
from titan.cluster import devices
from titan.config import modules
from titan.errors import ConfigError
from titan.run import compose, summary
from titan.run.compose import compose_run

CODE = """
from dataclasses import dataclass
from titan.optimizer.schema import AdamW

@dataclass(frozen=True, kw_only=True)
class Theirs(AdamW):
    pass
"""
ASKED = "theirs_pack: a configuration file asks"
RECIPE = {"modules": ["theirs_pack"], "optimizer": {"_target_": "theirs_pack.Theirs"}}


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a package of others, and a recipe that lists it, which $TITAN_CONF names."""
    monkeypatch.setattr(devices, "detect_machine", make_detector("cpu"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TITAN_CONF", str(tmp_path / "conf"))
    monkeypatch.delenv(modules.VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "theirs_pack", raising=False)
    (tmp_path / "theirs_pack.py").write_text(CODE)
    write(tmp_path, "recipe", RECIPE)
    return tmp_path


def write(folder: Path, group: str, content: object) -> None:
    (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
    (folder / "conf" / group / "theirs.yaml").write_text(f"# @package _global_\n# Theirs.\n{yaml.safe_dump(content)}")


def imported() -> bool:
    return "theirs_pack" in sys.modules


@pytest.mark.full
def test_a_recipe_alone_imports_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"modules=\[theirs_pack\]: a configuration file asks for it.*TITAN_MODULES=theirs"
    ):
        compose_run([*TINY, "recipe=theirs"])
    assert not imported()


@pytest.mark.full
@pytest.mark.parametrize(
    ("overrides", "variable"),
    [
        pytest.param(["modules=[theirs_pack]"], "", id="command-line"),
        pytest.param(["modules=['theirs_pack',more]"], "", id="several"),
        pytest.param([], "theirs_pack", id="environment"),
        pytest.param([], "more, theirs_pack", id="environment-several"),
    ],
)
def test_the_user_lets_it_import(overrides: list[str], variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(modules.VARIABLE, variable)
    assert type(compose_run([*TINY, "recipe=theirs", *overrides]).optimizer).__name__ == "Theirs"


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["modules=${also}", "+also=[theirs_pack]"], id="interpolated"),
        pytest.param(["optimizer._target_=theirs_pack.Theirs", "modules=[]"], id="only-named"),
        pytest.param(["modules=[more]"], id="another"),
    ],
)
def test_what_does_not_name_it_imports_nothing(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        compose_run([*TINY, "recipe=theirs", *overrides])
    assert not imported()


@pytest.mark.full
@pytest.mark.parametrize(
    "wrong",
    [
        "training.steps=0", full("training.step=3"), "name=../x", "parallelism.pipeline=0", full("schedule.warmup=50"),
        "model.heads=3", full("cluster.time=x"), full("+dataset._target_=os.path"),
    ],
)  # fmt: skip
def test_all_else_is_checked_before(wrong: str) -> None:
    with pytest.raises(ConfigError):
        compose_run([*TINY, "recipe=theirs", "modules=[theirs_pack]", wrong])
    assert not imported()


GRIDS = {
    "params": (
        {**RECIPE, "hydra": {"sweeper": {"params": {"modules": "[theirs_pack]"}}}},
        "modules=[theirs_pack]: a con",
    ),
    "callback": (
        {"hydra": {"callbacks": {"a": {"_target_": "theirs_pack.Theirs"}}}},
        "hydra.callbacks: names theirs_pack",
    ),
    "hydra's own": (
        {"hydra": {"callbacks": {"a": {"_target_": "hydra.utils.get_class", "path": "theirs_pack.Theirs"}}}},
        "hydra.callbacks: names hydra.utils.get_class",
    ),
    "logger": (
        {"hydra": {"hydra_logging": {"handlers": {"a": {"()": "theirs_pack.Theirs"}}}}},
        "hydra.hydra_logging: names theirs_pack",
    ),
    "stream": (
        {"hydra": {"job_logging": {"handlers": {"console": {"stream": "ext://theirs_pack.x"}}}}},
        "hydra.job_logging: names theirs_pack",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "said"),
    select_cases([pytest.param(*case, id=name) for name, case in GRIDS.items()], ("logger", "stream")),
)
def test_a_grids_file_imports_nothing(
    content: object, said: str, laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(laptop, "sweep", content)
    monkeypatch.setattr(start, "run_local", lambda run, **_: 0)
    assert run_command(["-m", *TINY, "name=grid", "sweep=theirs", "training.seed=0,1"], start.run_local) == 2
    assert said in capsys.readouterr().err and not imported()


@pytest.mark.full
def test_a_grid_imports_what_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "run_local", lambda run, **_: 0)
    assert (
        run_command(["-m", *TINY, "recipe=theirs", "modules=[theirs_pack]", "training.seed=0,1"], start.run_local) == 0
    )
    assert imported()


def test_the_next_command_has_the_environment_that_it_needs(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(laptop, "recipe", {"optimizer": {"_target_": "theirs_pack.Theirs"}})
    monkeypatch.setenv(modules.VARIABLE, "theirs_pack,more")
    run = compose_run([*TINY, "recipe=theirs", "name=one"])
    command = summary.build_next_command(run, {"finished": False})
    assert command == f"TITAN_CONF={laptop}/conf TITAN_MODULES=theirs_pack python -m titan.train resume=runs/one"
    plain = compose_run([*TINY, "name=two"])
    assert summary.build_next_command(plain, {"finished": False}) == "python -m titan.train resume=runs/two"


@pytest.mark.full
def test_a_recorded_command_line_is_not_the_users() -> None:
    run = compose_run([*TINY, "recipe=theirs", "modules=[theirs_pack]", "name=one"])
    assert "modules=[theirs_pack]" in summary.build_next_command(run, {"finished": False})
    Path(run.directory).mkdir(parents=True)
    begin_run(run)
    sys.modules.pop("theirs_pack", None)
    with pytest.raises(ConfigError, match="modules="):
        compose.compose_recipe(["resume=runs/one"])
    assert not imported()
