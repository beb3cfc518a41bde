"""What a run records: the lines of metrics.jsonl, and speed from seconds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.composing import compose_test_run
from tests.support.prepared_folders import read_row
from tests.support.runs import LAYOUTS, TINY, compose_tiny_run, read_checkpoint, read_step_records, train_run
from tests.support.tiers import full
from titan.dataset.preprocess.prepare import prepare
from titan.dataset.shards import open_corpus
from titan.metrics.recorder import peak_memory_gib, replace_non_finite
from titan.model.init_weights import materialise_model
from titan.run.run import Run
from titan.training.reporter import build_step_speed

STEP = {
    "step": int, "tokens": int, "loss": float, "grad_norm": float, "lr": float, "step_seconds": float,
    "data_seconds": float, "tokens_per_second": float, "tokens_per_second_per_device": float,
    "tflops_per_device": float, "mfu": float, "memory_gib": float, "rows": list, "valid_tokens": int,
    "batch_hash": str, "time": float, "attempt": int,
}  # fmt: skip
VALIDATION = {
    "step": int, "tokens": int, "validation_loss": float, "bits_per_byte": float, "time": float, "attempt": int,
}  # fmt: skip


def text_run(folder: Path, layout: str = "single", *more: str) -> Run:
    """A run on text with a real tokenizer, so that a token has several bytes; half of it is the evaluation set."""
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(f"The {i}. text says: for x in range({i}): return naïve\n" * 9)
    text = ["dataset=text", f"dataset.path={folder}/text", "dataset.validation=0.5", "model.vocab=4096"]
    keep = ["evaluation.every=2", "evaluation.tokens=160", "metrics.sample_tokens=0", *more]
    base = [setting for setting in TINY if not setting.startswith(("dataset", "model.vocab", "metrics.validation"))]
    return compose_test_run([*base, *LAYOUTS[layout], *text, *keep, f"hydra.run.dir={folder}/run"])


SAVED = {
    "step": int, "attempt": int, "checkpoint_step": int, "checkpoint_seconds": float, "checkpoint_stall_seconds": float,
    "checkpoint_compare_seconds": float,
    "checkpoint_gib": float, "time": float,
}  # fmt: skip


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", [full("single"), "fsdp2"])
def test_every_line_has_every_key(layout: str, tmp_path: Path) -> None:
    run = compose_tiny_run(
        tmp_path, "evaluation.tokens=64", "evaluation.every=2", "cluster.peak_tflops=1", layout=layout
    )
    train_run(run)
    for line in lines(run):
        schema = STEP if "loss" in line else SAVED if "checkpoint_step" in line else VALIDATION
        assert {key: type(value) for key, value in line.items() if key != "ranks"} == schema
    logged = [line for line in lines(run) if "checkpoint_step" not in line]
    assert [("loss" in line, line["step"]) for line in logged] == [
        (True, 1), (True, 2), (False, 2), (True, 3), (False, 3),
    ]  # fmt: skip
    assert [line["tokens"] for line in logged] == [128, 256, 256, 384, 384]
    assert [(line["step"], line["checkpoint_step"]) for line in lines(run) if "checkpoint_step" in line] == [(3, 3)]
    assert ["ranks" in line for line in read_step_records(run)] == [False, False, run.layout.devices > 1]
    for line in read_step_records(run):
        assert line["tokens_per_second"] == pytest.approx(128 / line["step_seconds"])
        assert line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"] / run.layout.devices)
        assert 0 <= line["data_seconds"] <= line["step_seconds"] * 2
        assert line["memory_gib"] > 0.05


def test_speed_is_what_a_step_did_over_its_time(tmp_path: Path) -> None:
    run = compose_tiny_run(tmp_path, "cluster.peak_tflops=0.001", layout="fsdp2")
    flops = run.model.flops_per_token(16)
    figures = build_step_speed(run).compute(0.5, 128, 128 * 16)
    assert figures["tokens_per_second"] == 256
    assert figures["tokens_per_second_per_device"] == 128
    assert figures["tflops_per_device"] == pytest.approx(128 * flops / 1e12)
    assert figures["mfu"] == pytest.approx(128 * flops / 1e9)
    unknown = replace(run, cluster=replace(run.cluster, peak_tflops=None))
    assert build_step_speed(unknown).compute(0.5, 128, 128 * 16)["mfu"] is None
    apart = build_step_speed(run).compute(0.5, 128, 128 * 4)
    assert apart["tflops_per_device"] == pytest.approx(128 * run.model.flops_per_token(4) / 1e12)
    assert run.model.flops_per_token(4) < flops


@pytest.mark.parametrize("tied", ["false", "true"], ids=["untied", "tied"])
def test_flops_are_those_that_torch_counts(tied: str, tmp_path: Path) -> None:
    """Matmuls forward and backward; attention, which the formula counts in full, is left out on both sides."""
    config, length, rows = compose_tiny_run(tmp_path, f"model.tied={tied}").model, 16, 3
    with torch.device("meta"):
        model: Any = config.build()
    materialise_model(model, model.initial(), 0, "cpu")
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.head(model(tokens), tokens).backward()
    matmuls = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = 12 * config.layers * config.heads * config.head_size * length
    assert matmuls == (config.flops_per_token(length) - attention) * rows * length


@pytest.mark.parametrize("layout", ["single", full("ddp2"), full("fsdp3")])
@pytest.mark.full
def test_validation_is_that_of_the_whole_set(layout: str, tmp_path: Path) -> None:
    settings = {"fsdp3": "parallelism.microbatches=2"}.get(layout, "parallelism.microbatches=1")
    run = text_run(tmp_path, layout, settings)
    train_run(run)
    corpus = open_corpus(prepare(run.dataset))
    with torch.device("meta"):
        model: Any = run.model.build()
    state = {n.removeprefix("model."): t for n, t in read_checkpoint(run, 3).items() if n.startswith("model.")}
    model.to_empty(device="cpu").load_state_dict(state)
    model.init_buffers("cpu")
    rows = [torch.from_numpy(read_row(corpus.validation, i, 16).astype("int64")) for i in range(10)]
    batch = torch.stack(rows)
    with torch.no_grad():
        logits = model.head(model(batch[:, :-1])).double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    text_bytes = sum(int(corpus.token_bytes[t]) for t in batch[:, 1:].flatten().tolist())
    assert text_bytes > batch[:, 1:].numel()
    last = lines(run)[-1]
    assert last["validation_loss"] == pytest.approx(nats / 160, rel=1e-6)
    assert last["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (math.inf, None), (-math.inf, None), (1.5, 1.5), ("nan", "nan"), (None, None)],
)
def test_finite(value: Any, expected: Any) -> None:
    assert replace_non_finite(value) == expected


@pytest.mark.full
def test_memory_is_that_of_this_process() -> None:
    before = peak_memory_gib(torch.device("cpu"))
    block = torch.ones(2**26)
    assert peak_memory_gib(torch.device("cpu")) >= before
    assert peak_memory_gib(torch.device("cpu")) > block.numel() * 4 / 2**30
