"""The parts of a block that are compiled, or recomputed, by themselves, where the block can't be as a whole.

A block is one part where one graph can hold it. Else its parts are attention with both norms, and of all other modules
the outermost ones that one graph can hold: of a mixture of experts whose tokens travel between ranks the router, the
experts and the shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from titan.model.experts import Experts, MoeBlock
from titan.model.layers import Block, FeedForward

ModuleTest = Callable[[nn.Module], bool]


class Part(NamedTuple):
    """A method of a block or of a module in it, with the modules that it calls; its name is empty for the block."""

    module: nn.Module
    method: str = "forward"
    name: str = ""

    def replace(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the method by what `wrap` makes of it."""
        setattr(self.module, self.method, wrap(getattr(self.module, self.method)))

    def list_modules(self) -> list[nn.Module]:
        """Return the modules that compute in the part."""
        outer = _list_attention_modules(self.module) if self.method == "attend" else [self.module]
        return [module for outermost in outer for module in outermost.modules()]


def is_one_part(parts: Sequence[Part]) -> bool:
    """Return whether the parts of a block are the block itself."""
    return [part.name for part in parts] == [""]


def list_parts(block: nn.Module, breaks: ModuleTest, has_hooks: ModuleTest = lambda module: False) -> list[Part]:
    """Return the parts of a block, in the order in which they compute.

    Args:
        breaks: whether no graph can hold a module, because the host decides something in it.
        has_hooks: whether something runs before and after a module that no graph can hold, as where FSDP gathers it.
    """
    return list(_iterate_parts(block, "", breaks, has_hooks))


def _iterate_parts(module: nn.Module, name: str, breaks: ModuleTest, has_hooks: ModuleTest) -> Iterator[Part]:
    if _fits_graph(module, breaks, has_hooks):
        if name == "" or any(True for _ in module.parameters()):
            yield Part(module, name=name)
        return
    attention = _list_attention_modules(module)
    if not all(_fits_graph(inner, breaks, has_hooks) and not has_hooks(inner) for inner in attention):
        attention = []
    if attention:
        yield Part(module, "attend", "attention")
    for inner_name, inner in module.named_children():
        if inner not in attention:
            yield from _iterate_parts(inner, f"{name}.{inner_name}".lstrip("."), breaks, has_hooks)


def _fits_graph(module: nn.Module, breaks: ModuleTest, has_hooks: ModuleTest) -> bool:
    """Return whether one graph can hold a module; hooks of the module itself are outside of it."""
    inner = [other for other in module.modules() if other is not module]
    computes = type(module).forward is not nn.Module.forward
    return computes and not breaks(module) and not any(breaks(other) or has_hooks(other) for other in inner)


def _list_attention_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules of `Block.attend`; none of a module that overrides it, or is not known to call it."""
    kind: Any = type(module)
    calls_attend = kind.forward in (Block.forward, MoeBlock.forward) and kind.attend is Block.attend
    return [module.attention_norm, module.attention, module.ffn_norm] if calls_attend else []  # type: ignore[list-item]


def find_gated_layers(block: nn.Module) -> list[Any]:
    """Return the feed-forward layers of a block that compute w2 of a gated product in their method `complete`.

    A class with another `forward` is not known to call it.
    """
    kinds: tuple[Any, ...] = (FeedForward, Experts)
    return [module for module in block.modules() if any(type(module).forward is kind.forward for kind in kinds)]
