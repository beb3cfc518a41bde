"""Recipes are what was published, and fit the devices that they name; every point of every named sweep can run."""

from __future__ import annotations

import dataclasses
import re
import socket
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers import start
from launchers.command import run_command
from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.runs import TINY, compose_tiny_run, train_run
from tests.support.tiers import full, select_cases
from titan.cluster import devices
from titan.console.numbers import format_rounded
from titan.errors import ConfigError
from titan.estimate.plan import build_plan
from titan.parallelism.schema import Layout
from titan.run.hydra_session import CONF
from titan.run.run import Run
from titan.schedule.schema import WSD, Cosine, Schedule
from titan.training.schema import Training

FILES = {group: sorted(f.stem for f in (CONF / group).glob("*.yaml")) for group in ("recipe", "sweep")}
LONG = {"32k": (8, 1, 32_768), "64k": (4, 2, 65_536), "128k": (2, 4, 131_072), "256k": (1, 8, 262_144)}
"""Shard, context and tokens of a row, as both long benchmarks have them."""


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing asks nobody: neither the hub, nor this machine's own devices."""

    def refuse(*_: object) -> None:
        raise AssertionError("composing wants the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(devices, "detect_machine", make_detector("cpu"))
    monkeypatch.chdir(tmp_path)


@dataclass(frozen=True)
class Published:
    """What a source says of a recipe.

    Attributes:
        model, memory, compile: choices on these axes.
        layout: all degrees.
        rows: sequences that a data rank takes in a step.
        seq_len: tokens of a sequence.
        microbatches: that a data rank's rows are cut into.
        overlapped: whether tensor parallelism is asynchronous.
        schedule: of the pipeline.
        precision: choice on this axis; bf16 where it was published too.
    """

    model: str
    layout: Layout
    rows: int
    seq_len: int = 8192
    memory: str = "full"
    compile: str = "block"
    microbatches: int = 1
    overlapped: bool = False
    schedule: str = "1F1B"
    precision: str = "bf16"

    @property
    def training(self) -> tuple[float, int, int]:
        """Peak learning rate, warm-up and steps, which follow from the model."""
        return {
            "llama8b": (3e-4, 200, 1000), "llama70b": (1.5e-4, 200, 1000), "llama405b": (8e-5, 600, 3000),
            "deepseek_v2_lite": (2.2e-4, 200, 1000), "deepseek_v3_671b": (2.2e-4, 100, 200),
            "llama4_17b_16e": (4e-3, 600, 3000), "llama4_17b_128e": (4e-3, 600, 3000),
        }[self.model]  # fmt: skip


def llama405b(rows: int, microbatches: int, seq_len: int = 8192, schedule: str = "1F1B", **degrees: int) -> Published:
    layout = Layout(tensor=8, **degrees)
    how: Any = {"overlapped": True, "precision": "float8" if layout.devices == 512 else "bf16"}
    return Published("llama405b", layout, rows, seq_len, microbatches=microbatches, schedule=schedule, **how)


PUBLISHED = {
    "bench_8b_8": Published("llama8b", Layout(shard=8), 2, memory="selective"),
    "bench_8b_128": Published("llama8b", Layout(shard=128), 2, memory="selective"),
    "bench_8b_64": Published("llama8b", Layout(shard=8, tensor=8), 12, memory="selective", overlapped=True),
    "bench_70b_256": Published("llama70b", Layout(shard=32, tensor=8), 16, precision="float8"),
    "bench_405b_512": llama405b(32, 8, shard=8, pipeline=8),
    "bench_405b_512_interleaved": llama405b(32, 8, shard=8, pipeline=8, schedule="Interleaved1F1B"),
    "bench_405b_512_mb32": llama405b(32, 32, shard=8, pipeline=8),
    "bench_405b_8192": llama405b(32, 32, shard=64, pipeline=16, schedule="Interleaved1F1B"),
    "bench_405b_16384": llama405b(16, 16, shard=128, pipeline=16, schedule="Interleaved1F1B"),
    "bench_405b_16384_long": llama405b(16, 16, 131_072, "Interleaved1F1B", shard=8, pipeline=16, context=16),
    "shipped_8b": Published("llama8b", Layout(shard=8), 1, memory="selective", compile="off"),
    "shipped_70b": Published("llama70b", Layout(shard=8, tensor=8), 8, compile="off"),
    "shipped_405b": Published("llama405b", Layout(shard=64, tensor=8), 2, overlapped=True, precision="float8"),
    "shipped_deepseek_16b": Published(
        "deepseek_v2_lite", Layout(shard=32, expert=8), 4, 4096, memory="selective", compile="off"
    ),
    "bench_deepseek_671b_512": Published(
        "deepseek_v3_671b",
        Layout(pipeline=8, shard=64, expert=32),
        16,
        4096,
        microbatches=16,
        schedule="Interleaved1F1B",
    ),
    "shipped_llama4_17b_16e": Published("llama4_17b_16e", Layout(shard=8, tensor=8, expert=8), 8, compile="off"),
    "shipped_llama4_17b_128e": Published(
        "llama4_17b_128e", Layout(pipeline=4, shard=8, tensor=8, expert=64), 4, microbatches=4, compile="off"
    ),
    **{
        f"bench_8b_long_{name}": Published(
            "llama8b", Layout(shard=shard, context=context), 1, length, precision="float8"
        )
        for name, (shard, context, length) in LONG.items()
    },
    **{
        f"bench_405b_long_{name}": llama405b(8, 8, length, shard=shard, context=context, pipeline=8)
        for name, (shard, context, length) in LONG.items()
    },
}


IDLE = {"bench_405b_512": 0.47, "bench_405b_512_interleaved": 0.30, "bench_405b_512_mb32": 0.18}
"""The share of a step in which a rank of the pipeline waits, as the files say."""


def recipe(name: str, *overrides: str) -> Run:
    return compose_test_run([f"recipe={name}", *overrides], remote=True)


QUICK = (
    "bench_405b_512", "shipped_70b", "shipped_deepseek_16b", "bench_deepseek_671b_512", "shipped_llama4_17b_128e",
    "bench_8b_long_128k", "bench_8b_long_256k",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", select_cases(PUBLISHED, QUICK))
def test_a_published_recipe_is_what_was_published(name: str) -> None:
    run, said = recipe(name), PUBLISHED[name]
    assert run.layout == said.layout
    assert run.cluster.nodes * 8 == said.layout.devices == run.layout.devices
    assert run.machine.name == "NVIDIA H100 80GB HBM3"
    assert run.training.global_batch == said.rows * said.layout.data_ranks * said.seq_len
    assert (run.rank_rows, run.training.seq_len, run.microbatches) == (said.rows, said.seq_len, said.microbatches)
    assert (run.optimizer.lr, run.schedule.warmup_steps(run.training.steps), run.training.steps) == said.training
    assert (run.parallelism.async_tensor, run.parallelism.schedule) == (said.overlapped, said.schedule)
    axes = ("model", "memory", "compile", "dataset", "precision", "checkpoint")
    expected = [said.model, said.memory, said.compile, "c4", said.precision, "off"]
    assert [run.choices[axis] for axis in axes] == expected
    assert run.staging.idle == pytest.approx(IDLE.get(name, run.staging.idle), abs=0.005)
    check_what_all_share(run)


def check_what_all_share(run: Run) -> None:
    """What holds of every published recipe of a family, and of all."""
    family = run.choices["model"].partition("_")[0]
    eps, schedule = {"llama4": (1e-15, "linear"), "deepseek": (1e-8, "cosine")}.get(family, (1e-8, "linear"))
    optimizer = {"betas": (0.9, 0.95), "eps": eps, "weight_decay": 0.1}
    assert {key: getattr(run.optimizer, key) for key in optimizer} == optimizer
    assert (run.training.clip_norm, run.choices["schedule"]) == (1.0, schedule)
    assert run.evaluation.tokens == run.metrics.sample_tokens == 0
    if run.model.expert_parameters(run.model.layers - 1):
        assert (run.model.bias_rate, run.model.balance_losses(), run.schedule.final_lr) == (0.001, {}, 0.1)
        assert run.dataset.mask_documents is (family == "deepseek")
        assert family != "deepseek" or run.model.rope_factor == 1
    else:
        assert (run.model.rope_theta, run.model.rope_factor, run.model.vocab) == (500_000.0, 8.0, 128_256)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout", "training", "schedule", "lr", "axes", "minutes"),
    [
        pytest.param(
            "train_1b", Layout(shard=8), Training(100_000, 2**20, seq_len=4096), WSD(warmup=2000), 5e-4,
            ["none", "block"], 30, id="1b",
        ),
        pytest.param(
            "train_8b", Layout(shard=64), Training(250_000, 2**22, seq_len=8192), WSD(warmup=2000), 3e-4,
            ["selective", "block"], 30, id="8b",
        ),
        pytest.param(
            "train_70b", Layout(shard=64, tensor=8),
            Training(250_000, 2**22, ((252_000_000, 2**23),), 8192), WSD(warmup=2000), 1.5e-4,
            ["full", "block"], 20, id="70b",
        ),
        pytest.param(
            "train_405b", Layout(pipeline=16, shard=16, tensor=8),
            Training(1_200_000, 2**22, ((252_000_000, 2**23), (2_870_000_000_000, 2**24)), 8192),
            Cosine(warmup=8000, final_lr=0.01),
            8e-5, ["full", "block"], 15, id="405b",
        ),
    ],
)  # fmt: skip
def test_a_recipe_for_training(
    name: str, layout: Layout, training: Training, schedule: Schedule, lr: float, axes: list[str], minutes: int
) -> None:
    run = recipe(name)
    assert (run.layout, run.optimizer.lr) == (layout, lr)
    assert dataclasses.asdict(run.training) == dataclasses.asdict(training)
    assert run.schedule == schedule
    assert [run.choices["memory"], run.choices["compile"]] == axes
    assert run.parallelism.resolve_reshard(run.layout) is (name not in ("train_1b", "train_405b"))
    saved = run.checkpoint
    assert (saved.mode, saved.every, saved.minutes, saved.keep, saved.keep_tokens) == ("async", 0, minutes, 2, 10**11)


def test_no_recipe_is_left_out() -> None:
    assert FILES["recipe"] == sorted([*PUBLISHED, "train_1b", "train_8b", "train_70b", "train_405b"])


ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \|(?:[^|]+\|){3} ([\d., ]+) \|", re.MULTILINE)
"""Recipes of a row, and the memory of each, or of all."""
ROWS = ROW.findall((CONF.parent / "docs" / "grids.md").read_text().partition("#### For training")[0])
DOCUMENTED = [pair for names, gib in ROWS for pair in zip(re.findall(r"\w+", names), cycle(gib.split(", ")))]


@pytest.mark.parametrize(("name", "gib"), [full(*row, id=row[0]) for row in DOCUMENTED])
def test_the_documented_memory_is_that_of_the_planner(name: str, gib: str) -> None:
    run = recipe(name)
    assert format_rounded(build_plan(run, run.layout, run.microbatches, run.machine).fullest.gib) == gib


def test_the_memory_of_every_published_recipe_is_documented() -> None:
    assert sorted(name for name, _ in DOCUMENTED) == sorted(PUBLISHED)


@pytest.mark.full
def test_a_recipe_yields_to_the_command_line_and_to_smaller_clusters() -> None:
    run = recipe("bench_8b_128", "cluster.nodes=2", "compile=off", "training.global_batch=262144")
    assert (run.layout, run.choices["compile"], run.rank_rows) == (Layout(shard=16), "off", 2)
    with pytest.raises(ConfigError, match="estimated memory is"):
        recipe("bench_70b_256", "cluster.nodes=1")


GRIDS = {
    "parallelism": ("parallelism", ["single", "ddp", "fsdp", "tp", "pp", "cp", "fsdp_tp", "3d"]),
    "memory": ("memory", ["none", "selective", "every_n", "full"]),
    "precision": ("precision", ["fp32", "bf16"]),
    "eight_bits": ("precision", ["bf16", "float8", "float8_rowwise", "float8_rowwise_hp"]),
    "optimizer": ("optimizer", ["adamw", "muon"]),
    "learning_rate": ("optimizer.lr", ["0.0003", "0.001", "0.003", "0.01"]),
    "batch_size": ("training.global_batch", ["1024", "2048", "4096"]),
    "experts": ("model", ["qwen3_debug", "qwen3_moe_debug"]),
    "branches": ("checkpoint.resume", [f"runs/trunk/checkpoints/step-{step}" for step in (200, 300)]),
}
"""What is varied in each grid, and how."""
LADDERS = ["ladder"]
"""Sweeps that are no grids: tests/sweep/test_ladder.py."""
SEVERAL = ["optimizers"]
"""Grids over several settings, each of them in the baseline or averaged over."""


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    select_cases([name for name in FILES["sweep"] if name not in ("branches", *LADDERS, *SEVERAL)], ("learning_rate",)),
)
def test_every_point_of_a_sweep_can_run(name: str, started: list[Run]) -> None:
    assert run_command(["-m", f"sweep={name}", "precision.emulate=true"], start.run_local) == 0
    axis, arms = GRIDS[name]
    points = [[f"{axis}={arm}", f"training.seed={seed}"] for arm in arms for seed in range(3)]
    assert [[o for o in run.overrides if o.partition("=")[0] in (axis, "training.seed")] for run in started] == points
    tokens = sum(run.training.total_tokens for run in started)
    assert tokens <= 2_000_000, "more than ten minutes at the 3,500 tokens a second of two slow cores"
    assert {run.checkpoint.mode for run in started} == {"off"}


@pytest.mark.full
def test_every_branch_of_the_sweep_decays(tmp_path: Path, started: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    train_run(
        compose_tiny_run(
            tmp_path / "trunk", "schedule.decay=0", "training.steps=2", "checkpoint.every=1", "checkpoint.keep=9"
        )
    )
    monkeypatch.chdir(tmp_path)
    steps = ",".join(f"{tmp_path}/trunk/checkpoints/step-{step}" for step in (1, 2))
    tiny_settings = [o for o in TINY if not o.startswith(("schedule", "checkpoint", "hydra.run.dir"))]
    line = ["-m", "sweep=branches", *tiny_settings, f"checkpoint.resume={steps}", "checkpoint.decay_steps=3"]
    assert run_command(line, start.run_local) == 0
    assert [run.training.steps for run in started] == [4, 5]


@pytest.mark.parametrize("name", [name for name in FILES["sweep"] if name not in (*LADDERS, *SEVERAL)])
def test_a_sweep_says_what_it_asks_and_its_baseline_is_one_of_its_arms(name: str) -> None:
    content = yaml.safe_load((CONF / "sweep" / f"{name}.yaml").read_text())
    assert content["sweep"]["question"].endswith("?")
    axis, arms = GRIDS[name]
    assert list(content["sweep"]["baseline"]) == [axis]
    assert content["sweep"]["baseline"][axis] in arms


@pytest.mark.full
def test_a_sweep_yields_to_the_command_line(started: list[Run]) -> None:
    line = ["-m", "sweep=precision", "training.seed=7", "training.steps=5", "model=qwen3_debug"]
    assert run_command(line, start.run_local) == 0
    assert [(r.precision.compute, r.training.seed, r.training.steps) for r in started] == [
        ("fp32", 7, 5), ("bf16", 7, 5),
    ]  # fmt: skip


@pytest.mark.full
def test_the_dense_twin_of_experts_differs_by_the_routers_only() -> None:
    point = yaml.safe_load((CONF / "sweep/experts.yaml").read_text())["model"]
    shape = [f"model.{name}={value}" for name, value in point.items()]
    dense, moe = (compose_test_run([f"model={name}", *shape]).model for name in GRIDS["experts"][1])
    routers = moe.layers * moe.dim * moe.experts
    assert moe.parameters() > 2 * dense.parameters()
    assert moe.active_parameters() - routers == dense.parameters() == dense.active_parameters()
    assert moe == compose_test_run(["model=qwen3_moe_debug"]).model


def test_no_sweep_is_left_out() -> None:
    assert sorted([*GRIDS, *LADDERS, *SEVERAL]) == FILES["sweep"]


@pytest.mark.parametrize("name", SEVERAL)
def test_the_baseline_of_a_sweep_over_several_settings_is_one_of_its_values(name: str) -> None:
    content = yaml.safe_load((CONF / "sweep" / f"{name}.yaml").read_text())
    params, baseline = content["hydra"]["sweeper"]["params"], content["sweep"]["baseline"]
    assert baseline and content["sweep"]["question"].endswith("?")
    assert all(str(value) in str(params[key]).split(",") for key, value in baseline.items())
    assert len(str(params["training.seed"]).split(",")) == 3
