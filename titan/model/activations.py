"""Activation memory of a decoder's parts on one rank: saved for backward, and at the peak of each pass. Free of torch.

Each size is a sum over the tensors that autograd saves, from their shapes; tests compare them with traces of real
steps. T tokens of a micro-batch, D hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class RankPart:
    """The part of a micro-batch that one rank computes.

    Attributes:
        tokens: T, the tokens of the rank's part of the rows; the same for all tensor-parallel ranks.
        bytes: bytes per activation element: 4 for float32, 2 for bfloat16.
        tensor: the tensor-parallel degree.
        sequence: whether sequence parallelism shards the residual stream.
        fused: whether a norm is one kernel, as on GPUs; else autograd saves two float32 tensors of each.
        compiled: whether a compiler fuses elementwise operations and recomputes them instead of saving their results.
        expert: ranks that share experts; each computes as many rows as it has, if the load is even.
    """

    tokens: float
    bytes: int
    tensor: int = 1
    sequence: bool = True
    fused: bool = True
    compiled: bool = False
    expert: int = 1

    @property
    def between(self) -> float:
        """Tokens of the residual stream on the rank."""
        return self.tokens / self.tensor if self.sequence else self.tokens

    @property
    def alone(self) -> RankPart:
        """The part of layers that are not split over tensor ranks, which compute their tokens between regions."""
        return replace(self, tokens=self.between, tensor=1)

    @property
    def norms_fused(self) -> bool:
        """Whether no float32 copy of a norm's input is saved."""
        return self.fused or self.compiled

    def norm(self, width: float) -> float:
        """Return bytes per token that autograd saves of an RMSNorm over `width` elements, without its output."""
        return (self.bytes * width if self.norms_fused else 8 * width) + 4

    def unweighted_norm(self, width: float, heads: float) -> float:
        """Return the same of norms without a weight of so many heads, which are `width` elements together."""
        return (self.bytes if self.norms_fused else 4) * width + 4 * heads

    def norm_backward(self, width: float) -> float:
        """Return bytes per token that its backward pass needs in addition."""
        return (2 * self.bytes if self.norms_fused else 16) * width


class ContextBytes(NamedTuple):
    """Bytes per token that attention saves in addition under context parallelism.

    Attributes:
        kept: without checkpointing.
        selective: with selective checkpointing.
    """

    kept: float = 0.0
    selective: float = 0.0


NO_CONTEXT = ContextBytes()
INDEX_BYTES = 8
"""Bytes of the number of an expert, or of a row: int64."""


class Block(NamedTuple):
    """Bytes of one block.

    Attributes:
        input: its input, which is all that full checkpointing saves.
        kept: everything that autograd saves without checkpointing.
        selective: everything that selective checkpointing saves, input included.
        backward: the peak of its backward pass beyond what is saved.
        outputs: gradients of the outputs of its linear layers, from which weight gradients are computed.
        routing: the peak of its backward pass before there is a gradient of a weight, with experts; beyond what is
            saved.
        received: what grows with the rows that the rank's experts compute.
        routed: all that is saved for the experts of tokens.
    """

    input: float
    kept: float
    selective: float
    backward: float
    outputs: float
    routing: float = 0.0
    received: float = 0.0
    routed: float = 0.0


READ, READ_KEPT = 4, 2
"""Tensors as large as the logits, in float32, that a loss term of them needs at the peak, and saves for backward: those
of an entropy, which are log-probabilities, probabilities, and their gradients."""


class Head(NamedTuple):
    """Bytes of the final norm, the head and the loss.

    Attributes:
        kept: saved between forward and backward.
        forward: the peak of the forward pass.
        backward: the peak of the backward pass, saved tensors included.
        norm: the backward pass of the final norm.
    """

    kept: float
    forward: float
    backward: float
    norm: float


class Part(NamedTuple):
    """Bytes of a part of a block, without the norm before it.

    Attributes:
        kept: saved without checkpointing.
        selective: saved with selective checkpointing.
        outputs: gradients of the outputs of its linear layers.
        matmuls: so many linear layers; selective checkpointing saves every other one's results.
    """

    kept: float
    selective: float
    outputs: float
    matmuls: int


def attention(
    share: RankPart,
    dim: int,
    queries: int,
    keys: int,
    heads: int,
    head_norms: bool = False,
    context: ContextBytes = NO_CONTEXT,
) -> Part:
    """Return the activation memory of attention: rotated queries and keys, values, the output and its log-sum-exp.

    Args:
        share: the part that the rank computes.
        dim: D.
        queries, keys: width of all queries, and of all keys.
        heads: query heads.
        head_norms: whether queries and keys are normalised.
        context: what context parallelism adds.
    """
    c, n, t = share.bytes, share.tokens, share.tensor
    q, k = queries / t, keys / t
    kept = (c * (2 * q + 2 * k) + 4 * heads / t + context.kept) * n
    if head_norms:
        kept += n * (share.norm(q) + share.norm(k))
    selective = (c * (q + k + q) + 4 * heads / t + context.selective) * n + _reduced(share, dim)
    return Part(kept, selective, c * (q + 2 * k + dim) * n, 4)


def latent_attention(
    share: RankPart,
    dim: int,
    heads: int,
    widths: tuple[int, int, int],
    latents: tuple[int | None, int],
    context: ContextBytes = NO_CONTEXT,
) -> Part:
    """Return the activation memory of latent attention (`titan.model.latent_attention`).

    Saved are latents and their norms, which are whole on each tensor rank; queries, keys, values that are padded to the
    width of keys, the output, its log-sum-exp, and the output without the padding.

    Args:
        share: the part that the rank computes.
        dim: D.
        heads: of queries, keys and values.
        widths: of a head: of its part without position, of its rotated part, and of its values.
        latents: widths of the latent of queries, None: there is none, and of that of keys and values.
        context: what context parallelism adds.
    """
    c, n, own = share.bytes, share.tokens, heads / share.tensor
    (plain, rotated, values), (rank, latent) = widths, latents
    of_queries = 0.0 if rank is None else share.norm(rank) + c * rank
    beside = c * rotated if share.norms_fused or c == 4 else 0.0  # the norm's input is a view of both
    of_latents = of_queries + share.norm(latent) + c * latent + beside
    width = plain + rotated
    unpadded = c * values * own if values < width else 0.0
    kept = of_latents + 4 * c * width * own + 4 * own + unpadded + context.kept
    queries = [width * own] if rank is None else [rank, width * own]
    linear = [*queries, latent + rotated, (plain + values) * own, dim]
    selective = c * (sum(linear[::2]) + width * own) + 4 * own + context.selective
    return Part(kept * n, selective * n + _reduced(share, dim), c * sum(linear) * n, len(linear))


def swiglu(share: RankPart, dim: int, ffn: int) -> Part:
    """Return the activation memory of SwiGLU: both projections, the gate's activation, the last projection's input.

    A compiler recomputes the gate's activation.

    Args:
        share: the part that the rank computes.
        dim: D.
        ffn: F.
    """
    c, n, f = share.bytes, share.tokens, ffn / share.tensor
    kept = (3 if share.compiled else 4) * c * f * n
    return Part(kept, c * f * n + _reduced(share, dim), c * (2 * f + dim) * n, 3)


class SharedExperts(NamedTuple):
    """Experts that compute every token, as one feed-forward layer.

    Attributes:
        width: their F together.
        split: whether tensor ranks split it; else each has it as a whole, for its tokens between regions.
    """

    width: int
    split: bool

    def gathers(self, share: RankPart) -> bool:
        """Return whether their input is gathered from tensor ranks."""
        return self.split and share.tensor > 1 and share.sequence

    def part(self, share: RankPart, dim: int) -> Part:
        """Return their activation memory, with their input where it is gathered."""
        found = swiglu(share if self.split else share.alone, dim, self.width)
        return found._replace(kept=found.kept + share.bytes * dim * share.tokens * self.gathers(share))


def _reduced(share: RankPart, dim: int) -> float:
    """Return the bytes of the reduce-scatter after a rowwise-sharded linear layer."""
    return share.bytes * dim * share.between if share.tensor > 1 else 0.0


def block(share: RankPart, dim: int, attention: Part, ffn: int) -> Block:
    """Return the activation memory of a pre-norm block of attention and SwiGLU.

    In addition to its parts it saves `RankPart.norm` of each norm, and its output, which tensor ranks all-gather.

    Args:
        share: the part that the rank computes.
        dim: D.
        attention: the block's attention.
        ffn: F.
    """
    c, n, s, t = share.bytes, share.tokens, share.between, share.tensor
    feed_forward, gradient = swiglu(share, dim, ffn), c * dim * s
    norms = 2 * share.norm(dim) * s + 2 * c * dim * n
    gates = c * n * max(2 * ffn / t, ffn / t + (dim if t > 1 and share.sequence else 0))
    norm = share.norm_backward(dim) * s - feed_forward.kept
    return Block(
        gradient,
        norms + attention.kept + feed_forward.kept,
        gradient + attention.selective + feed_forward.selective,
        gradient + max(gates, norm, c * dim * n),
        attention.outputs + feed_forward.outputs,
    )


class RoutedExperts(NamedTuple):
    """Experts that compute the tokens which a router sends to them.

    Attributes:
        total: E.
        chosen: K.
        width: F.
        scale_inputs: whether scores scale their inputs, not their outputs.
    """

    total: int
    chosen: int
    width: int
    scale_inputs: bool = False


def moe_block(
    share: RankPart, dim: int, attention: Part, experts: RoutedExperts, shared: SharedExperts | None = None
) -> Block:
    """Return the activation memory of a pre-norm block of attention and a mixture of experts (`titan.model.experts`).

    Tensor ranks compute their tokens of the residual stream with whole experts. Saved per token by the router: its
    input, scores, the experts in order of their scores, and the weights of the chosen ones; per chosen expert: the
    places before and after sorting, the sorted row, what SwiGLU saves, and the output in float32, which the gradient of
    its weight needs; the gradient of a score that scales inputs needs these instead. Backward computes shared experts
    first.

    Args:
        share: the part that the rank computes.
        dim: D.
        attention: the block's attention.
        experts: those of some tokens.
        shared: those of every token.
    """
    c, s, width, inputs = share.bytes, share.between, experts.width, experts.scale_inputs
    rows, gradient = experts.chosen * s, c * dim * s
    each = Part(0.0, 0.0, 0.0, 0) if shared is None else shared.part(share, dim)
    norms = 2 * share.norm(dim) * s + c * dim * share.tokens
    router = ((c if share.compiled else 4) * dim + (4 + INDEX_BYTES) * experts.total + 8 * experts.chosen + 4) * s
    if c < 4 and not share.compiled and (inputs or (shared is not None and not shared.gathers(share))):
        router += c * dim * s  # the input, not only in float32
    weighed = 0.0 if inputs else (c if share.compiled else 4) * dim * rows
    gates = (3 if share.compiled else 4) * c * width * rows
    places = (2 if share.expert == 1 else 4) * INDEX_BYTES * rows
    kept = norms + attention.kept + router + places + c * dim * rows + gates + weighed + each.kept
    exchanged = 2 * c * dim * rows if share.expert > 1 else 0.0
    scores = 4 * experts.total * s
    # every other matmul, of the router, w1, w3, w2 and the shared experts in this order
    saved = scores if attention.matmuls % 2 == 0 else c * dim * rows if shared is not None else 0.0
    selective = gradient + attention.selective + saved + c * width * rows + exchanged + each.selective
    done = gradient * (shared is not None) - each.kept
    of_sum = (0 if c == 4 else 4) * dim * s
    of_rows = (c * dim if share.compiled or inputs else 8 * dim) * rows
    of_shared = 0.0 if shared is None else c * 2 * shared.width * s
    routing = max(gradient + of_sum + of_rows + done, gradient + of_shared)
    backward = gradient + c * (2 * width + dim) * rows - weighed + done
    outputs = attention.outputs + c * (2 * width + dim) * rows + scores + each.outputs
    received = c * dim * rows + gates
    routed = received + places + weighed + each.kept
    return Block(gradient, kept, selective, backward, outputs, routing, received + exchanged, routed)


def head(
    share: RankPart,
    dim: int,
    vocab: int,
    *,
    parts: bool,
    chunk: int | None,
    terms: bool = False,
    whole: bool = False,
    capped: bool = False,
) -> Head:
    """Return the activation memory of the final norm, the head and the cross-entropy.

    Args:
        share: the part that the rank computes.
        dim: D.
        vocab: V.
        parts: whether tensor-parallel ranks compute the loss from sharded logits (loss parallel).
        chunk: tokens whose logits exist at a time; None: all.
        terms: whether there are loss terms next to cross-entropy; from statistics of the logits, which need no more.
        whole: whether a term reads the logits themselves, all of them on every tensor-parallel rank.
        capped: whether logits are soft-capped.
    """
    c, n, s, t = share.bytes, share.tokens, share.between, share.tensor
    fused, more = terms or capped, 4 if capped else 0  # as titan.model.loss_terms.Objective computes it
    norm, hidden = share.norm(dim) * s, c * dim * n
    last = norm + (share.norm_backward(dim) + c * dim) * s
    if chunk is not None:
        gradients = hidden + c * vocab * dim / t
        logits = min(chunk, n) * vocab / t * ((12 + more if fused else 4) + c % 4)
        logits += _read(min(chunk, n) * vocab, t) * whole
        peak = norm + 2 * hidden + (4 + c) * vocab * dim / t + logits
        return Head(norm + gradients, peak, norm + 2 * gradients, last)
    if fused:
        logits = n * vocab / t
        peak = norm + hidden + (8 + more) * logits + _read(n * vocab, t) * whole
        return Head(norm + hidden + 4 * logits + 4 * READ_KEPT * n * vocab * whole, peak, peak, last)
    cut = t > 1 and parts
    logits = n * vocab / (t if cut else 1)
    kept = norm + hidden + (8 if cut else 4) * logits
    forward = norm + hidden + ((12 if cut else 8) + c % 4) * logits
    return Head(kept, forward, norm + hidden + (16 if cut else 12) * logits, last)


def _read(logits: float, tensor: int) -> float:
    """Return the bytes at the peak that a term of whole logits adds, from their number; gathering takes its part."""
    return 4 * (READ + 1 - 1 / tensor) * logits
