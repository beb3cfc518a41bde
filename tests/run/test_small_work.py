"""A warning where GPUs get little work, and none where that is meant: `titan.run.compose`."""

from __future__ import annotations

import re

import pytest

from launchers import command
from tests.support.composing import compose_test_run
from titan import plan
from titan.config import warning
from titan.run.compose import describe_small_work, warn_of_small_work

GPU = ("model=llama1b", "dataset=synthetic", "checkpoint=off", "cluster=h100", "parallelism=fsdp")
LONG = ("training.seq_len=8192", "training.global_batch=65536")
FEW = "each GPU computes only 1,024 tokens per step"


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "words"),
    [
        pytest.param((), "the 8,192 tokens of model.rope_original, and each GPU computes only 256 tokens", id="laptop"),
        pytest.param(
            (), "give training.seq_len=8192 and training.global_batch=65536 or more; recipe=train_1b is", id="way out"
        ),
        pytest.param(("model=llama405b", "parallelism=3d", "cluster.nodes=64"), "; recipe=train_405b is", id="recipe"),
        pytest.param(
            ("recipe=shipped_8b", "training.seq_len=256", "training.global_batch=2048"), r"or more\.$", id="its recipe"
        ),
        pytest.param(
            ("training.seq_len=512", "training.global_batch=262144"), r"; give training.seq_len=8192\.", id="rows"
        ),
        pytest.param(
            ("training.seq_len=1024", "training.global_batch=8192"),
            rf": {FEW}; give training.global_batch=16384 or more\.", id="one short row",
        ),
        pytest.param(("parallelism=cp", "training.seq_len=8192", "training.global_batch=8192"), FEW, id="row of 8"),
        pytest.param(LONG, "^$", id="one long row"),
        pytest.param(
            ("training.seq_len=8192", "training.global_batch=16384"),
            r": only 2 of 8 data-parallel ranks have a row; give training.global_batch=65536 or more\.", id="idle",
        ),
        pytest.param(("training.seq_len=1024", "training.global_batch=16384"), "^$", id="two short rows"),
        pytest.param((*LONG, "parallelism=tp"), "^$", id="tensor"),
        pytest.param(("model.rope_factor=1", "training.seq_len=512", "training.global_batch=262144"), "^$", id="RoPE"),
        pytest.param(
            ("model.rope_factor=1", "training.seq_len=512", "training.global_batch=8192"),
            rf": {FEW}; give training.global_batch=16384 or more\.", id="unscaled RoPE, few tokens",
        ),
        pytest.param(("model=qwen3_0.6b", "training.seq_len=512", "training.global_batch=262144"), "^$", id="qwen3"),
    ],
)  # fmt: skip
def test_what_a_run_has_little_of(more: tuple[str, ...], words: str) -> None:
    assert re.search(words, describe_small_work(compose_test_run([*GPU, *more], remote=True)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "planned", "expected"),
    [
        pytest.param(GPU, True, True, id="plan"),
        pytest.param(GPU, False, True, id="train"),
        pytest.param((*GPU, "parallelism=single"), True, True, id="plan of one GPU"),
        pytest.param((*GPU, "parallelism=single"), False, False, id="train on one GPU"),
        pytest.param((*GPU, "model=debug"), True, False, id="debug model"),
        pytest.param(("model=llama1b", "parallelism=ddp", "dataset=synthetic"), True, False, id="CPU"),
    ],
)
def test_healthy_runs_have_no_warning(
    arguments: tuple[str, ...], planned: bool, expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warning.warn_once.cache_clear()
    remote = "cluster=h100" in arguments
    memory = () if remote else ("cluster.memory_gib=1e6",)
    warn_of_small_work(compose_test_run([*arguments, *memory], remote=remote), planned)
    assert ("titan: warning: training.seq_len=256" in capsys.readouterr().err) is expected


@pytest.mark.full
def test_commands_warn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (list(GPU), ["-m", *GPU, "training.seed=0,1"]):
        warning.warn_once.cache_clear()
        assert plan.main(arguments) == 0
        assert capsys.readouterr().err.count("titan: warning: training.seq_len=256") == 1
    warned: list[bool] = []
    monkeypatch.setattr(command, "warn_of_small_work", lambda run, planned=False: warned.append(planned))
    assert command.run_command(["model=debug", "dataset=synthetic"], lambda run: 0) == 0
    assert warned == [False]
