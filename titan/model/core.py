"""Attention of one's own: what titan hands a core, and what a core states about itself.

A core is the part of attention between projections: the only one that mixes tokens. `titan.model.layers.Attention` and
the like compute queries, keys and values, and give them to their `core`. titan's own core, `CausalAttention`, is
replaced by other implementations of the same function; a core of one's own is called as it is, and its class states
which of its tokens a rank must have:

- `AttentionCore`: all tokens of a row. It can't be split by context parallelism, and generation computes whole rows.
- `KeyValueCore`: keys and values of more tokens than there are queries. Context parallelism gathers them, generation
  caches them.
- `RecurrentCore`: a state of all earlier tokens. Context parallelism hands it on from rank to rank, in the order of the
  row.

Each computes a head without the others, because tensor parallelism gives a rank some of the heads.

Shapes: B rows, H query and K key heads of width d (H / K query heads share a key head), T queries, S keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from titan.errors import ConfigError
from titan.model.masks import CoreInputs

GUIDE = "docs/models.md#your-own-attention"
"""Where users find what a core must state."""
State = tuple[Tensor, ...]
"""What a recurrent core knows of earlier tokens: tensors whose first dimension are the rows."""


class TitanCore(nn.Module):
    """An implementation of causal softmax attention that takes a mask."""


class AttentionCore(nn.Module):
    """An attention that needs whole rows; derive from it and define `attend`; a technique replaces `compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.compute: Callable[..., Tensor] = attend_rows

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Any:
        """Return what each query gets from the keys that it attends to.

        Args:
            q: [B, H, T, d], the queries; rotated, where the model has rotary embedding.
            k: [B, K, S, d], the keys.
            v: [B, K, S, d], the values.
            tokens: document ids and positions of queries and keys, int64 [1 or B, T] and [1 or B, S]. Keys of other
                documents and of later positions must have no influence: see `CoreInputs.find_visible`.

        Returns:
            [B, H, T, d].
        """
        raise NotImplementedError

    def count_flops(self, heads: int, width: int, seq_len: float) -> float:
        """Return FLOPs per token, forward and backward; a matrix product of [a, b] and [b, c] has 6 * a * b * c.

        titan's attention has 12 * heads * width * seq_len: its scores, and the values that they weigh.

        Args:
            heads: H, of the whole model.
            width: d.
            seq_len: tokens of a row, or of its documents.

        Raises:
            ConfigError: where a class does not define it.
        """
        raise ConfigError(
            f"model: its attention {type(self).__qualname__} does not state its FLOPs; define count_flops ({GUIDE})."
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        """Map q [B, H, T, d], k and v [B, K, T, d] of a row, or of this rank's part of it, to [B, H, T, d]."""
        return self.compute(self, q, k, v, tokens)


class KeyValueCore(AttentionCore):
    """An attention whose queries may be some of the tokens of its keys, such as a sliding window."""


class RecurrentCore(AttentionCore):
    """An attention that knows earlier tokens by a state, such as linear attention (arXiv:2006.16236)."""

    @abstractmethod
    def init_state(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """Return the state of no tokens, zeros: a tuple of tensors whose first dimension are the rows."""
        raise NotImplementedError

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs, state: State | None = None) -> Any:
        """Return what each query gets from its tokens and earlier ones, and the state for the tokens after them.

        Args:
            q: [B, H, T, d], of consecutive tokens.
            k: [B, K, T, d], of the same tokens.
            v: [B, K, T, d], of the same tokens.
            tokens: document ids and positions of these tokens. Tokens of other documents must have no influence.
            state: of the tokens before these, for the document of the first of these; zeros where it begins with it.

        Returns:
            [B, H, T, d], and the state of the last token's document.
        """
        raise NotImplementedError


def attend_rows(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Any:
    """Return the attention of whole rows, of a recurrent one from the state of no tokens."""
    if isinstance(core, RecurrentCore):
        return core.attend(q, k, v, tokens, core.init_state(q, k, v))[0]
    return core.attend(q, k, v, tokens)


class Cores(NamedTuple):
    """Which cores a model's blocks have: titan's or unknown ones, which take a mask, and some of one's own."""

    has_titan: bool
    has_own: bool


def find_cores(blocks: Iterable[nn.Module]) -> Cores:
    """Return which cores blocks have."""
    blocks = list(blocks)
    own = [any(isinstance(module, AttentionCore) for module in block.modules()) for block in blocks]
    has_titan = any(isinstance(module, TitanCore) for block in blocks for module in block.modules())
    return Cores(has_titan or not all(own), any(own))


def find_unknown(block: nn.Module, known: tuple[type[nn.Module], ...], is_required: bool = True) -> str | None:
    """Return the class of a block's attention that is neither titan's nor one of the classes `known`; None: all are.

    titan's own are known by their exact class: a class derived from one may compute another function. A module's
    `core` is attention whatever its class is; a block without any has attention that only its author knows, which
    counts if attention `is_required`.
    """
    own = (module for module in block.modules() if isinstance(module, AttentionCore))
    named = (child for module in block.modules() for name, child in module.named_children() if name == "core")
    titan = (module for module in block.modules() if isinstance(module, TitanCore))
    cores = [*own, *named, *titan]
    if not cores and is_required:
        return type(getattr(block, "attention", block)).__qualname__
    unknown = (
        type(core).__qualname__
        for core in cores
        if not isinstance(core, known)
        and not (isinstance(core, TitanCore) and type(core).__module__.startswith("titan."))
    )
    return next(unknown, None)


def iterate_cores(model: nn.Module) -> Iterator[AttentionCore]:
    """Yield the cores of one's own."""
    return (module for module in model.modules() if isinstance(module, AttentionCore))
