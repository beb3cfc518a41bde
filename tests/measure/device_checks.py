"""What the acceptance suite runs in other processes: `python -m tests.measure.device_checks NAME DEVICE [FILE]`.

    kernels      each attention kernel of a device against fp32 on the CPU
    recorder     what the Flight Recorder says of a device's collectives: one rank is enough to see the form of NCCL's

Hooks that disturb a run at a step follow: what a run does then is a part of the suite.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan.config.settings import setting
from titan.debug import rank_state
from titan.hooks.context import Context
from titan.hooks.schema import Hook

SHAPE = (2, 8, 256, 64)
"""Rows, heads, tokens and width of a head."""
PAIRS = 2
"""Heads of keys and values."""
ROUNDING = {"bf16": 2e-2, "fp32": 2e-3}
"""Largest relative errors of outputs and gradients; tensor cores compute fp32 matmuls with fewer bits where allowed."""
NO_TRITON = "triton is not installed"


def compare_kernels(device: str) -> None:
    """Print a line of JSON for each kernel and type: its error, or why it can't run."""
    from titan.model.attention import BACKENDS

    for name in (*BACKENDS, "flex"):
        for dtype_name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            found = {"kernel": name, "type": dtype_name, **_compare_kernel(name, dtype, torch.device(device))}
            print(json.dumps(found), flush=True)


def _compare_kernel(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    inputs = _make_inputs()
    reference = _run_attention("math", [x.clone().requires_grad_() for x in inputs])
    try:
        device_inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
        results = _run_attention(name, device_inputs)
    except (RuntimeError, NotImplementedError) as error:
        return {"refused": " ".join(str(error).split())[:200]}
    pairs = [(a.detach().float().cpu(), b.detach()) for a, b in zip(results, reference, strict=True)]
    errors = [float((result - right).norm() / right.norm()) for result, right in pairs]
    return {"error": float(torch.tensor(errors).max())}  # of NaN too


def _make_inputs() -> list[Tensor]:
    """Return query, key, value, and the gradient of the output; values that bf16 holds."""
    generator = torch.Generator().manual_seed(0)
    rows, _, tokens, width = SHAPE
    shapes = [SHAPE, (rows, PAIRS, tokens, width), (rows, PAIRS, tokens, width), SHAPE]
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def _run_attention(name: str, inputs: list[Tensor]) -> list[Tensor]:
    q, k, v, upstream = inputs
    out = _run_flex(q, k, v) if name == "flex" else _run_sdpa(name, q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), upstream.detach())]


def _run_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import sdpa_kernel

    from titan.model.attention import BACKENDS

    with sdpa_kernel(BACKENDS[name]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _run_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if q.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise NotImplementedError(NO_TRITON)

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=q.device)
    compute: Any = torch.compile(flex_attention) if q.device.type == "cuda" else flex_attention
    attended: Tensor = compute(q, k, v, block_mask=mask, enable_gqa=True)
    return attended


CYCLES = 2_000_000_000
"""Of the kernel that the last collective waits for: about a second."""


def record_collectives(device: str, file: str) -> None:
    """Write the recorder's content to a file, and print what titan reads in it as a line of JSON.

    Three collectives end, and on a GPU a fourth waits for a long kernel while the recorder is read.
    """
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for _ in range(3):
            dist.all_reduce(torch.ones(4, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            dist.all_reduce(torch.ones(4, device=device))
        content = rank_state.dump_recorder()
        dist.destroy_process_group()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_bytes(content)
    collectives = rank_state.read_collectives(content)
    found = {
        "entered": max(collectives.entered.values(), default=0),
        "completed": max(collectives.completed.values(), default=0),
        "pending": len(collectives.pending),
        "started": [{None: "not known", True: "yes", False: "no"}[each.started] for each in collectives.pending],
    }
    print(json.dumps(found))


@dataclass(frozen=True, kw_only=True)
class Disturbance(Hook):
    """Disturbs a step of one rank before the optimizer."""

    step: int = setting(1, "the step", at_least=1)
    rank: int = setting(0, "the rank", at_least=0)

    def build(self) -> Disturbance:
        """See `Hook`."""
        return self

    def before_optimizer(self, context: Context) -> None:
        """Act in the step and on the rank."""
        if context.step == self.step and context.rank == self.rank:
            self.act(context)

    def act(self, context: Context) -> None:
        """Disturb the step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StandStill(Disturbance):
    """Lets a rank sleep."""

    seconds: float = setting(10.0, "how long", above=0)

    def act(self, context: Context) -> None:
        """See `Disturbance`."""
        time.sleep(self.seconds)


@dataclass(frozen=True, kw_only=True)
class NotFinite(Disturbance):
    """Makes a gradient NaN."""

    def act(self, context: Context) -> None:
        """See `Disturbance`."""
        next(iter(context.named_gradients()))[1].mul_(math.nan)


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Disturbance):
    """Allocates memory on the device until there is none."""

    def act(self, context: Context) -> None:
        """See `Disturbance`."""
        allocations = []
        while True:
            allocations.append(torch.empty(1 << 30, dtype=torch.uint8, device=context.device))


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        compare_kernels(*sys.argv[2:])
    else:
        record_collectives(*sys.argv[2:])
