"""Law 2, trained: mixtures, stages, streams, growing batches and documents, across restarts and numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.test_manager import in_two_attempts
from tests.support.composing import compose_test_run
from tests.support.prepared_folders import read_row
from tests.support.processes import wait_until
from tests.support.runs import (
    LAYOUTS,
    TINY,
    begin_run,
    build_run_mixture,
    compose_tiny_run,
    read_learned_values,
    read_step_records,
    train_run,
    write_run_checkpoint,
)
from tests.support.tiers import full
from titan.dataset.loader import IGNORED, hash_row
from titan.errors import ConfigError
from titan.run import attempts, summary
from titan.run.run import Run

BASE = [setting for setting in TINY if not setting.startswith("dataset")]
SOURCES = [
    "dataset=mixture", "+dataset@dataset.sources.a=synthetic", "+dataset@dataset.sources.b=synthetic",
    "dataset.sources.a.tokens=3000", "dataset.sources.a.vocab=64", "dataset.sources.a.longest=20",
    "dataset.sources.b.tokens=9000", "dataset.sources.b.vocab=64", "dataset.sources.b.seed=1",
    "dataset.weights={a: 0.7, b: 0.3}",
]  # fmt: skip
STAGES = ["dataset.stages={512: {a: 1, b: 4}}", "dataset.skip=[[10,13],[40,47]]", "training.grow=[[256,192]]"]


def mixture(directory: Path, *overrides: str, layout: str = "single") -> Run:
    """A tiny run on two sources."""
    return compose_test_run([*BASE, *SOURCES, *LAYOUTS[layout], *overrides, f"hydra.run.dir={directory}"])


def rows_of(run: Run) -> list[tuple[list[int], str]]:
    """What each step read."""
    return [(line["rows"], line["batch_hash"]) for line in read_step_records(run)]


def expected_rows(run: Run) -> list[tuple[list[int], str]]:
    """The same from the plain definition: the mixture's numbers, one by one."""
    mix, out = build_run_mixture(run), []
    for step in range(1, run.training.steps + 1):
        before = run.training.count_rows_before(step)
        numbers = mix.compute_row_numbers(np.arange(before, before + run.training.find_phase(step).rows))
        total = 0
        for number in numbers.tolist():
            (k,), (row,) = mix.locate_rows(np.array([number]))
            total += hash_row(number, read_row(mix.sources[k].split, int(row), run.training.seq_len))
        out.append(([int(numbers[0]), int(numbers[-1])], f"{total % 2**64:016x}"))
    return out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        full("single", "fsdp3", id="single-then-fsdp3"),
        full("ddp3", "fsdp2", id="ddp3-then-fsdp2"),
        full("fsdp2", "single", id="fsdp2-then-single"),
    ],
)
def test_mixtures_stages_and_growth_go_on_under_any_layout(before: str, after: str, tmp_path: Path) -> None:
    settings = ["training.steps=6", "optimizer=sgd", *STAGES]
    runs = [mixture(tmp_path / "run", *settings, layout=layout) for layout in (before, after)]
    in_two_attempts(*runs)
    assert [line["attempt"] for line in read_step_records(runs[1])] == [1, 1, 1, 2, 2, 2]
    assert rows_of(runs[1]) == expected_rows(runs[1])
    assert [line["tokens"] for line in read_step_records(runs[1])] == [128, 256, 448, 640, 832, 1024]
    whole = mixture(tmp_path / "whole", *settings)
    train_run(whole)
    for got, wanted in zip(read_step_records(runs[1]), read_step_records(whole), strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


LATER = [
    pytest.param(["dataset.stages={512: {a: 1, b: 1}}"], id="a-later-stage"),
    full(["dataset.skip=[[30,40]]"], id="rows-to-skip"),
    full(["training.grow=[[384,256]]"], id="a-larger-batch"),
    full(
        ["+dataset@dataset.sources.c=synthetic", "dataset.sources.c.tokens=2000", "dataset.sources.c.vocab=64",
         "dataset.stages={400: {a: 1, c: 2}}"],
        id="a-new-source",
    ),
]  # fmt: skip
EARLIER = [
    full(["dataset.stages={256: {a: 1, b: 1}}"], "dataset.stages was null", id="an-earlier-stage"),
    pytest.param(["dataset.skip=[[3,4]]"], "dataset.skip was", id="rows-that-were-read"),
    pytest.param(["training.grow=[[128,256]]"], "training.grow was", id="a-batch-that-grew"),
    full(["dataset.weights={a: 1, b: 1}"], "dataset.weights was", id="other-weights"),
    full(["dataset.mask_documents=true"], "dataset.mask_documents was false, now true", id="masks"),
    full(["dataset.sources.b.tokens=9001"], "data was", id="other-data"),
]


@pytest.mark.full
@pytest.mark.parametrize("change", LATER)
def test_what_is_still_to_be_read_may_change(change: list[str], tmp_path: Path) -> None:
    run = mixture(tmp_path / "run", "training.steps=6")
    lived(run)
    write_run_checkpoint(run, 3)
    attempt = lived(mixture(tmp_path / "run", "training.steps=6", *change))
    assert (attempt.kind, attempt.step, attempt.rows) == ("continuation", 3, 24)


@pytest.mark.full
@pytest.mark.parametrize(("change", "words"), EARLIER)
def test_what_was_read_may_not(change: list[str], words: str, tmp_path: Path) -> None:
    run = mixture(tmp_path / "run", "training.steps=6")
    lived(run)
    write_run_checkpoint(run, 3)
    with pytest.raises(ConfigError, match="another experiment") as raised:
        begin_run(mixture(tmp_path / "run", "training.steps=6", *change))
    assert words in str(raised.value)


def lived(run: Run) -> attempts.Attempt:
    Path(run.directory).mkdir(parents=True, exist_ok=True)
    attempt = begin_run(run)
    assert isinstance(attempt, attempts.Attempt)
    return attempt


@pytest.mark.full
def test_a_fork_skips_the_rows_of_a_spike(tmp_path: Path) -> None:
    parent = compose_tiny_run(tmp_path / "parent", "training.steps=6")
    lived(parent)
    folder = write_run_checkpoint(parent, 3)
    fork = compose_tiny_run(
        tmp_path / "fork", "training.steps=6", f"checkpoint.resume={folder}", "dataset.skip=[[28,35]]"
    )
    assert lived(fork).kind == "fork"
    numbers = build_run_mixture(fork).compute_row_numbers(np.arange(24, 32)).tolist()
    assert numbers == [24, 25, 26, 27, 36, 37, 38, 39]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "fsdp3"])
def test_each_source_has_its_own_validation(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = ["dataset.validation=0.2", "evaluation.tokens=96"]
    run = mixture(tmp_path / "run", *evaluation, layout=layout)
    train_run(run)
    result = json.loads((Path(run.directory) / "result.json").read_text())
    parts = [result["validation_loss/a"], result["validation_loss/b"]]
    assert result["validation_loss"] == pytest.approx(sum(parts) / 2, rel=1e-6)
    assert parts[0] != parts[1]
    summary.show_result(run, result)
    assert f"a {parts[0]:.4f} (" in capsys.readouterr().out
    assert result["bits_per_byte/a"] == pytest.approx(parts[0] / np.log(2), rel=1e-6), "a token is a byte here"
    alone = ["dataset.tokens=9000", "dataset.seed=1", *evaluation, "optimizer.lr=1e-12"]
    untrained = {}
    for name, one in (
        ("mix", mixture(tmp_path / "m", "optimizer.lr=1e-12", *evaluation)),
        ("b", compose_tiny_run(tmp_path / "b", *alone)),
    ):
        train_run(one)
        untrained[name] = json.loads((Path(one.directory) / "result.json").read_text())
    assert untrained["mix"]["validation_loss/b"] == pytest.approx(untrained["b"]["validation_loss"], rel=1e-6)


def test_documents_are_trained_as_if_each_were_alone(tmp_path: Path) -> None:
    """Against the model run on each document's part of each row by itself, without masks and positions."""
    apart = ["dataset.mask_documents=true", "dataset.longest=9"]
    run = compose_tiny_run(tmp_path, *apart, "optimizer=sgd", "training.steps=1", "training.clip_norm=null")
    (seen,) = train_run(run)
    with torch.device("meta"):
        model: Any = run.model.build()
    model.to_empty(device="cpu").load_state_dict({n.removeprefix("model."): t for n, t in seen.first.items()})
    model.init_buffers("cpu")
    mix, total, count = build_run_mixture(run), torch.zeros(()), 0
    split = mix.sources[0].split
    for row in mix.locate_rows(np.arange(run.training.rows))[1].tolist():
        tokens = read_row(split, row, 16).astype(np.int64)
        for part in np.split(tokens, split.find_document_starts(row * 16, 17)):
            if part.size > 1:
                ids = torch.from_numpy(part)[None]
                total = total + model.head(model(ids[:, :-1]), ids[:, 1:])
                count += part.size - 1
    (total / count).backward()
    (line,) = read_step_records(run)
    assert line["valid_tokens"] == count < 128
    assert line["loss"] == pytest.approx(total.item() / count, rel=1e-6)
    for name, parameter in model.named_parameters():
        gradient = seen.gradients[name]
        assert (gradient - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max()


@pytest.mark.full
def test_less_is_computed_where_documents_are_apart(tmp_path: Path) -> None:
    figures = {}
    for apart in ("true", "false"):
        run = compose_tiny_run(
            tmp_path / apart, f"dataset.mask_documents={apart}", "dataset.longest=9", "training.steps=2"
        )
        train_run(run)
        line = read_step_records(run)[-1]
        figures[apart] = line["tflops_per_device"] * line["step_seconds"] * 1e12
    model = compose_tiny_run(tmp_path / "x").model
    assert figures["false"] == pytest.approx(128 * model.flops_per_token(16), rel=1e-6)
    assert 128 * model.flops_per_token(2) < figures["true"] < 128 * model.flops_per_token(9)


@pytest.mark.full
def test_an_epoch_too_many_is_rejected(tmp_path: Path) -> None:
    run = mixture(tmp_path / "run", "training.steps=60", "dataset.sources.a.epochs=1")
    with pytest.raises(ConfigError, match=r"dataset.sources.a.epochs=1: training.steps=60 reads a 1\.\d+ times"):
        begin_run(run)
    lived(mixture(tmp_path / "run", "training.steps=20", "dataset.sources.a.epochs=1"))


@pytest.mark.full
def test_sources_of_different_tokenizers_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text\n" * 1000)
    other = ["+dataset@dataset.sources.c=text", f"dataset.sources.c.path={tmp_path}/x.txt"]
    with pytest.raises(ConfigError, match="different tokenizers"):
        begin_run(mixture(tmp_path / "run", *other))


@pytest.mark.full
def test_ids_of_a_mixture(tmp_path: Path) -> None:
    """Seeds are of one group; the order in which sources are named is no science; what they are is."""
    ids = lived(mixture(tmp_path / "a")).ids
    seed = lived(mixture(tmp_path / "b", "training.seed=1")).ids
    other = lived(mixture(tmp_path / "c", "dataset.sources.b.tokens=9001")).ids
    assert (ids.group == seed.group, ids.science == seed.science) == (True, False)
    assert ids.science != other.science
    swapped = [*SOURCES[:1], *SOURCES[2:3], *SOURCES[1:2], *SOURCES[3:]]
    again = lived(compose_test_run([*BASE, *swapped, f"hydra.run.dir={tmp_path}/d"]))
    assert again.ids.science == ids.science


@pytest.mark.full
def test_data_on_another_machine_are_not_to_be_prepared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prepared data"):
        begin_run(
            compose_test_run([*BASE, "dataset=prepared", f"dataset.path={tmp_path}", f"hydra.run.dir={tmp_path}/run"])
        )


# --- streams, as commands


def command(folder: Path, *overrides: str) -> list[str]:
    """Train on text of a user's own class, most of which comes once there is a file `gate`."""
    conf = folder / "conf" / "dataset"
    conf.mkdir(parents=True, exist_ok=True)
    base = "defaults:\n  - /schema/dataset/base@_here_\n  - _self_\n_target_: tests.support.made_source.Gated\n"
    own = "window: 400\nworkers: 1\nvalidation: 0\n"
    (conf / "gated.yaml").write_text(base + own)
    data = [f"hydra.searchpath=[file://{conf.parent}]", "modules=[tests]", "dataset=gated", "model.vocab=4096"]
    data.append(f"dataset.gate={folder}/gate")  # a text of one's own class, which a file of that folder may not set
    more = ["metrics.console_every=1", "checkpoint.every=2", "training.steps=12", "cluster.timeout=600"]
    shape = [setting for setting in BASE if not setting.startswith(("model.vocab", "training.steps"))]
    return [sys.executable, "-m", "titan.train", *shape, *data, *more, *overrides]


def when_it_waits(lines: Iterable[str], act: Callable[[], object]) -> list[str]:
    """All lines of a run's output; `act` is called once, when the run waits for more than two shards."""
    seen: list[str] = []
    acted = False
    for line in lines:
        seen.append(line)
        if not acted and line.startswith("waiting for data: data is still being prepared: 2 of 12 shards"):
            act()
            acted = True
    return seen


def run_of(folder: Path) -> Run:
    return compose_test_run(["cluster=cpu", f"hydra.run.dir={folder}"])


@pytest.mark.full
def test_a_stream_gives_what_preparing_first_gives_even_when_killed(tmp_path: Path) -> None:
    """Its first attempt is killed when it has to wait for data; the second one has other ranks."""
    cache = {**os.environ, "TITAN_CACHE": str(tmp_path / "live")}
    live = command(tmp_path, "dataset.stream=true", f"hydra.run.dir={tmp_path}/live-run")
    with subprocess.Popen(live, env=cache, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        lines = when_it_waits(process.stdout, lambda: os.killpg(process.pid, signal.SIGKILL))
    assert process.returncode == -signal.SIGKILL
    assert any("so far (" in line for line in lines)
    assert len(rows_of(run_of(tmp_path / "live-run"))) == 2, "a window has three steps; the third is reported later"
    wait_until(lambda: not _alive(str(tmp_path)), "what prepares to end with the training")
    (tmp_path / "gate").touch()
    subprocess.run([*live, "parallelism=fsdp"], env=cache, check=True, stdout=subprocess.DEVNULL)
    first = command(tmp_path, f"hydra.run.dir={tmp_path}/first-run")
    cache["TITAN_CACHE"] = str(tmp_path / "first")
    subprocess.run(first, env=cache, check=True, stdout=subprocess.DEVNULL)
    live_run, first_run = (run_of(tmp_path / name) for name in ("live-run", "first-run"))
    assert rows_of(live_run) == rows_of(first_run)
    assert len(rows_of(live_run)) == 12
    for got, wanted in zip(read_learned_values(live_run), read_learned_values(first_run), strict=True):
        assert float(got[2]) == pytest.approx(float(wanted[2]), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_a_signal_ends_a_run_that_waits_and_costs_nothing(layout: str, tmp_path: Path) -> None:
    live = command(tmp_path, "dataset.stream=true", "checkpoint.every=0", f"hydra.run.dir={tmp_path}/run")
    env = {**os.environ, "TITAN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen([*live, f"parallelism={layout}"], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        when_it_waits(process.stdout, lambda: process.send_signal(signal.SIGINT))
    assert process.returncode == 130
    run = run_of(tmp_path / "run")
    assert [line["step"] for line in read_step_records(run)] == [1, 2, 3]
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-3"]
    (tmp_path / "gate").touch()
    subprocess.run(live, env=env, check=True, stdout=subprocess.DEVNULL)
    assert [line["attempt"] for line in read_step_records(run)] == [1] * 3 + [2] * 9
    assert rows_of(run)[3][0] == [24, 31]


@pytest.mark.full
def test_when_what_prepares_is_killed_the_run_that_waits_says_so(tmp_path: Path) -> None:
    live = command(tmp_path, "dataset.stream=true", f"hydra.run.dir={tmp_path}/run")
    env = {**os.environ, "TITAN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(live, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None

        def kill_what_prepares() -> None:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            spawned = [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
            os.kill(int(spawned[-1]), signal.SIGKILL)

        when_it_waits(process.stdout, kill_what_prepares)
        stderr = process.stderr.read()
    assert process.returncode == 1
    assert "the preparing process was killed by signal 9" in stderr


@pytest.mark.full
def test_rows_that_are_not_there_yet_can_not_be_shown(tmp_path: Path) -> None:
    arguments = command(tmp_path, "dataset.stream=true")[3:]
    env = {**os.environ, "TITAN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-m", "titan.data", *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "titan: data is still being prepared: 0 of 12 shards, 0 tokens, are done; wait until it is complete, or choose "
        "earlier rows.\n"
    )


def _alive(word: str) -> bool:
    """Whether a process has `word` on its command line or in its environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                found = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if word.encode() in found:
                return True
    return False


@pytest.mark.full
def test_a_stream_that_can_not_be_prepared_fails_with_the_reason(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i} of many"}) for i in range(300)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "no JSON"]))
    data = ["dataset=jsonl", f"dataset.path={tmp_path}/x.jsonl", "dataset.window=400", "dataset.stream=true"]
    shared = [word for word in command(tmp_path) if not word.startswith("dataset.gate=")]
    done = subprocess.run(
        [*shared, *data, f"hydra.run.dir={tmp_path}/run"],
        env={**os.environ, "TITAN_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "titan: the data that this run waits for can't be prepared" in done.stderr
    assert "not JSON" in done.stderr


def test_ignored_targets_have_one_name() -> None:
    from titan.model import layers

    assert layers.IGNORED == IGNORED
