"""Counts of a model of one's own, from its module on meta: what its schema does not count itself.

titan's schemas count in closed form. A class that derives from one inherits counts of titan's blocks, which are wrong
where its own blocks have other parameters or other attention. So each method of `BUILT` that no class outside of titan
defines becomes that of `BuiltCounts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from titan.model.counts import DecoderCounts, Matmul

BUILT = ("kind", "block_matmuls", "block_matmul_parameters", "block_parameters", "parameter_names", "attention_flops")
"""The methods of a schema that may count from its module."""


@dataclass(frozen=True)
class BuiltBlock:
    """A block of the module.

    Attributes:
        parameters: elements of each parameter, by name.
        kind: equal for blocks with the same classes of modules, shapes and costs.
        matmuls: linear layers of titan, by the name of their module in the block.
        matmul_parameters: elements of all matrices that multiply tokens, also those of torch's layers.
        cores: its attention of one's own, of `titan.model.core.AttentionCore`.
        own: the classes of its modules that are neither titan's nor torch's.
    """

    parameters: Mapping[str, int]
    kind: str
    matmuls: Mapping[str, Matmul]
    matmul_parameters: int
    cores: tuple[Any, ...]
    own: tuple[str, ...]


class BuiltCounts:
    """Methods of a schema that count from its module."""

    def kind(self: Any, layer: int) -> str:
        """Return the kind of a block; see `DecoderCounts.kind`."""
        return describe_blocks(self)[layer].kind

    def block_matmuls(self: Any, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of a block by the name of their module in it."""
        return dict(describe_blocks(self)[layer].matmuls)

    def block_matmul_parameters(self: Any, layer: int = 0) -> int:
        """Return the parameters of one block's matrices."""
        return describe_blocks(self)[layer].matmul_parameters

    def block_parameters(self: Any, layer: int = 0) -> int:
        """Return the exact number of parameters of one block."""
        return sum(describe_blocks(self)[layer].parameters.values())

    def parameter_names(self: Any) -> tuple[str, ...]:
        """Return the names of all parameters; a tied weight once, under the embedding's name."""
        outer = DecoderCounts.parameter_names(self)
        blocks = (f"layers.{i}.{name}" for i, block in enumerate(describe_blocks(self)) for name in block.parameters)
        return (outer[0], *blocks, *(name for name in outer[1:] if not name.startswith("layers.")))

    def attention_flops(self: Any, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of a block's attention: what its cores state, else those of titan's attention."""
        if cores := describe_blocks(self)[layer].cores:
            return float(sum(core.count_flops(self.heads, self.head_size, seq_len) for core in cores))
        owners = (c for c in type(self).__mro__ if is_titan_class(c) and "attention_flops" in vars(c))
        return float(vars(next(owners))["attention_flops"](self, seq_len, layer))


def is_titan_class(kind: type) -> bool:
    """Return whether a class is one of titan's."""
    return kind.__module__.startswith("titan.")


def list_own_modules(schema: Any) -> tuple[str, ...]:
    """Return the classes of modules in blocks whose activations and time plans take to be those of titan's modules.

    There are none where a class outside of titan counts activations itself.
    """
    owners = [c for c in type(schema).__mro__ if "block_activations" in vars(c)]
    if is_titan_class(type(schema)) or not is_titan_class(owners[0]):
        return ()
    return tuple(dict.fromkeys(name for block in describe_blocks(schema) for name in block.own))


def use_built_counts(kind: type) -> None:
    """Let a schema's class outside of titan count from its module what it does not count itself."""
    for name in BUILT:
        owner = next(c for c in kind.__mro__ if name in vars(c))
        if is_titan_class(owner):
            setattr(kind, name, vars(BuiltCounts)[name])


class Identity:
    """A schema as a key: its fields need not be hashable."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.schema is self.schema


def describe_blocks(schema: Any) -> tuple[BuiltBlock, ...]:
    """Return the blocks of a schema's module, which is built on meta once."""
    return _describe_blocks(Identity(schema))


@lru_cache(maxsize=32)
def _describe_blocks(key: Identity) -> tuple[BuiltBlock, ...]:
    import torch

    with torch.device("meta"):
        model = key.schema.build()
    return tuple(_describe_block(model, int(number)) for number in model.layers)


def _describe_block(model: Any, layer: int) -> BuiltBlock:
    from torch import nn

    from titan.model.core import AttentionCore
    from titan.model.experts import ExpertLinear, Router
    from titan.model.layers import Linear

    block = model.layers[str(layer)]
    try:
        plan: Mapping[str, str] = model.block_plan(layer)
    except AttributeError:  # one that declares no plan is not split, see `titan.model.module_checks`
        plan = {}
    modules: dict[str, Any] = dict(block.named_modules())
    matrices = [m for m in modules.values() if isinstance(m, nn.Linear | ExpertLinear | Router)]
    classes = ",".join(f"{name}:{type(module).__qualname__}" for name, module in modules.items())
    names = (f"{type(module).__module__}.{type(module).__qualname__}" for module in modules.values())
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    cores = tuple(module for module in modules.values() if isinstance(module, AttentionCore))
    costs = [core.count_flops(1, 1, 2**20) for core in cores]
    return BuiltBlock(
        {name: parameter.numel() for name, parameter in block.named_parameters()},
        f"{classes} {shapes} {costs}",
        {
            name: Matmul(module.in_features, module.out_features, plan.get(name) == "rowwise")
            for name, module in modules.items()
            if isinstance(module, Linear) and type(module).forward is Linear.forward
        },
        sum(module.weight.numel() for module in matrices),
        cores,
        tuple(name for name in names if not name.startswith(("titan.", "torch."))),
    )
