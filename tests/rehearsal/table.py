"""The commands of a rehearsal: what each runs, on how many devices, and what must come of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL = (
    "dataset=synthetic", "dataset.tokens=20000", "dataset.vocab=256", "model.vocab=256", "training.seq_len=64",
    "training.global_batch=512", "training.steps=3", "metrics.plot=false", "metrics.sample_tokens=0",
    "checkpoint=off", "evaluation=off", "compile=off",
)  # fmt: skip
DENSE = ("model=debug", "model.dim=64", "model.layers=4", "model.heads=4", "model.kv_heads=2", "model.ffn=128")
EXPERTS = (
    "model=qwen3_moe_debug", "model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.ffn=128",
    "model.head_dim=16", "model.expert_ffn=32",
)  # fmt: skip
FP32, BF16 = (*DENSE, "precision=fp32"), (*DENSE, "precision=bf16")
GENERATED = ("tokens=[1,2,3]", "max_tokens=4")
HALVES, PAIRS = (
    f"+parallelism.exchange._target_=experiments.expert_exchange.{name}" for name in ("halves.Halves", "pairs.Pairs")
)
SMALLER = "tests.rehearsal.smaller"
MASKED = (*FP32, "dataset.mask_documents=true")
MUON = (*FP32, "optimizer=muon")
REFERENCES: Mapping[str, tuple[str, ...]] = {
    "dense": (*FP32, "training.steps=6"),
    "experts": (*EXPERTS, "precision=fp32"),
    "experts in four layers": (*EXPERTS, "model.layers=4", "precision=fp32"),
    "masks": MASKED,
    "muon": (*MUON, "optimizer.newton_schulz=fp32"),
}
"""The settings whose fp32 losses a CPU computes for comparison, on one device."""


@dataclass(frozen=True)
class Rehearsed:
    """A command.

    Attributes:
        name: of it, and of its directory.
        arguments: its command line; {runs} is the folder of all runs' directories.
        module: what `python -m` runs; a run of titan.train gets the small settings, device and directory as well.
        devices: how many GPUs the machine has.
        like: the reference whose losses it must have.
        needs: the run that must be done before.
        waits: the places in titan where the host may wait within a step, as the documentation says.
        code: the exit code.
        environment: further variables; {port} is a free one.
        leaves: patterns of files that it must leave in the folder of all runs.
        says: a text that it must print.
        seconds: after which it is killed, and counts as failed.
    """

    name: str
    arguments: tuple[str, ...]
    module: str = "titan.train"
    devices: int = 1
    like: str | None = None
    needs: str | None = None
    waits: tuple[str, ...] = ()
    code: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    says: str = ""
    seconds: float = 1800.0

    def build_command(self, runs: Path) -> list[str]:
        """Return the arguments of the module."""
        arguments = [argument.replace("{runs}", str(runs)) for argument in self.arguments]
        if self.module != "titan.train":
            return arguments
        return [*SMALL, "cluster.device=cuda", f"hydra.run.dir={runs / self.folder}", *arguments]

    @property
    def folder(self) -> str:
        """The name of its directory."""
        return re.sub(r"\W+", "-", self.name)


def _define(name: str, devices: int, *settings: str, **options: Any) -> Rehearsed:
    return Rehearsed(name, (*FP32, *settings), devices=devices, like="dense", **options)


EXPERTS_WAIT = "titan/parallelism/expert.py"
"""Ranks exchange how many rows each expert gets (docs/experts.md)."""
LOOP_WAITS = "titan/model/expert_ops.py list_row_ranges"
"""In fp32 experts are computed one after another (docs/experts.md)."""
OFFLOAD_WAITS = ("titan/parallelism/norms.py", "titan/training/trainer.py Trainer._update")
"""The norm and the update are the host's (docs/memory.md)."""
SAVED = ("checkpoint=async", "checkpoint.every=1")
TRAINING = (
    _define("single", 1, "parallelism=single"),
    _define("fsdp", 2, "parallelism=fsdp", *SAVED),
    _define("ddp", 2, "parallelism=ddp", "parallelism.microbatches=2"),
    _define("hsdp", 4, "parallelism=hsdp", "parallelism.replicate=2"),
    _define("tp, resumed", 2, "parallelism=tp", "training.steps=6", "checkpoint.resume={runs}/fsdp", needs="fsdp"),
    _define("pp 1F1B", 2, "parallelism=pp", "parallelism.microbatches=4"),
    _define("pp ZBV", 2, "parallelism=pp", "parallelism.schedule=ZBVZeroBubble", "parallelism.microbatches=4"),
    _define("cp ring", 2, "parallelism=cp", "parallelism.context_method=ring"),
    _define("cp all-gather", 2, "parallelism=cp", "parallelism.context_method=allgather"),
    _define("3d", 8, "parallelism=3d"),
    _define("offload", 2, "parallelism=fsdp", "memory.offload=true", waits=OFFLOAD_WAITS),
    Rehearsed(
        "ep",
        (*EXPERTS, "precision=fp32", "parallelism=ep"),
        devices=2, like="experts", waits=(EXPERTS_WAIT, LOOP_WAITS),
    ),
    Rehearsed(
        "ep in halves", (*EXPERTS, "precision=fp32", "parallelism=ep", HALVES, "memory=full"),
        devices=2, like="experts", waits=(EXPERTS_WAIT, LOOP_WAITS),
    ),
    Rehearsed(
        "ep in pairs",
        (*EXPERTS, "model.layers=4", "precision=fp32", "parallelism=pp", "parallelism.shard=2", "parallelism.expert=2",
         "parallelism.schedule=DualPipeV", PAIRS, "parallelism.microbatches=4", "memory=full"),
        devices=4, like="experts in four layers", waits=(EXPERTS_WAIT, LOOP_WAITS),
    ),
    Rehearsed("ep, bf16", (*EXPERTS, "precision=bf16", "parallelism=ep"), devices=2, waits=(EXPERTS_WAIT,)),
    Rehearsed(
        "muon, async save", (*MUON, "optimizer.newton_schulz=fp32", *SAVED), like="muon",
        environment={"REHEARSAL_LAG": "2"},
    ),
    Rehearsed("muon, bf16", (*BF16, "optimizer=muon", "parallelism=fsdp"), devices=2),
    _define("ema, evaluation", 2, "parallelism=fsdp", "evaluation=ema", "evaluation.every=2", "evaluation.tokens=512"),
    Rehearsed("masks", MASKED, like="masks"),
    Rehearsed("bf16, flash attention", (*BF16, "parallelism=fsdp", "memory=full"), devices=2),
    Rehearsed("bf16, cp ring", (*BF16, "parallelism=cp", "parallelism.context_method=ring"), devices=2),
    _define("hooks", 1, "modules=[tests]", "+hooks.own={_target_:tests.support.own_hooks.Norms}"),
    Rehearsed("compile=auto", (*BF16, "compile=auto", "training.steps=2")),
)  # fmt: skip
BENCHES = (
    Rehearsed(
        "bench: speed",
        ("tests.measure", "suite=tiny", "case=bf16, compile off, bare", "rounds=1", "steps=1",
         "to={runs}/speed.json", "model.vocab=256", "training.seq_len=64"),
        SMALLER, leaves=("speed.json",), says="1 case: 0 skipped, 0 with a failed side",
    ),
    Rehearsed(
        "calibrate", ("titan.calibrate", "to={runs}/here.yaml"), SMALLER, 2,
        leaves=("here.yaml",), says="link_gb_per_second",
    ),
    Rehearsed(
        "bench: waits of the host", ("only=sync", *SMALL, *BF16, "cluster.device=cuda"), "tests.measure",
        says='{"location": "", "failure": ""}',
    ),
    Rehearsed(
        "bench: modes",
        ("suite=modes", "case=single: full, off", "to={runs}/modes.json", *SMALL, *BF16),
        "tests.measure", leaves=("modes.json",),
    ),
)  # fmt: skip
"""The longest first."""
COMMANDS = (
    Rehearsed(
        "profile with memory",
        (*BF16, "cluster=h100", "cluster.devices=1", "training.steps=4", "profile=memory", "profile.wait=1",
         "profile.warmup=1"),
        leaves=("profile-with-memory/debug/step-*-rank-0.pickle", "profile-with-memory/profile/*/*"),
    ),
    Rehearsed(
        "out of memory",
        (*BF16, "training.global_batch=4096", "parallelism.microbatches=1"),
        environment={"REHEARSAL_TAKEN_GIB": "79.62"}, code=1, says="out of memory",
        leaves=("out-of-memory/debug/out-of-memory-rank-0.pickle",),
    ),
    Rehearsed("generate", ("{runs}/fsdp", *GENERATED, "device=cuda"), "titan.generate", needs="fsdp"),
    Rehearsed(
        "generate, tp", ("{runs}/fsdp", *GENERATED, "parallelism.tensor=2"), "titan.generate", 2, needs="fsdp",
    ),
    Rehearsed("replay", ("{runs}/fsdp", "step=3"), "titan.replay", 2, needs="fsdp"),
    Rehearsed(
        "plan, traced",
        (*SMALL, *BF16, "cluster=h100", "parallelism=fsdp", "cluster.devices=8", "compile=auto", "plan.trace=true"),
        "titan.plan",
    ),
)  # fmt: skip
REFUSED = (
    Rehearsed(
        "refused: more ranks than GPUs", ("parallelism=fsdp", "cluster.devices=4"), devices=2, code=2,
        says="this machine has 2 x NVIDIA H100",
    ),
    Rehearsed(
        "refused: flash attention with masks in a ring",
        (*MASKED, "training.attention=flash", "parallelism=cp", "parallelism.context_method=ring"),
        devices=2, code=2, says="in a ring this kernel can't mask",
    ),
    Rehearsed(
        "refused: no visible GPU", DENSE, code=2, says="leaves no GPU visible",
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Rehearsed("refused: no GPU", DENSE, devices=0, code=2, says="send it to GPU nodes"),
    Rehearsed(
        "refused: a model too large", ("model=llama405b", "parallelism=fsdp"), devices=2, code=2,
        says="this machine has 2 x NVIDIA H100",
    ),
    Rehearsed(
        "no visible GPU, cluster.device=auto", (*DENSE, "cluster.device=auto", "training.steps=1"),
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    Rehearsed(
        "refused: generate on more GPUs", ("{runs}/fsdp", *GENERATED, "parallelism.tensor=2"), "titan.generate",
        needs="fsdp", code=2, says="this machine has 1 x NVIDIA H100",
    ),
    Rehearsed(
        "refused: generate without memory", ("{runs}/fsdp", "tokens=[1,2,3]", "max_tokens=100000"),
        "titan.generate", needs="fsdp", code=2, says="a larger parallelism.tensor",
        environment={"REHEARSAL_GIB": "0.1"},
    ),
    Rehearsed(
        "refused: calibrate on more GPUs", ("to={runs}/other.yaml", "ranks=3"), "titan.calibrate", 2, code=2,
        says="each rank needs one",
    ),
    Rehearsed(
        "failed: a rank without a GPU", DENSE, devices=2, code=1, says="GPUs and more ranks",
        environment={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "5", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": "{port}"},
    ),
)  # fmt: skip


def _define_acceptance(name: str, parts: str, **options: Any) -> Rehearsed:
    arguments = ("suite=acceptance", f"to={{runs}}/{name}", f"case={parts}", *ACCEPTED)
    return Rehearsed(f"acceptance: {name}", arguments, "tests.measure", **options)


ACCEPTED = (
    "cluster.device=cuda", "dataset=synthetic", "dataset.tokens=20000", *DENSE, "model.layers=2", "model.vocab=256",
    "training.seq_len=64", "training.global_batch=512", "compile=off",
)  # fmt: skip
ACCEPTANCE = (
    _define_acceptance("one device", "losses,attention,experts,not-finite,stands-still,preemption,profile,saves"),
    _define_acceptance("two devices", "layouts,hang", devices=2, waits=(EXPERTS_WAIT, LOOP_WAITS)),
    _define_acceptance(
        "out of memory", "out-of-memory", environment={"REHEARSAL_TAKEN_GIB": "76"}, says="holds   out-of-memory"
    ),
    # the prediction is an H100's, which this is not
    _define_acceptance("predicted", "predicted", code=1, says="per step are predicted"),
)
"""Parts of `make gpu`. Not here: `recorder`, which reads NCCL's, and `speeds`, which is long."""
TABLE = (*BENCHES, *ACCEPTANCE, *TRAINING, *COMMANDS, *REFUSED)
