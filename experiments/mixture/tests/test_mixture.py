"""Mixtures are proposed as a sweep, the best is found with an interval that has it, and bad input is one sentence."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

from experiments.mixture import best, confirm, propose
from experiments.mixture.swarm import Swarm, read_shares, read_swarm
from launchers import start
from launchers.command import run_command
from tests.support.tiers import full
from titan.errors import ConfigError

SOURCES = ("books", "code", "web")
EQUAL = np.full(3, 1 / 3)
TRAINING = {"steps": 10, "seed": 0, "repeat": 0, "seq_len": 64, "global_batch": 512}
SETTINGS: dict[str, Any] = {
    "precision": {"compute": "fp32"},
    "compile": {"scope": "off"},
    "cluster": {"device": "cpu"},
    "optimizer": {"lr": 0.001},
    "checkpoint": {"path": None, "resume": None, "weights": None},
}
IDS = dict.fromkeys(("science", "group", "execution", "code"), "a")
"""What titan reads of every run, beside the settings."""


def make_swarm(proxies: int, noise: float = 0.0, seed: int = 0) -> Swarm:
    """Runs whose losses fall with the logarithm of a source's weight, each by its factor."""
    weights = propose.draw_mixtures(EQUAL, proxies, 1.0, 0.02, seed)
    return Swarm(SOURCES, weights, make_losses(weights, noise, seed))


def make_losses(weights: NDArray[Any], noise: float, seed: int) -> NDArray[Any]:
    gains = np.array([0.30, 0.15, 0.05])
    return 4.0 - gains * np.log(weights + 0.003) + np.random.default_rng(seed).normal(0, noise, weights.shape)


def test_mixtures_are_around_the_prior_and_have_the_sum_one() -> None:
    prior = np.array([0.7, 0.2, 0.1])
    drawn = propose.draw_mixtures(prior, 4000, 1.0, 0.01, 0)
    assert drawn.sum(1) == pytest.approx(1) and drawn.min() >= 0.01
    assert drawn[1:].mean(0) == pytest.approx(0.01 + prior * 0.97, abs=0.02)
    assert drawn[0] == pytest.approx(prior)
    assert propose.draw_mixtures(prior, 9, 1.0, 0.2, 0)[0] == pytest.approx(0.2 + prior * 0.4)


@pytest.mark.parametrize("noise", [full(0.0), 0.01])
def test_the_best_mixture_is_found(noise: float) -> None:
    swarm = make_swarm(48, noise)
    found = best.find_best(swarm, EQUAL, EQUAL, replicates=30)
    assert found.weights == pytest.approx([0.6, 0.3, 0.1], abs=0.08)
    assert (found.interval[0] - 0.03 <= [0.6, 0.3, 0.1]).all() and (found.interval[1] + 0.03 >= [0.6, 0.3, 0.1]).all()
    true_gain = (make_losses(EQUAL[None], 0, 0) - make_losses(found.weights[None], 0, 0)).mean()
    assert found.gain == pytest.approx(true_gain, abs=0.01) and found.gain_interval[0] > 0
    assert found.correlation > 0.9 and found.error == pytest.approx(noise / 3**0.5, abs=0.02)


@pytest.mark.full
@pytest.mark.parametrize("concentration", [1.0, full(5.0), 20.0])
def test_the_best_of_many_sources_is_found(concentration: float) -> None:
    """Random mixtures of many sources are rarely within the range of the runs, and none was better than all of them."""
    weights = propose.draw_mixtures(np.full(17, 1 / 17), 64, concentration, 0.01, 0)
    losses = 4.0 - np.linspace(0.5, 0.02, 17) * np.log(weights + 0.01)
    low, high, target = weights.min(0), weights.max(0), np.full(17, 1 / 17)
    prediction = best.fit_prediction(Swarm(tuple(map(str, range(17))), weights, losses), target)
    found = best.search_best(prediction, low, high, np.random.default_rng(0))
    assert found.sum() == pytest.approx(1) and (found >= low).all() and (found <= high).all()
    for step in np.eye(17)[:, None] - np.eye(17)[None]:  # moving weight from one source to another makes it no better
        near = best.fit_into_range(found + 0.005 * step, low, high)
        assert prediction.predict(near).min() > prediction.predict(found[None])[0] - 3e-4
    assert prediction.compute_gain(target, found) > prediction.compute_gain(target, weights[0]) + 0.03


def test_a_sweep_is_written_where_it_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert propose.main([f"to={tmp_path / 's.yaml'}", "sources=[a,b]"]) == 2
    assert "give a file such as sweep/s.yaml" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_too_few_mixtures_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"8 mixtures have finished.*give at least 9"):
        best.find_best(make_swarm(8), EQUAL, EQUAL, replicates=20)
    best.find_best(make_swarm(9), EQUAL, EQUAL, replicates=20)


def test_sources_that_do_not_matter_give_no_better_mixture() -> None:
    swarm = make_swarm(32)
    flat = Swarm(SOURCES, swarm.weights, 4 + np.random.default_rng(1).normal(0, 0.01, swarm.losses.shape))
    found = best.find_best(flat, EQUAL, EQUAL, replicates=60)
    assert found.gain_interval[0] <= 0
    assert "not shown to be better" in best.format_best(flat, found, EQUAL)


def test_a_target_of_one_source_wants_that_source() -> None:
    swarm = make_swarm(32)
    found = best.find_best(swarm, read_shares("target", {"web": 1}, SOURCES), EQUAL, replicates=20)
    assert found.weights[2] == pytest.approx(swarm.weights[:, 2].max(), abs=0.05)


def write_run(folder: Path, weights: dict[str, float], losses: dict[str, float], **changes: Any) -> None:
    """Leave what a finished run leaves."""
    folder.mkdir(parents=True)
    dataset = {"sources": {name: {} for name in weights}, "weights": weights}
    evaluation = {"tokens": changes.pop("evaluated", 32)}
    config = SETTINGS | {"dataset": dataset, "evaluation": evaluation, "training": TRAINING | changes}
    document = {"attempt": 1, "run_id": "a", "overrides": [], "ids": IDS, "config": config}
    document["science"] = {"training.steps": config["training"]["steps"], "dataset.weights": weights}
    (folder / "run.yaml").write_text("---\n" + yaml.safe_dump(document))
    values = {f"validation_loss/{name}": loss for name, loss in losses.items()}
    (folder / "result.json").write_text(json.dumps({"finished": True, "step": 10, "attempt": 1, **values}))


def write_swarm(folder: Path, proxies: int = 12) -> None:
    swarm = make_swarm(proxies)
    for index, (weights, losses) in enumerate(zip(swarm.weights, swarm.losses, strict=True)):
        pairs = [dict(zip(SOURCES, map(float, values), strict=True)) for values in (weights, losses)]
        write_run(folder / str(index), pairs[0], pairs[1])


def test_commands_from_proposal_to_confirmation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "conf" / "sweep" / "swarm.yaml"
    assert propose.main([f"to={sweep}", "sources=[books,code,web]", "proxies=12"]) == 0
    values = yaml.safe_load(sweep.read_text())["hydra"]["sweeper"]["params"]["dataset.weights"]
    parsed = yaml.safe_load(f"[{values}]")
    assert len(parsed) == 12 and all(sum(mixture.values()) == pytest.approx(1) for mixture in parsed)

    write_swarm(tmp_path / "small")
    again = tmp_path / "confirmed" / "sweep" / "confirm.yaml"
    assert best.main([str(tmp_path / "small"), "replicates=20", f"to={again}"]) == 0
    text = capsys.readouterr().out
    assert "12 mixtures of 3 sources" in text and ": better at this size" in text
    pair = yaml.safe_load(f"[{yaml.safe_load(again.read_text())['hydra']['sweeper']['params']['dataset.weights']}]")
    assert len(pair) == 2 and pair[1]["books"] > pair[0]["books"]

    for index, weights in enumerate(pair):
        losses = dict(zip(SOURCES, make_losses(np.array([list(weights.values())]), 0, 0)[0].tolist(), strict=True))
        write_run(tmp_path / "large" / str(index), weights, losses)
    assert confirm.main([str(tmp_path / "large"), f"swarm={tmp_path / 'small'}"]) == 0
    assert "is the best here" in capsys.readouterr().out


def test_the_commands_of_the_readme_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(propose.__file__).with_name("README.md").read_text()
    lines = [line.strip() for line in readme.splitlines() if line.startswith(("    SEARCH", "    python -m "))]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(Path(propose.__file__).parents[1])
    search = lines[0].removeprefix("SEARCH=").strip('"').replace("$PWD", str(tmp_path))
    for line in lines[1:]:
        words = shlex.split(line.replace("$SEARCH", search))[2:]
        if words[0] == "experiments.mixture.propose":
            assert propose.main(words[1:]) == 0
        elif words[0] == "experiments.mixture.best":
            write_swarm(tmp_path / "runs" / "swarm")
            assert best.main([*words[1:], "replicates=20"]) == 0
        elif words[0] == "titan.train":
            assert run_command([word for word in words[1:] if word != "-m"] + ["--cfg", "job"], start.run_local) == 0
    assert len(lines) > 5


def test_runs_of_one_mixture_are_averaged(tmp_path: Path) -> None:
    weights = {"books": 0.5, "code": 0.5}
    for seed, loss in enumerate((3.0, 4.0)):
        write_run(tmp_path / str(seed), weights, {"books": loss, "code": 2.0}, seed=seed)
    write_run(tmp_path / "other", {"books": 3, "code": 1}, {"books": 2.0, "code": 3.0})
    swarm = read_swarm(tmp_path)
    assert swarm.weights.tolist() == [[0.5, 0.5], [0.75, 0.25]] and swarm.losses.tolist() == [[3.5, 2.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["sources=[a]"], "give two or more names", id="one-source"),
        pytest.param(["sources=[a,a]"], "give two or more names", id="twice"),
        pytest.param(["sources=[a,b]", "least=0.5"], "give less than 0.5", id="least"),
        pytest.param(["sources=[a,b]", "least=0.00001"], "must be at least 0.0001", id="no-weight"),
        pytest.param(["sources=[a,b]", "proxies=8"], "proxies=8: must be at least 9", id="few"),
        pytest.param(["sources=[a,b]", "prior={a: 1}"], "one weight for each of a, b", id="prior"),
        pytest.param(["sources=[a,b]", "prior={a: 1, b: 0}"], "numbers above 0", id="zero"),
    ],
)
def test_wrong_proposals_end_with_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    assert propose.main([f"to={folder / 's.yaml'}", *words]) == 2
    assert message in capsys.readouterr().err and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"steps": 20}, "differs from", id="steps"),
        pytest.param({"evaluated": 64}, "in evaluation.tokens", id="evaluation"),
        pytest.param({"losses": {"books": 1.0}}, "no loss on the evaluation set of code", id="no-loss"),
    ],
)
def test_runs_that_make_no_swarm_are_rejected(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    losses = {"books": 1.0, "code": 2.0}
    write_run(tmp_path / "0", {"books": 0.5, "code": 0.5}, losses)
    write_run(tmp_path / "1", {"books": 0.4, "code": 0.6}, change.pop("losses", losses), **change)
    with pytest.raises(ConfigError, match=message):
        read_swarm(tmp_path)


def test_an_unknown_source_and_an_empty_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        read_swarm(tmp_path)
    with pytest.raises(ConfigError, match="no source wiki"):
        read_shares("target", {"wiki": 1}, SOURCES)
