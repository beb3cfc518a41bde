"""Hooks: when they are called and with what, on every rank; what they log, and how they end a run."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.command import run_command
from launchers.start import run_local
from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.matrix import EXACT, MODEL
from tests.support.runs import TINY, begin_run, compose_tiny_run, read_learned_values, read_step_records, train_run
from tests.support.tiers import full
from titan import compare
from titan.cluster import devices
from titan.cluster.rank_info import RankInfo
from titan.debug.activity import SAVING, Activity
from titan.errors import ConfigError
from titan.hooks.calls import Hooks
from titan.hooks.schema import MOMENTS
from titan.metrics.reader import read_records
from titan.metrics.tracker_run import extract_scalars
from titan.report.render import table_data
from titan.run import identity
from titan.run.directory import is_done, read_attempts

OWN = "tests.support.own_hooks"


def hook(name: str, kind: str, **settings: Any) -> str:
    """The override that adds a hook."""
    more = "".join(f",{key}:{value}" for key, value in settings.items())
    return f"+hooks.{name}={{_target_:{OWN}.{kind}{more}}}"


def trained(folder: Path, *overrides: str) -> int:
    """Train in this process; the exit code of the command."""
    quick = ("metrics.sample_tokens=0", "modules=[tests]", f"hydra.run.dir={folder}")
    return run_command([*TINY, *quick, *overrides], run_local)


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def test_a_hook_between_steps_is_a_phase(tmp_path: Path) -> None:
    """The watcher of hangs knows it by that; what is before the optimizer counts as its step."""
    run = compose_tiny_run(tmp_path, "modules=[tests]", hook("phases", "Phases"))
    activity = Activity()
    activity.enter_phase(SAVING)
    hooks = Hooks(run, SimpleNamespace(rank_info=RankInfo(), device=None, activity=activity), lambda: iter(()))  # type: ignore[arg-type]
    hooks.before_optimizer(1)
    logged = hooks.call_moment("on_checkpoint", 1, {"activity": activity}) | hooks.end_step(1, lambda: {})
    assert logged == {"hooks/phases/on_checkpoint": 1.0, "hooks/phases/before_optimizer": 0.0}
    assert activity.phase == SAVING


CALLS = [
    ("on_run_start", 0, []),
    ("before_optimizer", 1, []),
    ("before_optimizer", 2, []),
    ("on_step_end", 1, ["grad_norm", "loss", "lr", "step_seconds", "tokens"]),
    ("on_step_end", 2, ["grad_norm", "loss", "lr", "step_seconds", "tokens"]),
    ("on_validation", 2, ["validation_loss"]),
]
SAVED = [f"checkpoint_{figure}" for figure in ("compare_seconds", "gib", "seconds", "stall_seconds", "step")]


def test_every_moment_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("evaluation.tokens=64", "evaluation.every=2", "checkpoint.every=2", "training.steps=4")
    assert trained(tmp_path / "run", *asked, hook("listed", "Listed")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("calls 0")]
    calls = [(m, s, [f for f in figures if f != "bits_per_byte"]) for m, s, figures in eval(line[8:])]
    assert calls[: len(CALLS)] == CALLS and ("on_checkpoint", 2, SAVED) in calls
    assert [moment for moment, *_ in calls[-2:]] == ["on_validation", "on_run_end"]
    assert {moment for moment, *_ in calls} == set(MOMENTS) - {"on_not_finite"}
    logged = {key for record in read_records(tmp_path / "run" / "metrics.jsonl") for key in record}
    assert {f"hooks/listed/{moment}" for moment, *_ in calls} <= logged
    assert result(tmp_path / "run")["hooks/listed/on_run_end"] == len(calls)


@pytest.mark.full
def test_a_step_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explodes = ("optimizer=sgd", "optimizer.lr=1e30", "training.clip_norm=null", "checkpoint=off")
    assert trained(tmp_path / "run", *explodes, hook("listed", "Listed")) == 0
    calls = re.findall(r"\('(\w+)', (\d)", capsys.readouterr().out.partition("calls 0")[2])
    odd = calls.index(("on_not_finite", "2"))
    again = [("on_step_end", "2"), ("before_optimizer", "3"), ("on_not_finite", "3"), ("on_step_end", "3")]
    assert calls[odd + 1 :] == [*again, ("on_run_end", "3")]


@pytest.mark.full
def test_norms_are_those_of_one_device(tmp_path: Path) -> None:
    own = (*MODEL, "optimizer=sgd", "checkpoint=off", "modules=[tests]", "model.tied=true", hook("norms", "Norms"))
    alone = compose_tiny_run(tmp_path / "alone", *own)
    split = compose_tiny_run(
        tmp_path / "split", *own, "parallelism.pipeline=2", "parallelism.replicate=2", "parallelism.microbatches=4"
    )
    train_run(alone)
    train_run(split)
    there, here = (
        {k: v for k, v in read_step_records(run)[0].items() if k.startswith("hooks/")} for run in (alone, split)
    )
    assert there and max(abs(here[name] / there[name] - 1) for name in there) <= EXACT and len(here) == len(there)
    assert math.hypot(*there.values()) == pytest.approx(read_step_records(alone)[0]["grad_norm"], rel=EXACT)


@pytest.mark.full
def test_a_hook_that_changes_gradients(tmp_path: Path) -> None:
    changed, plain = (compose_tiny_run(tmp_path / name, "modules=[tests]", *more) for name, more in (
        ("changed", (hook("scale", "Scale", factor=2.0),)), ("plain", ()),
    ))  # fmt: skip
    train_run(changed)
    train_run(plain)
    assert read_step_records(changed)[0]["grad_norm"] == pytest.approx(2 * read_step_records(plain)[0]["grad_norm"])


@pytest.mark.full
def test_without_hooks_and_with_one_that_only_logs_a_run_learns_the_same(tmp_path: Path) -> None:
    logs, plain = (
        compose_tiny_run(tmp_path / "a", "modules=[tests]", hook("norms", "Norms")),
        compose_tiny_run(tmp_path / "b"),
    )
    train_run(logs)
    train_run(plain)
    assert read_learned_values(logs) == read_learned_values(plain)


@pytest.mark.full
def test_a_hook_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("training.steps=9", hook("prune", "Stop"))
    assert trained(tmp_path / "run", *asked) == 0
    found = result(tmp_path / "run")
    assert (found["finished"], found["step"]) == (False, 4)
    assert found["ended_by"] == {"hook": "prune", "reason": "it is enough"} and found["checkpoint"]
    assert "Stopped after step 4 of 9 (hooks.prune: it is enough)." in capsys.readouterr().out
    assert trained(tmp_path / "run", *asked) == 0
    assert "was ended by hooks.prune: it is enough: 4 steps; nothing to do" in capsys.readouterr().out
    later = ("training.steps=9", hook("prune", "Stop", step=6))
    same, other = (compose_tiny_run(tmp_path / "run", "modules=[tests]", *how) for how in (asked, later))
    assert is_done(same) and not is_done(other)  # sweeps start trials that are not done
    assert trained(tmp_path / "run", *later) == 0
    assert (result(tmp_path / "run")["step"], result(tmp_path / "run")["attempt"]) == (9, 2)


@pytest.mark.full
def test_a_repeated_sweep_leaves_trials_that_a_hook_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [o for o in TINY if not o.startswith("training.steps")]
    overrides += ["-m", "training.steps=9", "training.seed=1", "modules=[tests]", hook("prune", "Stop")]
    for _ in range(2):
        assert run_command([*overrides, f"hydra.sweep.dir={tmp_path}/sweep"], run_local) == 0
    assert "1 of 1 trial: stopped, not started again" in capsys.readouterr().out
    for trial in (tmp_path / "sweep").glob("seed*"):
        assert [document["attempt"] for document in read_attempts(trial)] == [1]


@pytest.mark.full
def test_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    run = compose_tiny_run(
        tmp_path, "modules=[tests]", "training.steps=9", hook("prune", "Stop", rank=1), layout="ddp2"
    )
    assert [seen.code for seen in train_run(run)] == [0, 0]
    assert result(tmp_path)["ended_by"]["hook"] == "prune" and result(tmp_path)["step"] < 9
    assert begin_run(run) is None


@pytest.mark.full
@pytest.mark.parametrize("moment", [full("build"), full("on_run_start"), "on_step_end"])
def test_a_hook_that_raises(moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path / "run", hook("bad", "Fail", moment=moment)) == 1
    error = capsys.readouterr().err
    at = {"build": "", "on_run_start": " at step 0", "on_step_end": " at step 1"}[moment]
    line = r"tests/support/own_hooks\.py:\d+ in \w+ \(\w+Error: .*\)"
    assert re.search(rf"^titan: hooks.bad: failed in {moment}{at} \({line}\); correct the hook", error, re.M)
    assert "Traceback" not in error
    assert "Traceback" in (tmp_path / "run" / "log" / "rank-0.log").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            hook("x", "Fail", moment="on_step"), "has a method on_step; did you mean 'on_step_end'?", id="typo"
        ),
        full(hook("x", "Fail", moment="step"), "_Fail has no method for a moment", id="no moment"),
        full(hook("x", "Other"), "is no titan.hooks.schema.Hook; derive it", id="no hook"),
        full("+hooks.x={}", "hooks.x._target_ is missing", id="no class"),
        full("+hooks.'a b'={_target_:tests.support.own_hooks.Norms}", "not understood", id="name"),
        full(hook("norms", "Norms", every=0), "hooks.norms.every=0: must be at least 1", id="setting"),
        full(hook("norms", "Norms", evry=1), "did you mean 'hooks.norms.every'?", id="unknown"),
    ],
)
def test_a_user_error(override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path / "run", override) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.yaml").exists()


@pytest.mark.full
def test_hooks_in_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("cpu"))

    def ids(*overrides: str) -> tuple[str, str, str]:
        run = compose_test_run(["name=x", "modules=[tests]", *overrides])
        return (
            identity.compute_digest(identity.collect_science(run, "d", None)),
            identity.compute_digest(identity.select_settings(run, science=False)),
            identity.compute_trial_id(run),
        )

    plain, logs = ids(), ids(hook("a", "Norms"))
    often, scaled = ids(hook("a", "Norms", every=2)), ids(hook("a", "Scale"))
    assert plain[0] == logs[0] == often[0] != scaled[0] != ids(hook("a", "Scale", factor=2.0))[0]
    assert len({plain[1], logs[1], often[1]}) == 3 and plain[1] == scaled[1]
    assert len({plain[2], logs[2], often[2], scaled[2]}) == 4


@pytest.mark.full
def test_several_hooks_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks").mkdir()
    for name, kind in (("norms", "Norms"), ("stop", "Stop")):
        (tmp_path / "hooks" / f"{name}.yaml").write_text(f"{name}:\n  _target_: {OWN}.{kind}\n")
    monkeypatch.setenv("TITAN_CONF", str(tmp_path))
    run = compose_test_run(["modules=[tests]", "hooks=[stop,norms]", hook("more", "Listed"), "+hooks.norms.every=5"])
    assert list(run.hooks or {}) == ["stop", "norms", "more"] and run.hooks["norms"].every == 5  # type: ignore[index, attr-defined]
    for typed, message in {
        "hooks=[other]": r"hooks=\[other\]: there is no such choice; put a file hooks/other.yaml",
        "hooks.other={a:1}": r"there is no such hook yet; write \+hooks.other=",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compose_test_run(["modules=[tests]", typed])


@pytest.mark.full
def test_a_list_of_hooks_without_a_file_of_any() -> None:
    assert not compose_test_run(["name=x", "hooks=[]"]).hooks
    with pytest.raises(ConfigError, match=r"hooks=\[other\]: there is no such choice; put a file hooks/other.yaml"):
        compose_test_run(["name=x", "hooks=[other]"])


KEY = "hooks/norms/layers.1.attention.wq.weight"
LIKE = ("checkpoint=off", "evaluation.tokens=64")


@pytest.mark.full
def test_from_the_hook_to_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(table_data, "MOST_METRICS", 3)
    for seed in (0, 1):
        asked = (*LIKE, f"training.seed={seed}", "metrics.tensorboard=true", hook("norms", "Norms"))
        assert trained(tmp_path / f"seed-{seed}", *asked) == 0
    steps = [line for line in read_records(tmp_path / "seed-0" / "metrics.jsonl") if "loss" in line]
    events = loader.EventAccumulator(str(tmp_path / "seed-0" / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars(KEY)] == pytest.approx([line[KEY] for line in steps])
    last = [json.loads((tmp_path / f"seed-{seed}/result.json").read_text())[KEY] for seed in (0, 1)]
    assert last[0] == steps[-1][KEY] != last[1]
    files = [tmp_path / f"compare.{kind}" for kind in ("csv", "md", "html")]
    assert (
        compare.main([*(str(tmp_path / f"seed-{seed}") for seed in (0, 1)), f"to=[{','.join(map(str, files))}]"]) == 0
    )
    rows = list(csv.DictReader(files[0].open()))
    assert [float(row[KEY]) for row in rows] == pytest.approx(last)
    first = min(key for key in steps[0] if key.startswith("hooks/"))
    mean = sum(float(row[first]) for row in rows) / 2
    assert f"| {first.removeprefix('hooks/').replace('_', chr(92) + '_')} | {mean:.4g} |" in files[1].read_text()
    assert "more, in CSV and JSON" in files[1].read_text() and f"{mean:.4g}" in files[2].read_text()


def test_trackers_keep_the_names_of_own_metrics() -> None:
    record = {"step": 1, "validation_loss": 1.0, "hooks/a/b": 2.0}
    assert extract_scalars(record) == {"validation/loss": 1.0, "hooks/a/b": 2.0}
