"""A grid's points composed with what they share done once: the same configurations, from fewer compositions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from launchers import plugin, trials
from launchers.command import run_command
from launchers.trials import Composer
from tests.support.tiers import full
from titan.cluster import devices
from titan.console import progress
from titan.run.hydra_private import ConfigLoaderImpl

TINY = ["cluster=cpu", "dataset=synthetic", "training.seq_len=16", "training.global_batch=128"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Gives what `look(loader, config, overrides)` makes of the points of a command line with -m."""
    monkeypatch.chdir(tmp_path)

    def run(look: Callable[..., Any], *arguments: str) -> Any:
        found = []

        def launch(self: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[Any]:
            found.append(look(self.context.config_loader, self.config, job_overrides))
            self.session.codes.append(0)
            return []

        monkeypatch.setattr(plugin.SweepLauncher, "launch", launch)
        assert run_command(["-m", *TINY, *arguments], lambda run: 1) == 0
        return found[0]

    return run


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        full(["optimizer.lr=1e-3,2e-3", "parallelism=single,fsdp", "name=x"], id="values-and-choices"),
        full(["sweep=learning_rate", "training.steps=3,4", "training.seed=0"], id="a-named-grid"),
        pytest.param(["recipe=train_8b", "model=debug,llama8b", "+optimizer.lr=1,2", "cluster.nodes=2"], id="a-recipe"),
        full(["++optimizer.lr=1,2", "dataset.tokens=${training.steps}", "hydra.verbose=true"], id="references"),
        full(["cluster.environment={A:b},{C:d}", "modules=[tests]", "memory=none,full"], id="mappings"),
    ],
)
def test_points_are_what_hydra_would_compose(launched: Callable[..., Any], arguments: list[str]) -> None:
    def look(loader: Any, config: Any, overrides: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
        composer = Composer(loader, config)
        whole = partial(loader.load_sweep_config, config)
        return [(text(composer, one), text(whole, one)) for one in overrides]

    def text(make: Callable[[list[str]], Any], one: Sequence[str]) -> str:
        try:
            return OmegaConf.to_yaml(make(list(one)))
        except Exception as error:
            return f"{type(error).__name__} {error}"

    found = launched(look, *arguments)
    assert len(found) > 1 and all(ours == hydras for ours, hydras in found)


@pytest.mark.full
def test_what_is_the_same_is_found_out_once(launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def count_calls(owner: Any, method: str) -> None:
        real = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *args, **kwargs: asked.update([method]) or real(*args, **kwargs))

    def look(loader: Any, config: Any, overrides: Sequence[Sequence[str]]) -> int:
        count_calls(ConfigLoaderImpl, "load_configuration")
        count_calls(devices, "detect_machine")
        count_calls(ConfigLoaderImpl, "get_group_options")
        return len(trials.expand_trials(loader, config, overrides, 0, False))

    grid = ["parallelism=single,ddp", "optimizer.lr=1,2,3", "sweep=learning_rate", "training.seed=0"]
    assert launched(look, "name=x", *grid) == 6
    assert asked == {"load_configuration": 2, "detect_machine": 1, "get_group_options": 1}


@pytest.mark.parametrize(
    ("terminal", "many", "lines"),
    [full(True, 20, 3), full(False, 2, 3), (False, 20, 0)],
    ids=["terminal", "log", "a-few-in-a-log"],
)
@pytest.mark.full
def test_composing_tells_how_far_it_is(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    terminal: bool, many: int, lines: int,
) -> None:  # fmt: skip
    """In a log only of many points; on a terminal in a line that is wiped."""
    for name, value in (("TERMINAL_SECONDS", 0.0), ("LOG_SECONDS", 0.0), ("MANY_TRIALS", many)):
        monkeypatch.setattr(trials, name, value)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(trials.sys.stderr, "isatty", lambda: terminal)
    launched(lambda *given: trials.expand_trials(*given, 0, False), "name=x", "optimizer.lr=1,2,3")
    said = capsys.readouterr().err
    assert said.count("of 3 trials composed and checked") == lines
    assert said.endswith("\r\x1b[K") or not terminal


@pytest.mark.full
def test_a_wrong_name_is_told_the_right_one_also_where_an_axis_is_varied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["-m", *TINY, "parallelism=single,fsdp", "training.sed=1,2"], lambda run: 1) == 2
    assert "did you mean 'training.seed'?" in capsys.readouterr().err
