"""Attention by blocks of keys: which kernel, and what it is given. GPUs' kernels run as far as a CPU goes: fake tensors
check arguments against torch's schemas and shapes, and stand-ins compute what they would, under the same terms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.composing import compose_test_run
from tests.support.machines import make_detector
from tests.support.tiers import full
from titan.cluster import devices
from titan.errors import ConfigError
from titan.model import attention
from titan.parallelism import context_kernels
from titan.parallelism.context_kernels import LSE_MULTIPLE, KeyMask
from titan.training import build

EXACT = 1e-5  # law 3
ATEN = torch.ops.aten
ROWS, HEADS, PAIRS, WIDTH = 2, 4, 2, 16
SCALE = 0.4  # of scores; by default it is WIDTH**-0.5
GPU_KERNELS = ("flash", "cudnn", "efficient")


# --- which kernel


def torchs_choice(capability: tuple[int, int]) -> Any:
    """What torch would answer on a GPU: the first in order that can, by the conditions of its sdp_utils.cpp."""

    def can(kernel: SDPBackend, q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
        half, width = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
        if kernel == SDPBackend.CUDNN_ATTENTION:
            return half and width % 8 == 0 and width <= 128
        if kernel == SDPBackend.FLASH_ATTENTION:
            return half and width <= 256 and mask is None and capability >= (8, 0)
        if kernel == SDPBackend.EFFICIENT_ATTENTION:
            return width % (8 if half else 4) == 0
        return True

    def choose(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **how: Any) -> int:
        assert q.device.type == "cuda"
        enabled = {
            SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
            SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
        }
        order = [SDPBackend(n) for n in torch._C._get_sdp_priority_order()]
        for kernel in order:
            if enabled.get(kernel) and can(kernel, q, k, attn_mask):
                return int(kernel.value)
        raise RuntimeError("no kernel")

    return choose


BF16, FP32 = "bf16", "fp32"
TABLE = [
    # capability, choice, type, width, documents, method; the kernel
    full((9, 0), "auto", BF16, 128, False, "ring", "cudnn"),
    full((9, 0), "auto", BF16, 128, False, "allgather", "cudnn"),
    ((10, 0), "auto", BF16, 128, False, "ring", "cudnn"),
    full((9, 0), "auto", BF16, 256, False, "ring", "flash"),
    full((9, 0), "auto", BF16, 20, False, "ring", "math"),  # torch pads heads for its flash kernel; blocks don't
    ((9, 0), "auto", FP32, 128, False, "ring", "efficient"),
    full((9, 0), "auto", FP32, 6, False, "ring", "math"),
    full((8, 0), "auto", BF16, 128, False, "ring", "flash"),
    full((7, 5), "auto", BF16, 128, False, "ring", "efficient"),
    full((9, 0), "flash", BF16, 128, False, "ring", "flash"),
    full((9, 0), "math", BF16, 128, False, "ring", "math"),
    full((8, 0), "cudnn", BF16, 64, False, "allgather", "cudnn"),
    full((9, 0), "flex", BF16, 128, False, "ring", "flex"),
    full((9, 0), "auto", BF16, 128, True, "ring", "flex"),
    full((9, 0), "auto", BF16, 128, True, "allgather", "flex"),
    full((9, 0), "auto", BF16, 128, True, "ulysses", "flex"),
    full((8, 0), "auto", BF16, 128, True, "ring", "flex"),
    ((9, 0), "auto", BF16, 8, True, "ring", "math"),  # flex takes no heads as narrow
    full((9, 0), "auto", BF16, 8, True, "allgather", "cudnn"),  # with a mask of tokens by tokens
    full((9, 0), "math", BF16, 128, True, "ring", "math"),
    ((9, 0), "flash", BF16, 128, True, "ring", None),
    ((9, 0), "flash", BF16, 128, True, "allgather", None),
    full((9, 0), "cudnn", FP32, 128, False, "ring", None),
]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "choice", "dtype", "width", "documents", "method", "kernel"), TABLE)
def test_the_kernel_of_blocks(
    capability: tuple[int, int],
    choice: str,
    dtype: str,
    width: int,
    documents: bool,
    method: str,
    kernel: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "detect_machine", make_detector("gpu"))
    monkeypatch.setattr("titan.run.resolve.importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "_fused_sdp_choice", torchs_choice(capability))
    monkeypatch.setattr(attention, "document_mask", lambda ids, dtype: ids.new_empty(1, 1, 128, 128, dtype=dtype))
    overrides = ["parallelism=cp", "cluster.devices=2", "cluster.memory_gib=1e6", f"training.attention={choice}"]
    overrides += [f"precision={dtype}", f"model.head_dim={width}", f"dataset.mask_documents={documents}"]
    overrides += [f"parallelism.context_method={method}"]
    world: Any = SimpleNamespace(device=torch.device("cuda"), layout=SimpleNamespace(context=2))
    expectation = nullcontext() if kernel else pytest.raises(ConfigError, match=f"training.attention={choice}")
    with expectation, FakeTensorMode():
        assert build._choose_attention_kernel(compose_test_run(overrides), world) == kernel


# --- what kernels are given


class Calls(TorchDispatchMode):
    """The arguments and results of attention's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in func._schema.name:
            self.seen.append((func._schema.name, args, out))
        return out


def inputs(queries: int, keys: int, make: Callable[..., Tensor] = torch.randn) -> tuple[Tensor, Tensor]:
    """q and kv, cut out of longer ones and with the strides that a decoder gives them."""
    q, kv = make(ROWS, queries + 7, HEADS, WIDTH), make(2, ROWS, keys + 5, PAIRS, WIDTH)
    return q.transpose(1, 2)[:, :, 7:], kv.transpose(2, 3)[:, :, :, :keys]


@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize(("queries", "keys"), [(50, 50), (50, 96), (64, 32)])
def test_arguments_and_shapes(kernel: str, queries: int, keys: int) -> None:
    causal = queries == keys
    with Calls() as calls:
        q, kv = inputs(queries, keys, partial(torch.empty, dtype=torch.bfloat16, device="meta"))
        out, lse = context_kernels._run_kernel(kernel, q, *kv, causal, None)
        merged = torch.empty(ROWS, HEADS, queries + 3, device="meta")[:, :, 3:]
        grad = torch.empty(ROWS, queries, HEADS, WIDTH, dtype=q.dtype, device="meta").transpose(1, 2)
        grads = context_kernels._differentiate_kernel(kernel, (grad, q, out, merged), *kv, causal, None)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [g.shape for g in grads] == [q.shape, kv[0].shape, kv[1].shape]
    (forward, _, _), (backward, given, _) = calls.seen
    name = f"aten::_scaled_dot_product_{kernel}_attention"
    assert (forward, backward) == (name, name + "_backward")
    stats = next(x for x in given[4:8] if isinstance(x, Tensor) and x.dtype == torch.float32)
    padded = queries + -queries % LSE_MULTIPLE
    shape = {"cudnn": (queries, 1), "efficient": (padded,), "flash": (queries,)}[kernel]
    assert stats.shape == (ROWS, HEADS, *shape)
    assert stats.is_contiguous()


def stand_ins() -> SimpleNamespace:
    """Operations of GPUs that compute by the CPU's and take and give what those take and give."""
    cpu = ATEN._scaled_dot_product_flash_attention_for_cpu
    back = ATEN._scaled_dot_product_flash_attention_for_cpu_backward

    def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: None, stats: bool, *rest: Any, scale: float) -> Any:
        assert stats
        assert all(x.is_contiguous() for x in (q, k, v))
        out, lse = cpu(q, k, v, *rest, scale=scale)
        return out.contiguous(), lse.contiguous()[..., None], None

    def cudnn_back(*arguments: Any, scale: float) -> Any:
        grad, q, k, v, out, lse, seed, offset, *rest = arguments
        assert all(x.is_contiguous() for x in (grad, q, k, v, out, lse))
        assert (seed.shape, offset.shape, lse.shape) == ((), (), (*q.shape[:3], 1))
        bias, cum_q, cum_k, longest_q, longest_k, dropout, causal = rest
        assert (bias, cum_q, cum_k, longest_q, longest_k) == (None, None, None, q.shape[2], k.shape[2])
        return back(grad, q, k, v, out, lse[..., 0], dropout, causal, scale=scale)

    def efficient(q: Tensor, k: Tensor, v: Tensor, bias: None, stats: bool, *rest: Any, scale: float) -> Any:
        assert stats
        assert q.shape[1] == k.shape[1] == v.shape[1]  # it knows no groups
        out, lse = cpu(q, k, v, *rest, scale=scale)
        return out, F.pad(lse, (0, -q.shape[2] % LSE_MULTIPLE), value=torch.inf), None, None

    def efficient_back(*arguments: Any, scale: float) -> Any:
        grad, q, k, v, _, out, lse, *rest = arguments
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape[2] == q.shape[2] + -q.shape[2] % LSE_MULTIPLE
        assert (lse[:, :, q.shape[2] :] == torch.inf).all()
        _, _, dropout, wanted, causal = rest
        assert wanted == [True, True, True, False]
        return *back(grad, q, k, v, out, lse[:, :, : q.shape[2]], dropout, causal, scale=scale), None

    return SimpleNamespace(
        _scaled_dot_product_cudnn_attention=cudnn,
        _scaled_dot_product_cudnn_attention_backward=cudnn_back,
        _scaled_dot_product_efficient_attention=efficient,
        _scaled_dot_product_efficient_attention_backward=efficient_back,
    )


def parts(kernel: str, q: Tensor, kv: Tensor, grad: Tensor) -> list[Tensor]:
    """Causal attention to s keys of the last t tokens, put together from two blocks, and its gradients."""
    before = kv.shape[3] - q.shape[2]
    own, past = (kv[:, :, :, before:], KeyMask(causal=True)), (kv[:, :, :, :before], KeyMask(causal=False))
    out, lse = context_kernels.init_merge(*context_kernels.forward(kernel, q, *own, SCALE))
    context_kernels.merge_block(out, lse, *context_kernels.forward(kernel, q, *past, SCALE))
    state = (grad, q, out.to(q.dtype), lse)
    last, first = (context_kernels.backward(kernel, state, *block, SCALE) for block in (own, past))
    return [out, lse, last[0] + first[0], *(torch.cat(pair, 2) for pair in zip(first[1:], last[1:], strict=True))]


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "math"])
def test_blocks_by_each_kernel_make_the_same_whole(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv = inputs(50, 96)
    grad = torch.randn(ROWS, 50, HEADS, WIDTH).transpose(1, 2)
    expected = parts("flash", q, kv, grad)
    if kernel != "math":
        monkeypatch.setattr(context_kernels, "_ATEN", stand_ins())
    for ours, exact in zip(parts(kernel, q, kv, grad), expected, strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).abs().max() <= EXACT * exact.abs().max()


def test_documents_need_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of documents are never dropped, whatever the kernel."""
    q, kv = inputs(50, 50)
    ids = (torch.arange(50)[None].expand(ROWS, -1) // 20,) * 2
    by_flash, by_formula = (context_kernels.forward(k, q, kv, KeyMask(causal=True, ids=ids)) for k in ("flash", "math"))
    assert torch.equal(by_flash[0], by_formula[0])
    assert not torch.equal(by_flash[0], context_kernels.forward("flash", q, kv, KeyMask(causal=True))[0])


def test_names_are_those_of_the_setting() -> None:
    assert {*GPU_KERNELS, "math"} == set(attention.BACKENDS)
