"""Planted bit flips, and checks of clean replicas; `tests.measure.bit_flip_table` prints what is found."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.runs import RankOutcome, compose_tiny_run, train_run
from titan.checkpoint.manager import collect_compared, compare_replicas
from titan.checkpoint.state import train_state_dict
from titan.parallelism.norms import local_tensor
from titan.run.run import Run
from titan.training.trainer import Trainer

EVERY = 4
"""Steps between saves, and between audits."""
HEADS = "model.kv_heads=2"
MOE = ("model=qwen3_moe_debug", "model.experts=4", "model.kv_heads=2")
LAYOUTS = {
    "ddp2": ("parallelism=ddp",),
    "ddp3": ("parallelism=ddp", "cluster.devices=3"),
    "fsdp2": ("parallelism=fsdp",),
    "tp2": (HEADS, "parallelism=tp"),
    "cp2": ("parallelism=cp",),
    "hsdp4": ("parallelism=hsdp", "parallelism.replicate=2", "parallelism.shard=2"),
    "fsdp_tp": (HEADS, "parallelism=fsdp_tp"),
    "pp2 tied": ("parallelism=pp", "model.tied=true"),
    "ep4": (*MOE, "model.bias_rate=0.01", "parallelism=fsdp", "cluster.devices=4", "parallelism.expert=2"),
}


@dataclass(frozen=True)
class Flip:
    """A flipped bit.

    Attributes:
        kind: "weights", "optimizer" or "activations".
        layout: one of `LAYOUTS`.
        where: part of a tensor's name in a checkpoint, or of a module's.
        rank: the one with the fault.
        step: after which it is flipped; of activations, from which on one is flipped in every pass.
        settings: further overrides.
        named: the ranks that have to be named: the faulty one, or where nobody can decide, those that differ.
    """

    kind: str
    layout: str
    where: str
    rank: int
    step: int
    named: tuple[int, ...]
    settings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What is planted where."""
        return " ".join((self.kind, self.layout, self.where, *self.settings))

    @property
    def found_by(self) -> int:
        """The step whose save or audit has to find it."""
        return -(-self.step // EVERY) * EVERY


ASYNC, BF16, PURE = ("checkpoint=async",), ("precision=bf16",), ("precision=bf16_pure",)
FLIPS = (
    Flip("weights", "ddp2", "layers.0.attention.wq", 1, 2, (0, 1)),
    Flip("weights", "ddp3", "layers.1.feed_forward", 1, 3, (1,)),
    Flip("weights", "ddp3", "tok_embeddings", 2, 5, (2,), ASYNC),
    Flip("weights", "ddp3", "head.weight", 0, 4, (0,), PURE),
    Flip("weights", "hsdp4", "layers.0.attention.wo", 3, 4, (1, 3)),
    Flip("weights", "tp2", "layers.1.attention_norm", 1, 3, (0, 1)),
    Flip("weights", "fsdp_tp", "layers.0.ffn_norm", 2, 2, (2, 3)),
    Flip("weights", "pp2 tied", "tok_embeddings", 1, 4, (0, 1)),
    Flip("weights", "ep4", "router.bias", 2, 4, (2,)),
    Flip("optimizer", "ddp3", "layers.0.attention.wk.weight.exp_avg", 2, 4, (2,)),
    Flip("optimizer", "ddp3", "norm.weight.exp_avg_sq", 1, 4, (1,), ASYNC),
    Flip("optimizer", "ddp2", "layers.1.attention.wv.weight.step", 0, 3, (0, 1)),
    Flip("optimizer", "hsdp4", "layers.1.feed_forward.w2.weight.exp_avg", 0, 4, (0, 2)),
    Flip("optimizer", "cp2", "layers.1.attention.wv.weight.step", 1, 4, (0, 1)),
    Flip("optimizer", "ddp3", ".ema", 1, 4, (1,), ("evaluation.ema=0.9",)),
    Flip("activations", "ddp2", "layers.0", 1, 5, (0, 1)),
    Flip("activations", "ddp3", "layers.1", 2, 2, (2,)),
    Flip("activations", "fsdp2", "tok_embeddings", 0, 3, (0, 1), BF16),
    Flip("activations", "hsdp4", "layers.0.feed_forward", 1, 6, (1,)),
    Flip("activations", "fsdp_tp", "layers.1.attention", 3, 4, (1, 3)),
    Flip("activations", "ep4", "layers.0", 2, 1, (0, 2)),
)  # fmt: skip


def plant(flip: Flip, trainer: Trainer) -> None:
    """Let a rank's trainer have the fault; for `train_run`."""
    if trainer.world.rank_info.rank != flip.rank:
        return
    generator = random.Random(flip.title)
    if flip.kind == "activations":
        stage = trainer.train_step.stages[0]
        module = next(m for n, m in stage.model.named_modules() if n.startswith(flip.where))
        module.register_forward_hook(partial(_flip_output, flip, trainer, generator))
        return
    done: list[str] = []

    def flip_state(step: int) -> None:
        if step == flip.step and not done:
            compared = collect_compared(train_state_dict(trainer.train_step), trainer.train_step)
            prefix = "optimizer." if flip.kind == "optimizer" else "model."
            names = [n for n in compared.tensors if n.startswith(prefix) and flip.where in n]
            done.append(names[0])
            flip_bit(local_tensor(compared.tensors[names[0]]), generator)

    saving: Any = trainer.saving
    save, wait = saving.save, saving.wait_for_staging

    def flip_and_save(step: int, rows: int) -> None:
        flip_state(step)
        save(step, rows)

    def wait_and_flip() -> None:  # before the update of the step that follows
        wait()
        flip_state(trainer.step - 1)

    saving.save, saving.wait_for_staging = flip_and_save, wait_and_flip


def _flip_output(flip: Flip, trainer: Trainer, generator: random.Random, module: nn.Module, args: Any, out: Any) -> Any:
    """Flip one bit of what a module returns."""
    if trainer.step < flip.step:
        return None
    hidden, *rest = out if isinstance(out, tuple) else (out,)
    changed = hidden.clone()
    flip_bit(changed.detach(), generator)
    return (changed, *rest) if rest else changed


def flip_bit(tensor: Tensor, generator: random.Random) -> None:
    """Flip a random bit of a random element, in place."""
    element = tensor.view(-1)[generator.randrange(tensor.numel()) :][:1]
    as_bytes = element.view(torch.uint8)
    bit = generator.randrange(8 * len(as_bytes))
    as_bytes[bit // 8] ^= 1 << bit % 8


@dataclass(frozen=True)
class Finding:
    """What became of a flip: the step at which the run ended and the ranks that were named; None: it was not found."""

    step: int | None
    named: tuple[int, ...]
    sentence: str


def find_flip(flip: Flip, directory: Path) -> Finding:
    """Train with a fault until it is found, or twice as long as that may take."""
    audited = flip.kind == "activations"
    settings = [f"checkpoint.every={EVERY}", f"debug.audit={EVERY if audited else 0}", "training.steps=12"]
    overrides = [*LAYOUTS[flip.layout], *settings, "parallelism.microbatches=2", *flip.settings]
    overrides = [o for o in overrides if not ("microbatches" in o and flip.layout == "pp2 tied")]
    run = compose_tiny_run(directory, *overrides, "training.global_batch=192")
    outcomes: list[RankOutcome] = train_run(run, partial(plant, flip))
    sentences = {outcome.failure for outcome in outcomes}
    assert len(sentences) == 1, sentences
    sentence = sentences.pop() or ""
    match = re.match(r"step (\d+).*?: ranks? ([\d, ]+) \(", sentence)
    return Finding(int(match[1]), tuple(map(int, match[2].split(", "))), sentence) if match else Finding(None, (), "")


def is_found(flip: Flip, finding: Finding) -> bool:
    """Whether a flip was found in time, and the right ranks were named."""
    return finding.step == flip.found_by and finding.named == flip.named


def compare_every_step(trainer: Trainer) -> list[bool]:
    """Compare the replicas after each update of a run; gives whether they differed; for `train_run`."""
    found: list[bool] = []
    train_step, saving = trainer.train_step, trainer.saving

    def compare(*_: Any) -> None:
        state = train_state_dict(train_step)
        manifest = saving._build_manifest(trainer.step, trainer.rows)
        found.append(compare_replicas(train_step, trainer.world, state, manifest) is not None)

    train_step.optimizer.register_step_post_hook(compare)
    return found


def check_clean(layout: str, checks: int, directory: Path, *overrides: str) -> tuple[int, int]:
    """Train so many steps without a fault; returns the number of checks, and of alarms."""
    audits = [] if layout in ("tp2", "cp2", "pp2 tied") else ["debug.audit=1"]
    settings = (*LAYOUTS[layout], *audits, "checkpoint=off", f"training.steps={checks}", "training.global_batch=64")
    run: Run = compose_tiny_run(directory, *settings, *overrides)
    outcomes = train_run(run, compare_every_step, timeout=3600)
    alarms = sum(outcomes[0].extra) + sum(outcome.failure is not None for outcome in outcomes)
    return len(outcomes[0].extra), alarms
