"""Bytes that a decoder's parts keep for the backward pass, and take while it goes on, on one rank. Free of torch.

Each is a sum over the tensors that PyTorch's autograd saves, by their shapes; tests hold them against traces of real
steps. T tokens of a micro-batch, D hidden width, F width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Share:
    """What a rank computes of a micro-batch.

    Attributes:
        tokens: T, of the rank's part of the rows; tensor ranks have the same ones.
        bytes: of an activation: 4 for float32, 2 for bfloat16.
        tensor: ranks that share each product.
        sequence: whether they hold parts of the sequence between products.
        fused: whether a norm is one kernel, as on GPUs; else autograd keeps two float32 tensors of each.
        compiled: whether a compiler fuses what is cheap, and computes it again rather than keep it.
    """

    tokens: int
    bytes: int
    tensor: int = 1
    sequence: bool = True
    fused: bool = True
    compiled: bool = False

    @property
    def between(self) -> float:
        """Tokens of the residual stream."""
        return self.tokens / self.tensor if self.sequence else self.tokens

    @property
    def norms_fused(self) -> bool:
        """Whether of a norm's input no copy is kept."""
        return self.fused or self.compiled

    def norm(self, width: float) -> float:
        """Bytes that autograd keeps a token of the RMSNorm of `width` elements, its output not included."""
        return (self.bytes * width if self.norms_fused else 8 * width) + 4

    def norm_backward(self, width: float) -> float:
        """Bytes a token that its backward pass takes beside that."""
        return (2 * self.bytes if self.norms_fused else 16) * width


class Block(NamedTuple):
    """Bytes of one block.

    Attributes:
        input: what comes in: all that is kept where the block is computed again.
        kept: all that autograd keeps.
        selective: what selective checkpointing keeps, the input included.
        backward: the most that its backward pass takes beside what is kept.
        outputs: gradients of the results of its products, from which those of weights are computed.
    """

    input: float
    kept: float
    selective: float
    backward: float
    outputs: float


class Head(NamedTuple):
    """Bytes of the final norm, the head and the loss.

    Attributes:
        kept: what is there between forward and backward.
        forward: the most that the forward pass takes.
        backward: the most that the backward pass takes, what is kept included.
        norm: what the backward pass takes when it has come to the final norm.
    """

    kept: float
    forward: float
    backward: float
    norm: float


def block(
    share: Share, dim: int, queries: int, keys: int, heads: int, ffn: int, head_norms: bool = False, core: float = 0.0
) -> Block:
    """A pre-norm block of attention and SwiGLU.

    A token: in each norm what `Share.norm` says; its output, which tensor ranks gather; rotated queries and keys,
    values, attention's output and log-sum-exp; of SwiGLU both products, the gate's activation and their product. A
    compiler computes the gate's activation again.

    Args:
        share: what the rank computes.
        dim: D.
        queries, keys: width of all queries, and of all keys.
        heads: query heads.
        ffn: F.
        head_norms: whether queries and keys are normalised.
        core: bytes a token that attention keeps besides, in a row that ranks share.
    """
    c, n, s, t = share.bytes, share.tokens, share.between, share.tensor
    q, k, f = queries / t, keys / t, ffn / t
    norms = 2 * share.norm(dim) * s
    inputs = 2 * c * dim * n
    attention = (c * (2 * q + 2 * k) + 4 * heads / t + core) * n
    if head_norms:
        attention += n * (share.norm(q) + share.norm(k))
    feed_forward = (3 if share.compiled else 4) * c * f * n
    selective = c * dim * s + (c * (q + k + f + q) + 4 * heads / t) * n
    if t > 1:  # the sum over ranks behind each of the two products whose inputs are cut
        selective += 2 * c * dim * s
    gradient = c * dim * s
    swiglu = c * n * max(2 * f, f + (dim if t > 1 and share.sequence else 0))
    norm = share.norm_backward(dim) * s - feed_forward
    backward = gradient + max(swiglu, norm, c * dim * n)
    outputs = c * (q + 2 * k + 2 * f + 2 * dim) * n
    return Block(gradient, norms + inputs + attention + feed_forward, selective, backward, outputs)


def head(share: Share, dim: int, vocab: int, *, parts: bool, chunk: int | None) -> Head:
    """The final norm, the head and the cross-entropy.

    Args:
        share: what the rank computes.
        dim: D.
        vocab: V.
        parts: whether tensor ranks compute the loss from their parts of the logits.
        chunk: tokens whose logits exist at a time; None: all.
    """
    c, n, s, t = share.bytes, share.tokens, share.between, share.tensor
    norm, hidden = share.norm(dim) * s, c * dim * n
    last = norm + (share.norm_backward(dim) + c * dim) * s
    if chunk is not None:
        gradients = hidden + c * vocab * dim / t
        logits = min(chunk, n) * vocab / t * (4 + c % 4)
        peak = norm + 2 * hidden + (4 + c) * vocab * dim / t + logits
        return Head(norm + gradients, peak, norm + 2 * gradients, last)
    cut = t > 1 and parts
    logits = n * vocab / (t if cut else 1)
    kept = norm + hidden + (8 if cut else 4) * logits
    forward = norm + hidden + ((12 if cut else 8) + c % 4) * logits
    return Head(kept, forward, norm + hidden + (16 if cut else 12) * logits, last)
