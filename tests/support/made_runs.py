"""Made runs on disk: run.yaml, metrics.jsonl, result.json and env.json as a trained run leaves them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.composing import compose_test_run
from tests.support.runs import TINY
from titan.estimate.plan import PredictedValue
from titan.report.comparison import compare
from titan.report.findings import Comparison, Quality
from titan.run import identity, prediction
from titan.run.prediction import Prediction
from titan.run.run import Run, as_config
from titan.sweep import ledger
from titan.sweep.ledger import SweepSpec

BEGAN = 1_760_000_000
"""When the first attempt of every made run began, in seconds since 1970."""
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The one in C, where there is one."""
GIVES_UP = 3
"""training.bad_steps of every made run."""
START, BETWEEN = 20.0, 600.0
"""Seconds from an attempt's beginning to its first step, and from its last line to the next attempt."""
NEUTRAL = "training.bad_steps=4"
"""Science by its mark, and without an effect on runs that go well."""
INJECTED = 0.05
"""What a validation loss is made worse by, for a comparison to find."""
H200 = {"device": "cuda", "name": "NVIDIA H200", "count": 8, "cores": 64, "memory_gib": 140.4, "bf16_fast": True}


@dataclass(frozen=True)
class StoryAttempt:
    """An attempt of a made run: it goes on after `start` and gets to `end`, on the layout that `overrides` ask for."""

    start: int
    end: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Story:
    """How a made run went.

    Attributes:
        seed, repeat: of the run.
        steps: wanted.
        attempts: None: one that does all steps.
        seconds, jitter: of a step: the median, and the standard deviation of its logarithm.
        level: the loss that it comes to.
        noise: standard deviation of a step's loss, which follows from the seed.
        spread: standard deviation of the level over seeds.
        off: comes to be added to all losses, from the tenth step on in full.
        luck: added to the seed for what is random but the data.
        first_off: a factor on losses and norms from the first step on, as of wrong gradients.
        batches: the seed of the batch hashes; None: the run's.
        every: steps between validations; 0: only at the end.
        sources: names of the sources of a mixture; what is added to the bits of each.
        ratio: bits a byte for a nat a token.
        stall: seconds of a checkpoint, of which each attempt makes one at its end.
        parent, digest: of the science; the data's.
        code: id of the code.
        device: of env.json.
        bad: the step from which on no loss is finite, so that the run gives up; None: all are.
        rises: added to the loss of steps, by their number.
        host, start_offset: of env.json, and when its first attempt began after the usual time.
        predicted: seconds of a step that each attempt was predicted to take; None: its hardware was not described.
    """

    seed: int = 0
    repeat: int = 0
    steps: int = 40
    attempts: tuple[StoryAttempt, ...] | None = None
    seconds: float = 0.5
    jitter: float = 0.02
    level: float = 3.0
    noise: float = 0.03
    spread: float = 0.0
    off: float = 0.0
    luck: int = 0
    first_off: float = 1.0
    batches: int | None = None
    every: int = 10
    sources: Mapping[str, float] = field(default_factory=dict)
    ratio: float = 0.4
    stall: float = 2.0
    digest: str = "d" * 64
    code: str = "c0de00000000"
    device: Mapping[str, Any] = field(default_factory=lambda: dict(H200))
    bad: int | None = None
    rises: Mapping[int, float] = field(default_factory=dict)
    host: str = ""
    start_offset: float = 0.0
    predicted: float | None = None


@lru_cache(maxsize=256)
def compose_made_run(*overrides: str) -> Run:
    """A composed run, with validation, whose directory is nowhere."""
    return compose_test_run([*TINY, "evaluation.tokens=1024", *overrides, "hydra.run.dir=/nowhere"])


def make_run(directory: Path, story: Story | None = None, *overrides: str) -> Path:
    """Write a run's directory.

    Args:
        directory: where.
        story: how it went.
        overrides: the command line beside what makes the run tiny, and seed, repeat and steps, which the story says.
    """
    story = story or Story()
    directory.mkdir(parents=True)
    (directory / ".lock").touch()
    (directory / "env.json").write_text(json.dumps({"device": story.device, "host": story.host}))
    attempts = story.attempts or (StoryAttempt(0, story.steps if story.bad is None else story.bad + GIVES_UP - 2),)
    clock, documents, lines = BEGAN + story.start_offset, [], []
    for number, attempt in enumerate(attempts, 1):
        run = _compose_story_run(story, (*overrides, *attempt.overrides))
        documents.append(_build_document(run, story, number, attempt, clock, (*overrides, *attempt.overrides)))
        new = list(_generate_lines(run, story, number, attempt, clock + START))
        lines += new
        clock = (new[-1]["time"] if new else clock + START) + BETWEEN
    (directory / "run.yaml").write_text(
        "".join("---\n" + yaml.dump(d, Dumper=DUMPER, sort_keys=False) for d in documents)
    )
    write_lines(directory, lines)
    if story.bad is not None:
        last = story.bad + GIVES_UP - 1  # it has no line
        write_failure(
            directory, f"{GIVES_UP} steps in a row without finite values, the last one step {last}: gradients"
        )
    elif attempts[-1].end == story.steps:
        _write_result(directory, story, lines, len(attempts))
    return directory


def make_seeds(*levels: float | None) -> list[Story]:
    """Return a story a seed, each with its level above the usual one; None: it diverges."""
    return [
        Story(seed=seed, bad=20) if level is None else Story(seed=seed, level=Story.level + level)
        for seed, level in enumerate(levels)
    ]


def compare_made(folder: Path, *variants: tuple[Sequence[Story], Sequence[str]], **options: Any) -> Comparison:
    """Make the runs a0, a1 and so on of the first variant, b0 and so on of the second, and compare all."""
    for letter, (stories, overrides) in zip("abcdef", variants, strict=False):
        for index, story in enumerate(stories):
            make_run(folder / f"{letter}{index}", story, *overrides)
    return compare([folder], **options)


def write_failure(directory: Path, message: str) -> None:
    """Write the launcher's message on a run that failed."""
    (directory / "log").mkdir()
    (directory / "log/launcher.log").write_text(f"2030-01-01T00:00:00+00:00 {message}\n")


def make_sweep(
    directory: Path, spec: SweepSpec, points: Mapping[str, tuple[str, ...]], *events: Mapping[str, Any]
) -> None:
    """Make a directory a sweep's.

    Args:
        directory: where its runs are.
        spec: what it asks.
        points: overrides of each point, by the name of its directory, which is its id too.
        events: what the ledger says of them since.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ledger.write_spec(directory, spec)
    common = {"event": "point", "steps": 40, "devices": 1, "asked": ""}
    ledger.add_events(directory, *({"id": n, "directory": n, "overrides": list(o)} | common for n, o in points.items()))
    ledger.add_events(directory, *events)


def write_lines(directory: Path, lines: list[dict[str, Any]]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _compose_story_run(story: Story, overrides: tuple[str, ...]) -> Run:
    run = compose_made_run(*overrides)
    changes: dict[str, Any] = {"seed": story.seed, "repeat": story.repeat, "steps": story.steps}
    return dataclasses.replace(run, training=dataclasses.replace(run.training, **changes))


def _build_document(
    run: Run, story: Story, number: int, attempt: StoryAttempt, start: float, overrides: tuple[str, ...]
) -> dict[str, Any]:
    science = identity.collect_science(run, story.digest, None)
    ids = (
        identity.compute_digest(science),
        identity.compute_digest({k: v for k, v in science.items() if k != "training.seed"}),
    )
    return {
        "attempt": number,
        "kind": "resume" if number > 1 else "start",
        "began": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
        "name": run.name,
        "run_id": "0" * 12,
        "parent": None,
        "from_step": attempt.start,
        "notes": [],
        "ids": {"science": ids[0], "group": ids[1], "execution": "e" * 12, "code": story.code},
        "overrides": [*overrides, f"training.seed={story.seed}", f"training.steps={story.steps}"],
        "choices": dict(run.choices),
        "layout": run.layout.degrees(),
        "microbatches": run.microbatches,
        "science": dict(science),
        "config": as_config(run),
        **(
            {}
            if story.predicted is None
            else {prediction.KEY: prediction.to_document(make_prediction(story.predicted))}
        ),
    }


def make_prediction(seconds: float, gib: float = 10.0) -> Prediction:
    """A prediction of so many seconds a step and GiB; ten per cent of the time is communication."""
    parts = {"matmuls": 0.9 * seconds, "weights and gradients": 0.1 * seconds}
    step, memory = PredictedValue(seconds, seconds / 1.1, seconds * 1.1), PredictedValue(gib, gib / 1.1, gib * 1.1)
    return Prediction(step, memory, memory, parts, {"weights": gib}, "c0575a27")


def _generate_lines(
    run: Run, story: Story, number: int, attempt: StoryAttempt, clock: float
) -> Iterator[dict[str, Any]]:
    """The lines of an attempt, a stall for its checkpoint at the end; `clock`: when its first step begins."""
    sound = np.random.default_rng([story.seed, 1]).normal(size=story.steps + 1) * story.noise
    speed = np.random.default_rng([story.seed, story.repeat, number, 2, story.luck]).normal(size=story.steps + 1)
    level = story.level + story.spread * np.random.default_rng([story.seed, 3, story.luck]).normal()
    for step in range(attempt.start + 1, attempt.end + 1):
        seconds = story.seconds * math.exp(speed[step] * story.jitter)
        clock += seconds
        loss = level + 2 * math.exp(-5 * step / story.steps) + story.off * max(0, min(1, (step - 5) / 5))
        noisy_loss = loss + sound[step] + story.rises.get(step, 0.0)
        noisy_loss = None if story.bad is not None and step >= story.bad else noisy_loss
        yield _build_step_line(run, story, step, noisy_loss, seconds) | {"time": round(clock, 3), "attempt": number}
        if step == story.steps or (story.every and step % story.every == 0):
            yield _build_validation_line(run, story, step, loss) | {"time": round(clock, 3), "attempt": number}
    clock += story.stall
    saved = {"step": attempt.end, "checkpoint_step": attempt.end, "checkpoint_stall_seconds": story.stall}
    yield saved | {"time": round(clock, 3), "attempt": number}


def _build_step_line(run: Run, story: Story, step: int, loss: float | None, seconds: float) -> dict[str, Any]:
    tokens, factor = run.training.global_batch, story.first_off
    rate = tokens / seconds / run.layout.devices
    tflops = rate * run.model.flops_per_token(run.training.seq_len) / 1e12
    return {
        "step": step,
        "tokens": step * tokens,
        "loss": None if loss is None else loss * factor,
        "grad_norm": (1 + 1 / step) * factor,
        "lr": run.optimizer.lr * run.schedule.lr_factor(step, run.training.steps),
        "step_seconds": seconds,
        "data_seconds": 0.01 * seconds,
        "tokens_per_second": rate * run.layout.devices,
        "tokens_per_second_per_device": rate,
        "tflops_per_device": tflops,
        "mfu": tflops / 989,
        "valid_tokens": tokens,
        "memory_gib": 12.5,
        "rows": [(step - 1) * run.training.rows, step * run.training.rows - 1],
        "batch_hash": identity.compute_digest([story.seed if story.batches is None else story.batches, step]),
    }


def _build_validation_line(run: Run, story: Story, step: int, loss: float) -> dict[str, Any]:
    parts = {f"validation_loss/{name}": loss + extra_bits / story.ratio for name, extra_bits in story.sources.items()}
    bits = {f"bits_per_byte/{name}": loss * story.ratio + extra_bits for name, extra_bits in story.sources.items()}
    total = {"validation_loss": loss, "bits_per_byte": loss * story.ratio}
    return {"step": step, "tokens": step * run.training.global_batch, **total, **parts, **bits}


def _write_result(directory: Path, story: Story, lines: list[dict[str, Any]], attempt: int) -> None:
    last = [line for line in lines if "validation_loss" in line][-1]
    final = {k: v for k, v in last.items() if k.startswith(("validation_loss", "bits_per_byte"))}
    result = {"finished": True, "step": story.steps, "attempt": attempt, **final}
    (directory / "result.json").write_text(json.dumps(result))


def find_end_quality(comparison: Comparison) -> Quality:
    """What the comparison of two variants says of their ends."""
    (quality,) = [quality for quality in comparison.variants[1].quality if quality.at == "the end"]
    return quality
