"""`titan.replay A against=B`: another interpreter, pinned experts, operations, the page; faults planted in ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.layout_faults import FAULTS, LAYOUTS, LayoutFault
from tests.support.page_reader import PageReader
from tests.support.planted_layout_faults import PRECISIONS, Bench, judge_clean_pair, judge_fault, list_clean_pairs
from tests.support.runs import compose_tiny_run, train_run
from titan import replay
from titan.errors import RunError
from titan.run.run import Run
from titan.training.replay.observation import RankReplay, read_rank_replay

MOE = ("model=qwen3_moe_debug", "model.experts=4", "model.top_k=2", "model.expert_ffn=24", "model.head_dim=8",
       "model.layers=2", "training.global_batch=256")  # fmt: skip
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on one device."""
    made = compose_tiny_run(tmp_path_factory.mktemp("run") / "first", "training.steps=3", "checkpoint.every=2")
    train_run(made)
    return made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Compares layouts with one device."""
    return Bench(tmp_path)


def compared(run: Run, folder: Path, *words: str) -> dict[str, Any]:
    assert replay.main([run.directory, "step=3", *words, f"to={folder}/seen.json"]) == 0
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return seen


SAMPLE = {("norms' gradients are not summed", "tp2"), ("attention scale", "pp2"), ("gradients are averaged", "ddp2"),
          ("a rank's parameter is not updated", "fsdp2"), ("keys' gradient is not exchanged", "cp2")}  # fmt: skip


CASES = [(fault, layout) for fault in FAULTS for layout in fault.layouts if (fault.name, layout) in SAMPLE]


@pytest.mark.parametrize(("fault", "layout"), CASES, ids=[f"{fault.name}-{layout}" for fault, layout in CASES])
def test_a_planted_fault_is_named(fault: LayoutFault, layout: str, bench: Bench) -> None:
    outcome = judge_fault(bench, fault, layout)
    assert outcome.is_right, outcome


CLEAN = [
    ("dense", "fsdp2-selective", "bf16", False, False),
    ("dense", "tp2", "bf16", False, False),
    ("moe", "ep2", "fp32", False, True),
]


@pytest.mark.parametrize("pair", CLEAN)
def test_a_pair_without_a_fault_is_not_named(pair: tuple[str, str, str, bool, bool], bench: Bench) -> None:
    assert pair in list_clean_pairs()
    outcome = judge_clean_pair(bench, 0, *pair)
    assert outcome.is_right, outcome


@pytest.mark.parametrize("layout", ["cp2-ring", "cp2", "pp2", "fsdp2-tp2", "fsdp2-selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pair_agrees_in_fp64(layout: str, precision: str, bench: Bench) -> None:
    settings, other = PRECISIONS[precision], (*LAYOUTS[layout], "compile=off")
    answers = bench.compare(settings, other, "other", exact="fp64")
    assert not answers.findings and answers.sentences[1].startswith("2. in fp64"), answers
    assert answers.bound == 1e-5 and all(d.relative < 1e-6 for kind in answers.tensors.values() for d in kind)
    fault = next(fault for fault in FAULTS if fault.name == "attention scale")
    faulty = bench.compare(settings, other, "faulty", fault, exact="fp64").findings[0]
    assert "in fp64 the first difference is in the forward pass of layers.0.attention" in faulty.text


def test_each_fault_has_layouts_and_another_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 40
    assert all(fault.layouts and set(fault.layouts) <= LAYOUTS.keys() for fault in FAULTS)


def test_another_interpreter_computes_the_second_replay(run: Run, tmp_path: Path) -> None:
    python, root = tmp_path / "python", Path(__file__).resolve().parents[2]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    same = compared(run, tmp_path, f"python={python}")
    assert same["verdict"].startswith("both are the same, bitwise")
    other = compared(run, tmp_path, f"python={python}", "against=model.norm_eps=0.01")
    assert "forward pass of layers.0.attention_norm" in other["verdict"]


def test_an_interpreter_that_fails_ends_the_replay(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named \033[1mtitan' >&2\nexit 1\n")
    python.chmod(0o755)
    assert replay.main([run.directory, "step=3", f"python={python}"]) == 1
    err = capsys.readouterr().err
    assert "No module named" in err and "\033" not in err
    assert replay.main([run.directory, "step=3", "python=/no/such/python"]) == 2
    assert "python=/no/such/python: is no program here" in capsys.readouterr().err


def test_what_another_interpreter_leaves_is_not_trusted(tmp_path: Path) -> None:
    record = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "step": 1, "rows": [0, 1], "batch_hash": "a"}
    RankReplay(record, {}, {}).write(tmp_path, "native", 0)
    file = tmp_path / "replayed-native-0.npz"
    assert read_rank_replay(file).record == record
    content = file.read_bytes()
    for text in (np.array([{"pickled": 1}], dtype=object), np.frombuffer(b"[" * 100_000, np.uint8)):
        np.savez(file, json=text)
        with pytest.raises(RunError, match="is not what a rank of this version leaves"):
            read_rank_replay(file)
    for broken in (b"", content[: len(content) // 2], content.replace(b'"version": 1', b'"version": 9')):
        file.write_bytes(broken)
        with pytest.raises(RunError, match="is not what a rank of this version leaves"):
            read_rank_replay(file)


def test_the_operations_of_the_module_are_compared(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared(run, tmp_path, "against=model.norm_eps=0.01", "depth=operation")
    out = capsys.readouterr().out
    assert "operations of layers.0.attention_norm were compared; 0 of A and 0 of B have no counterpart" in out
    assert "the first operation whose result differs is aten.add" in out


def test_the_page_shows_both_passes_and_the_bound(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "step.html"
    assert replay.main([run.directory, "step=3", "against=model.norm_eps=0.01", f"to={page}"]) == 0
    text = page.read_text()
    reader = PageReader(text)
    assert reader.open == [] and reader.tags.count("svg") == 2
    lines = text.count('fill="none" stroke="var(--c)"')
    assert "bound: 1e-05" in text and lines == 4  # both passes, in two sizes
    assert "in fp32 the first difference is in the forward pass of layers.0.attention_norm" in reader.text
    assert "<script" not in text and "Content-Security-Policy" in text


def test_pinned_routers_use_the_experts_of_the_first_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = compose_tiny_run(tmp_path / "moe", *MOE, "training.steps=3", "checkpoint.every=2")
    train_run(made)
    free = compared(made, tmp_path, "against=model.rope_theta=2")
    assert "of tokens, first in layers." in capsys.readouterr().out
    pinned = compared(made, tmp_path, "against=model.rope_theta=2", "pin=routing")
    assert "experts pinned to those of the first replay; the second's own would differ for" in capsys.readouterr().out
    name = "forward/layers.0.feed_forward"
    assert 0 < pinned["differences"][name] < free["differences"][name]


REFUSED = {
    "pin without experts": (["pin=routing", "against=precision=bf16"], "pin=routing: the model has no experts"),
    "pin of one replay": (["pin=routing"], "pin=routing: compares two replays"),
    "depth of one replay": (["depth=operation"], "depth=operation: compares two replays"),
    "a page of one replay": (["to=x.html"], "to=x.html: a page shows two replays"),
    "no checkpoint": (["begin=nowhere"], "begin=nowhere: is no complete checkpoint"),
    "no folder": (["leave=nowhere"], "leave=nowhere: is no empty folder"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_compared_is_refused(
    run: Run, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.main([run.directory, "step=3", *words]) == 2
    assert sentence in capsys.readouterr().err
