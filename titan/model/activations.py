"""Activation memory of a decoder's parts on one rank: saved for backward, and at the peak of each pass. Free of torch.

Each size is a sum over the tensors that autograd saves, from their shapes; tests compare them with traces of real
steps. T tokens of a micro-batch, D hidden width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    def saved_input_tokens(self) -> float:
        """Tokens of a region's input that autograd saves."""
        return self.residual_tokens if self.regather else self.tokens

    def count_regather_bytes(self, dim: int, outputs: float) -> float:
        """Return the bytes of gradients of a region's input and first products, with the input and a copy.

        `outputs` is the width of the outputs of its first matmuls together, on this rank.
        """
        return self.bytes * (outputs + (2 if self.one_row else 3) * dim) * self.tokens if self.regather else 0.0

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

    def count_norm_backward_bytes(self, width: float) -> float:
        """Return bytes per token that its backward pass needs in addition."""
        return (2 * self.bytes if self.has_fused_norms else 16) * width


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


def count_attention_bytes(
    batch: RankBatch,
    dim: int,
    queries: int,
    keys: int,
    heads: int,
    head_norms: bool = False,
    context: ContextBytes = NO_CONTEXT,
) -> LayerActivations:
    """Return the activation memory of attention: rotated queries and keys, values, the output and its log-sum-exp.

    `queries` and `keys` are the widths of all query heads, and of all key heads, together.
    """
    c, n, t = batch.bytes, batch.tokens, batch.tensor
    q, k = queries / t, keys / t
    saved = (c * (2 * q + 2 * k) + 4 * heads / t + context.saved) * n
    if head_norms:
        saved += n * (batch.count_norm_bytes(q) + batch.count_norm_bytes(k))
    selective = (c * (q + k + q) + 4 * heads / t + context.selective) * n + _count_reduced_bytes(batch, dim)
    return LayerActivations(saved, selective, c * (q + 2 * k + dim) * n, 4)


def count_latent_attention_bytes(
    batch: RankBatch,
    dim: int,
    heads: int,
    widths: tuple[int, int, int],
    latents: tuple[int | None, int],
    context: ContextBytes = NO_CONTEXT,
) -> LayerActivations:
    """Return the activation memory of latent attention (`titan.model.deepseek_v3`).

    Saved are latents and their norms, which are whole on each tensor rank; queries, keys, values that are padded to the
    width of keys, the output, its log-sum-exp, and the output without the padding.

    Args:
        heads: of queries, keys and values.
        widths: of a head: of its part without position, of its rotated part, and of its values.
        latents: widths of the latent of queries, None: there is none, and of that of keys and values.
    """
    c, n, local_heads = batch.bytes, batch.tokens, heads / batch.tensor
    (nope, rope, values), (rank, latent) = widths, latents
    query_bytes = 0.0 if rank is None else batch.count_norm_bytes(rank) + c * rank
    view_bytes = c * rope if batch.has_fused_norms or c == 4 else 0.0  # the norm's input is a view of both
    latent_bytes = query_bytes + batch.count_norm_bytes(latent) + c * latent + view_bytes
    width = nope + rope
    unpadded_bytes = c * values * local_heads if values < width else 0.0
    saved = latent_bytes + 4 * c * width * local_heads + 4 * local_heads + unpadded_bytes + context.saved
    queries = [width * local_heads] if rank is None else [rank, width * local_heads]
    linear = [*queries, latent + rope, (nope + values) * local_heads, dim]
    selective = c * (sum(linear[::2]) + width * local_heads) + 4 * local_heads + context.selective
    return LayerActivations(
        saved * n, selective * n + _count_reduced_bytes(batch, dim), c * sum(linear) * n, len(linear)
    )


def count_swiglu_bytes(batch: RankBatch, dim: int, ffn: int) -> LayerActivations:
    """Return the activation memory of SwiGLU: both projections, the gate's activation, the last projection's input.

    A compiler recomputes the gate's activation; the last projection's input is recomputed with `memory=gate`.
    """
    c, n, f = batch.bytes, batch.tokens, ffn / batch.tensor
    saved = (2 if batch.recomputes_gates else 3 if batch.compiled else 4) * c * f * n
    return LayerActivations(saved, c * f * n + _count_reduced_bytes(batch, dim), c * (2 * f + dim) * n, 3)


class SharedExperts(NamedTuple):
    """Experts that compute every token, as one feed-forward layer.

    Attributes:
        width: their F together.
        split: whether tensor ranks split it; else each has it as a whole, for its tokens between regions.
    """

    width: int
    split: bool

    def count_bytes(self, batch: RankBatch, dim: int) -> LayerActivations:
        """Return their activation memory, with their input where it is saved as it is gathered from tensor ranks."""
        whole = replace(batch, tokens=batch.residual_tokens, tensor=1)  # layers between regions compute these tokens
        activations = count_swiglu_bytes(batch if self.split else whole, dim, self.width)
        saves_gathered_input = self.split and batch.tensor > 1 and batch.sequence and not batch.regather
        return activations._replace(saved=activations.saved + batch.bytes * dim * batch.tokens * saves_gathered_input)


def _count_reduced_bytes(batch: RankBatch, dim: int) -> float:
    """Return the bytes of the reduce-scatter after a rowwise-sharded linear layer."""
    return batch.bytes * dim * batch.residual_tokens if batch.tensor > 1 else 0.0


def count_block_bytes(batch: RankBatch, dim: int, attention: LayerActivations, ffn: int) -> BlockActivations:
    """Return the activation memory of a pre-norm block of attention and SwiGLU.

    In addition to its parts it saves `RankBatch.count_norm_bytes` of each norm, and its output, which tensor ranks
    all-gather: the rank's part of it, or all.
    """
    c, n, s, t = batch.bytes, batch.tokens, batch.residual_tokens, batch.tensor
    feed_forward, gradient = count_swiglu_bytes(batch, dim, ffn), c * dim * s
    norms = 2 * batch.count_norm_bytes(dim) * s + 2 * c * dim * batch.saved_input_tokens
    gates = c * n * max(2 * ffn / t, ffn / t + (dim if t > 1 and batch.sequence else 0))
    norm = batch.count_norm_backward_bytes(dim) * s - feed_forward.saved
    return BlockActivations(
        gradient,
        norms + attention.saved + feed_forward.saved,
        gradient + attention.selective + feed_forward.selective,
        gradient + max(gates, norm, c * dim * n, batch.count_regather_bytes(dim, 2 * ffn / t) - feed_forward.saved),
        attention.outputs + feed_forward.outputs,
    )


class RoutedExperts(NamedTuple):
    """Experts that compute the tokens which a router sends to them: E, K, and F."""

    total: int
    top_k: int
    width: int


def count_moe_block_bytes(
    batch: RankBatch, dim: int, attention: LayerActivations, experts: RoutedExperts, shared: SharedExperts | None = None
) -> BlockActivations:
    """Return the activation memory of a pre-norm block of attention and a mixture of experts (`titan.model.experts`).

    Tensor ranks compute their tokens of the residual stream with whole experts. Saved per token by the router: its
    input, scores, the chosen experts and their weights; per chosen expert: the places before and after sorting, the
    sorted row, its weight, the projections and the gate. Backward computes shared experts first.
    """
    c, s, width = batch.bytes, batch.residual_tokens, experts.width
    rows, gradient = experts.top_k * s, c * dim * s
    shared_activations = LayerActivations(0.0, 0.0, 0.0, 0) if shared is None else shared.count_bytes(batch, dim)
    norms = 2 * batch.count_norm_bytes(dim) * s + c * dim * batch.saved_input_tokens
    router = (c * dim + 4 * experts.total + (INDEX_BYTES + 8) * experts.top_k + 4) * s
    gates = (2 if batch.recomputes_gates else 3) * c * width * rows
    index_bytes = (2 if batch.expert == 1 else 4) * INDEX_BYTES * rows
    saved = norms + attention.saved + router + index_bytes + c * dim * rows + gates + shared_activations.saved
    exchanged_bytes = (2 * c * dim + 4) * rows if batch.expert > 1 else 0.0
    scores = 4 * experts.total * s
    # every other matmul, of the router, w1, w3, w2 and the shared experts in this order
    saved_matmul = scores if attention.matmuls % 2 == 0 else c * dim * rows if shared is not None else 0.0
    selective = (
        gradient
        + attention.selective
        + saved_matmul
        + c * width * rows
        + exchanged_bytes
        + shared_activations.selective
    )
    freed_bytes = gradient * (shared is not None) - shared_activations.saved
    if batch.compiled and batch.expert > 1:  # compiled in parts, each recomputed from its inputs
        selective += gradient + index_bytes
    shared_bytes = 0.0 if shared is None else c * 2 * shared.width * s
    routing = max(gradient + c * dim * rows + freed_bytes, gradient + shared_bytes)
    backward = gradient + c * (2 * width + dim) * rows + freed_bytes
    outputs = attention.outputs + c * (2 * width + dim) * rows + scores + shared_activations.outputs
    received = c * dim * rows + gates
    routed = received + index_bytes + shared_activations.saved
    return BlockActivations(gradient, saved, selective, backward, outputs, routing, received + exchanged_bytes, routed)


def count_head_bytes(
    batch: RankBatch,
    dim: int,
    vocab: int,
    parts: bool,
    chunk: int | None,
    has_terms: bool = False,
    reads_logits: bool = False,
    is_capped: bool = False,
) -> HeadActivations:
    """Return the activation memory of the final norm, the head and the cross-entropy.

    Args:
        parts: whether tensor-parallel ranks compute the loss from sharded logits (loss parallel).
        chunk: tokens whose logits exist at a time; None: all.
        has_terms: whether there are loss terms next to cross-entropy; from statistics of the logits, which need no
            more.
        reads_logits: whether a term reads the logits themselves, all of them on every tensor-parallel rank.
        is_capped: whether logits are soft-capped.
    """
    c, n, s, t = batch.bytes, batch.tokens, batch.residual_tokens, batch.tensor
    is_split = t > 1 and parts
    fused, cap_bytes = has_terms or is_capped or is_split, 4 if is_capped else 0  # see titan.model.loss_terms.Objective
    norm, hidden = batch.count_norm_bytes(dim) * s, c * dim * n
    norm_bytes = norm + (batch.count_norm_backward_bytes(dim) + c * dim) * s
    if chunk is not None:
        gradients = hidden + c * vocab * dim / t
        logits = min(chunk, n) * vocab / t * ((12 + cap_bytes if has_terms or is_capped else 4) + c % 4)
        logits += _count_logit_term_bytes(min(chunk, n) * vocab, t) * reads_logits
        peak = norm + 2 * hidden + (4 + c) * vocab * dim / t + logits
        return HeadActivations(norm + gradients, peak, norm + 2 * gradients, norm_bytes)
    logits = n * vocab * (1 / t if fused else 1 + (t > 1) / t if batch.compiled else 1)
    kept, peak = _count_logit_bytes(batch, fused, is_capped)
    terms, saved_terms = _count_logit_term_bytes(n * vocab, t), 4 * LOGIT_TERM_SAVED * n * vocab
    forward = norm + hidden + peak * logits + terms * reads_logits
    backward = forward + (c * vocab * dim / t if batch.compiled else 0 if fused else (4 - c % 4) * logits)
    return HeadActivations(norm + hidden + kept * logits + saved_terms * reads_logits, forward, backward, norm_bytes)


def _count_logit_bytes(batch: RankBatch, fused: bool, is_capped: bool) -> tuple[int, int]:
    """Return the bytes of each logit that the loss saves, and those at the forward pass's peak.

    A compiler keeps logits once in the compute type and overwrites them by their gradient, except that it keeps float32
    logits across collectives. The gradient exists beside that of the weight.
    """
    c, cap = batch.bytes, 4 if is_capped else 0
    if batch.compiled:
        kept, spare = 4 if fused and batch.tensor > 1 else c, c % 4 if is_capped or batch.tensor > 1 else 0
        return kept, kept + cap + spare
    return 4, 8 + cap if fused else 8 + c % 4


def _count_logit_term_bytes(logits: float, tensor: int) -> float:
    """Return the bytes at the peak that a term of whole logits adds, from their number; gathering takes its part."""
    return 4 * (LOGIT_TERM_TENSORS + 1 - 1 / tensor) * logits
