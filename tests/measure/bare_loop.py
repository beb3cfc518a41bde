"""The baselines of titan's speed: the bare PyTorch loop, and the device's peak matmul and copy speeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan.calibration.measurements import time_in_a_row
from titan.compile.schema import Compile
from titan.dataset.corpora import build_mixture, prepare_corpora
from titan.dataset.loader import BatchShape, Loader
from titan.dataset.mixture import RowMixture
from titan.memory.checkpointing import checkpoint_blocks
from titan.model import init_weights, loss_terms
from titan.optimizer.update_factors import build_optimizer
from titan.parallelism.schema import DataShard
from titan.precision.low_precision import set_compute_dtype
from titan.run.run import Run


class BareLoop:
    """The shortest loop that trains the same model on the same rows, without logging, checks or data loading.

    Fused optimizer, torch's own clipping and compiling, rows preloaded on the device, no metrics read between steps.
    """

    def __init__(
        self, run: Run, mix: RowMixture, device: torch.device, preloaded: int = 8, autocast: bool = False
    ) -> None:
        """Build the loop.

        Args:
            preloaded: number of global batches that are loaded in advance and repeated.
            autocast: compute in the run's precision through torch.autocast instead of the model's own casts.
        """
        with torch.device("meta"):
            self.model: Any = run.model.build()
        if not autocast:
            set_compute_dtype(self.model, run.precision, run.precision.select_layers(run.model.matmuls()).quantized)
        loss_terms.set_head_loss(self.model.head, chunk=run.training.loss_chunk, cap=run.model.logit_cap)
        checkpoint_blocks(self.model.blocks(), run.memory)
        self.loss = self._compile_loss(run.compile)
        init_weights.materialise_model(self.model, self.model.initial(), run.training.seed, device)
        self.optimizer = build_optimizer(run.optimizer, run.model, self.model.named_parameters())
        self.batches = _preload(run, mix, device, preloaded)
        self.scale, self.clip, self.step = 1 / run.training.global_batch, run.training.clip_norm, 0
        self.cast = torch.autocast(device.type, run.precision.dtype, enabled=autocast)

    def _compile_loss(self, settings: Compile) -> Callable[[Tensor, Tensor], Any]:
        """Return the summed loss of tokens and targets, compiled: blocks and head, all as one graph, or not at all."""

        def compute_loss(x: Tensor, y: Tensor) -> Any:
            return self.model.head(self.model(x), y)

        if settings.scope == "block":
            for module in (*self.model.blocks(), self.model.head):
                module.compile(backend=settings.backend, fullgraph=True)
        return (
            torch.compile(compute_loss, backend=settings.backend, fullgraph=True)
            if settings.scope == "model"
            else compute_loss
        )

    def train_steps(self, count: int) -> None:
        """Train `count` steps."""
        for _ in range(count):
            tokens, targets = self.batches[self.step % len(self.batches)]
            for x, y in zip(tokens, targets, strict=True):
                with self.cast:
                    loss = self.loss(x, y) * self.scale
                loss.backward()
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1


def open_mixture(run: Run) -> RowMixture:
    """Return the rows of a run."""
    return build_mixture(run.dataset, run.training, prepare_corpora(run.dataset))


def open_loader(run: Run, mix: RowMixture) -> Loader:
    """Return the loader of a run on one device."""
    shape = BatchShape(run.microbatches, run.microbatch_rows, run.training.seq_len)
    return Loader(mix, run.training, DataShard(0, 1), shape)


def _preload(run: Run, mix: RowMixture, device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    with open_loader(run, mix) as loader:
        batches = [torch.from_numpy(next(loader).fields[:2]).to(device).long() for _ in range(count)]
    return [(tokens, targets) for tokens, targets in batches]


def measure_matmul_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the best speed of a square matmul of that size in TFLOP/s."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = a @ b
    return 2 * size**3 / time_in_a_row(lambda: torch.mm(a, b, out=out), device) / 1e12


def measure_float8_tflops(device: torch.device, size: int) -> float:
    """Return the best speed of a square float8 matmul with per-tensor scaling in TFLOP/s; CUDA only."""
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    unit_scale = torch.ones((), device=device)

    def matmul() -> Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    matmul()
    return 2 * size**3 / time_in_a_row(matmul, device) / 1e12
