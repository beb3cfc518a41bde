"""Count the memory traffic of a layer of experts, without its matmuls, operation by operation; no device is needed.

It is that of eager code, on meta tensors: each operation reads its inputs and writes its results. A row that is copied
or added is read as often as that, however often it is in a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.measure.features import Overhead
from titan.estimate.operations import derive_speeds
from titan.estimate.plan import resolve_hardware
from titan.run.compose import compose_run

if TYPE_CHECKING:
    from collections.abc import Callable

MATMULS = ("aten::mm", "titan::grouped_product", "titan::grouped_weight_grad", "titan::float32_product")
GATHERS = ("aten::index_select", "aten::index", "aten::gather")
"""Operations that read as many bytes of their first input as they write."""
ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::new_empty")


@dataclass(frozen=True)
class LayerShape:
    """A layer of experts and its tokens: qwen3_30b_a3b with four rows of 4,096 tokens.

    Attributes:
        tokens: N.
        dim: D.
        width: F.
        experts: E.
        top_k: K.
    """

    tokens: int = 16384
    dim: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8

    @property
    def forward_flops(self) -> float:
        """FLOPs of the experts' matmuls in a forward pass; a backward pass has twice as many."""
        return 6.0 * self.tokens * self.top_k * self.dim * self.width


@dataclass
class PassTraffic:
    """Bytes by operation, and the number of kernels."""

    bytes: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes of all operations."""
        return sum(self.bytes.values())


CLUSTER = ("cluster=h100", "cluster.devices=1", "checkpoint=off", "name=x")
"""The device whose data sheet the times follow."""


def compare_traffic(text: str, shape: LayerShape | None = None) -> Iterator[Overhead]:
    """Yield the time of the traffic relative to that of the experts' matmuls, of each pass whose title has a text.

    Traffic moves at the bandwidth of the data sheet, and matmuls take their FLOPs at the fitted fraction of the peak.

    Args:
        text: part of a title.
        shape: the layer; None: the default.
    """
    shape = shape or LayerShape()
    titles = [f"traffic / matmuls, {name}" for name in ("forward", "backward")]
    if not any(text in title for title in titles):
        return
    run = compose_run(CLUSTER, remote=True)
    hardware = resolve_hardware(run.cluster, run.machine)
    matmul = derive_speeds(hardware, 1, dtype="bf16", kernel="flash").matmul
    bandwidth = 1e9 * hardware.require_figure("memory_gb_per_second", "the time of memory-bound operations")
    for passes, (title, traffic) in enumerate(zip(titles, count_layer_traffic(shape), strict=True), 1):
        seconds = passes * shape.forward_flops / matmul
        if text in title:
            yield Overhead(title, seconds, (traffic.total / bandwidth / seconds,))


def count_layer_traffic(shape: LayerShape) -> tuple[PassTraffic, PassTraffic]:
    """Return the traffic of the forward and of the backward pass of a layer in bfloat16."""
    import torch

    from titan.model.experts import MixtureOfExperts, Router

    with torch.device("meta"):
        layer = MixtureOfExperts(shape.dim, shape.width, Router(shape.dim, shape.experts, shape.top_k))
        layer.to(torch.bfloat16).router.init_buffers("meta")
        x = torch.empty(1, shape.tokens, shape.dim, dtype=torch.bfloat16, requires_grad=True)
        results: list[Any] = []
        forward = _count_traffic(lambda: results.extend(layer(x)))
        upstream = torch.empty_like(x)
        backward = _count_traffic(lambda: results[0].backward(upstream))
    return forward, backward


def _count_traffic(run: Callable[[], Any]) -> PassTraffic:
    """Return the traffic of the operations that a function calls."""
    from torch.utils._python_dispatch import TorchDispatchMode

    traffic = PassTraffic()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            _add_operation(traffic, func._schema, [*args, *(kwargs or {}).values()], out)
            return out

    with Counting():  # type: ignore[no-untyped-call]
        run()
    return traffic


def _add_operation(traffic: PassTraffic, schema: Any, arguments: list[Any], out: Any) -> None:
    """Add an operation's bytes, unless it is a matmul, a view or an allocation.

    A product of rows that may have padding behind them sets that to zero, in one pass over its result.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    inputs, outputs = ([t for t in tree_leaves(values) if isinstance(t, Tensor)] for values in (arguments, out))
    storages = {t.untyped_storage()._cdata for t in inputs}
    is_view = not schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in outputs)
    if schema.name == "titan::grouped_product" and not arguments[-1]:
        traffic.bytes["padding"] += 2 * out.nbytes
        traffic.kernels["padding"] += 1
    if is_view or schema.name in (*MATMULS, *ALLOCATIONS):
        return
    read = [outputs[0], *inputs[1:]] if schema.name in GATHERS else inputs
    traffic.bytes[schema.name] += sum(t.nbytes for t in (*read, *outputs))
    traffic.kernels[schema.name] += 1
