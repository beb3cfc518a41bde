"""Kinds of operations and kernels, by their names. Free of numpy."""

from __future__ import annotations

import re
from functools import lru_cache

MATMULS, ATTENTION, RECOMPUTATION, OTHER, COPIES = "matmuls", "attention", "recomputation", "other kernels", "copies"
COMPUTATION = (RECOMPUTATION, ATTENTION, MATMULS, OTHER, COPIES)
"""Kinds of computation; where two run at once, the time counts for the first of them."""
DATA, HOST, IDLE = "waiting for data", "host", "idle"
_COLLECTIVES = {
    "reducescatter": "reduce-scatter", "allgather": "all-gather", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "broadcast": "broadcast", "sendrecv": "send and receive", "send": "send", "recv": "receive",
    "barrier": "barrier", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
_MESSAGES = {"send": "send and receive", "receive": "send and receive"}
COLLECTIVES = tuple(dict.fromkeys(_MESSAGES.get(kind, kind) for kind in _COLLECTIVES.values()))
"""Kinds of communication."""
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|flex_", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm)$|linear_pointwise|"
    r"titan::((low_)?grouped|float32)_",
    re.IGNORECASE,
)
_COPY = re.compile(r"^Mem(cpy|set)|aten::_to_copy|aten::copy_$", re.IGNORECASE)
_COMPILED = re.compile(r"^(## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction|triton_)")
_EXCHANGE = re.compile(r"^(c10d::|gloo:|nccl:|ncclDevKernel|ncclKernel|_c10d_functional|c10d_functional)")
_NO_WORK = re.compile(r"^(record_param_comms|aten::(empty|view|as_strided|detach|item|_local_scalar_dense)\b)")


def name_collective(name: str) -> str | None:
    """Return a collective or message in words, by any name that a library gives it; None for anything else."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for part, kind in _COLLECTIVES.items() if part in letters), None)


@lru_cache(65536)
def classify_collective(name: str) -> str | None:
    """Return the kind of a collective operation or kernel; None for anything else."""
    if not _EXCHANGE.match(name):
        return None
    kind = name_collective(name)
    return None if kind is None else _MESSAGES.get(kind, kind)


@lru_cache(65536)
def classify_kernel(name: str) -> str:
    """Return the kind of a GPU's kernel or copy."""
    if _ATTENTION.search(name):
        return ATTENTION
    if _MATMUL.search(name):
        return MATMULS
    return COPIES if _COPY.match(name) else OTHER


@lru_cache(65536)
def classify_operation(name: str) -> str | None:
    """Return the kind of an operation on the CPU; None for one that computes nothing itself, such as autograd's."""
    if _EXCHANGE.match(name) or _NO_WORK.match(name):
        return None
    if _COMPILED.match(name):
        return OTHER
    return classify_kernel(name) if "::" in name and not name.startswith("autograd::") else None
