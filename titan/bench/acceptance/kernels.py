"""Each attention kernel of a device against fp32 on the CPU: `python -m titan.bench.acceptance.kernels DEVICE`."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import torch
from torch import Tensor

SHAPE = (2, 8, 256, 64)
"""Rows, heads, tokens and width of a head."""
PAIRS = 2
"""Heads of keys and values."""
ROUNDING = {"bf16": 2e-2, "fp32": 2e-3}
"""Largest relative errors of outputs and gradients; tensor cores compute fp32 matmuls with fewer bits where allowed."""
NO_TRITON = "triton is not installed"


def main(device: str) -> int:
    """Print a line of JSON for each kernel and type: its error, or why it can't run."""
    for name in (*_list_sdpa_kernels(), "flex"):
        for dtype_name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            print(
                json.dumps({"kernel": name, "type": dtype_name, **_compare_kernel(name, dtype, torch.device(device))}),
                flush=True,
            )
    return 0


def _list_sdpa_kernels() -> tuple[str, ...]:
    from titan.model.attention import BACKENDS

    return tuple(BACKENDS)


def _compare_kernel(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    inputs = _make_inputs()
    reference = _run_attention("math", [x.clone().requires_grad_() for x in inputs])
    try:
        device_inputs = [x.to(device, dtype).requires_grad_() for x in inputs]
        results = _run_attention(name, device_inputs)
    except (RuntimeError, NotImplementedError) as error:
        return {"refused": " ".join(str(error).split())[:200]}
    errors = [_compute_error(a.detach().float().cpu(), b.detach()) for a, b in zip(results, reference, strict=True)]
    return {"error": float(torch.tensor(errors).max())}  # of NaN too


def _make_inputs() -> list[Tensor]:
    """Return query, key, value, and the gradient of the output; values that bf16 holds."""
    generator = torch.Generator().manual_seed(0)
    rows, _, tokens, width = SHAPE
    shapes = [SHAPE, (rows, PAIRS, tokens, width), (rows, PAIRS, tokens, width), SHAPE]
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def _run_attention(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Return output and gradients of causal attention."""
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


def _compute_error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).norm() / reference.norm())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
