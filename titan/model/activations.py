"""Activation memory of a decoder's parts on one rank: saved for backward, and at the peak of each pass. Free of torch.

Each size is a sum over the tensors that autograd saves, from their shapes; tests compare them with traces of real
steps. T tokens of a micro-batch, D hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RankBatch:
    """The part of a micro-batch that one rank computes.

    Attributes:
        tokens: T, the tokens of the rank's part of the rows; the same for all tensor-parallel ranks.
        bytes: bytes per activation element: 4 for float32, 2 for bfloat16.
        tensor: the tensor-parallel degree.
        sequence: whether sequence parallelism shards the residual stream.
        fused: whether a norm is one kernel, as on GPUs; else autograd saves two float32 tensors of each.
        compiled: whether a compiler fuses elementwise operations and recomputes them instead of saving their results.
        expert: ranks that share experts; each computes as many rows as it has, if the load is even.
        regather: whether regions of split matmuls save the rank's part of their input and gather it again in backward.
        one_row: whether the micro-batch is one row, which ranks gather without copies.
        recomputes_gates: whether a feed-forward layer's gated product is recomputed.
    """

    tokens: float
    bytes: int
    tensor: int = 1
    sequence: bool = True
    fused: bool = True
    compiled: bool = False
    expert: int = 1
    regather: bool = False
    one_row: bool = False
    recomputes_gates: bool = False

    @property
    def residual_tokens(self) -> float:
        """Tokens of the residual stream on the rank."""
        return self.tokens / self.tensor if self.sequence else self.tokens

    @property
    def has_fused_norms(self) -> bool:
        """Whether no float32 copy of a norm's input is saved."""
        return self.fused or self.compiled

    def count_norm_bytes(self, width: float) -> float:
        """Return bytes per token that autograd saves of an RMSNorm over `width` elements, without its output."""
        return (self.bytes * width if self.has_fused_norms else 8 * width) + 4

    def count_unweighted_norm_bytes(self, width: float, heads: float) -> float:
        """Return the same of norms without a weight of so many heads, which are `width` elements together."""
        return (self.bytes if self.has_fused_norms else 4) * width + 4 * heads

    def count_reduced_bytes(self, dim: int) -> float:
        """Return the bytes of the reduce-scatter after a rowwise-sharded linear layer."""
        return self.bytes * dim * self.residual_tokens if self.tensor > 1 else 0.0

    def count_swiglu_bytes(self, dim: int, ffn: int) -> LayerActivations:
        """Return the memory of SwiGLU: both projections, the gate's activation, the last projection's input.

        A compiler recomputes the gate's activation; the last projection's input is recomputed with `memory=gate`.
        """
        c, n, f = self.bytes, self.tokens, ffn / self.tensor
        saved = (2 if self.recomputes_gates else 3 if self.compiled else 4) * c * f * n
        return LayerActivations(saved, c * f * n + self.count_reduced_bytes(dim), c * (2 * f + dim) * n, 3)


class ContextBytes(NamedTuple):
    """Bytes per token that attention saves in addition under context parallelism, without and with selective
    checkpointing."""

    saved: float = 0.0
    selective: float = 0.0


NO_CONTEXT = ContextBytes()
INDEX_BYTES = 8
"""Bytes of the number of an expert, or of a row: int64."""


class BlockActivations(NamedTuple):
    """Bytes of one block.

    Attributes:
        input: its input, which is all that full checkpointing saves.
        saved: everything that autograd saves without checkpointing.
        selective: everything that selective checkpointing saves, input included.
        backward: the peak of its backward pass beyond what is saved.
        outputs: gradients of the outputs of its linear layers, from which weight gradients are computed.
        routing: the peak of its backward pass before there is a gradient of a weight, with experts; beyond what is
            saved.
        received: what grows with the rows that the rank's experts compute.
        routed: all that is saved for the experts of tokens.
    """

    input: float
    saved: float
    selective: float
    backward: float
    outputs: float
    routing: float = 0.0
    received: float = 0.0
    routed: float = 0.0


LOGIT_TERM_TENSORS, LOGIT_TERM_SAVED = 4, 2
"""Tensors as large as the logits, in float32, that a loss term of them needs at the peak, and saves for backward: those
of an entropy, which are log-probabilities, probabilities, and their gradients."""


class HeadActivations(NamedTuple):
    """Bytes of the final norm, the head and the loss: saved between both passes, at the peak of each, with what is
    saved, and in the backward pass of the final norm."""

    saved: float
    forward: float
    backward: float
    norm: float


class LayerActivations(NamedTuple):
    """Bytes of a part of a block, without the norm before it; see `BlockActivations`.

    Selective checkpointing saves the results of every other one of its `matmuls` linear layers.
    """

    saved: float
    selective: float
    outputs: float
    matmuls: int
