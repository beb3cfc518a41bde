"""Counts of a model in closed form: matmuls, parameters, FLOPs and activation memory. Free of torch.

The schema of a family derives from `DecoderCounts`, or from the counts of its blocks: a family overrides what differs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

from titan.console.numbers import describe_parameters
from titan.model.activations import (
    LOGIT_TERM_SAVED,
    LOGIT_TERM_TENSORS,
    NO_CONTEXT,
    BlockActivations,
    ContextBytes,
    HeadActivations,
    LayerActivations,
    RankBatch,
)


class Matmul(NamedTuple):
    """A matmul with a weight [outputs, inputs]; tensor parallelism shards its inputs (`rowwise`) or its outputs."""

    inputs: int
    outputs: int
    rowwise: bool = False

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs

    def split(self, tensor: int) -> Matmul:
        """Return the matmul of one of `tensor` tensor-parallel ranks."""
        if self.rowwise:
            return Matmul(self.inputs // tensor, self.outputs, rowwise=True)
        return Matmul(self.inputs, self.outputs // tensor)

    def compute_token_share(self, sequence: int) -> float:
        """Return the share of a row's tokens that it computes on one of `sequence` ranks with sequence parallelism."""
        return 1.0


class WholeMatmul(Matmul):
    """A matmul whose weight each tensor-parallel rank has as a whole, and applies to all tokens."""

    __slots__ = ()

    def split(self, tensor: int) -> Matmul:
        """Return the matmul itself."""
        return self


class SequenceMatmul(WholeMatmul):
    """A matmul whose weight each tensor-parallel rank has as a whole, for its part of the sequence."""

    __slots__ = ()

    def compute_token_share(self, sequence: int) -> float:
        """Return the share of a row's tokens."""
        return 1 / sequence


def list_gated_matmuls(module: str, dim: int, width: int) -> dict[str, Matmul]:
    """Return the linear layers of SwiGLU with hidden states of width `dim` by their names in a block."""
    return {
        f"{module}.w1": Matmul(dim, width),
        f"{module}.w2": Matmul(width, dim, rowwise=True),
        f"{module}.w3": Matmul(dim, width),
    }


class DecoderCounts:
    """Counts of a decoder with grouped-query attention and SwiGLU, by its shape.

    Where blocks differ, the family gives their kinds, and what is counted of a block depends on `layer`, the block's
    index.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    logit_cap: float | None
    is_causal: ClassVar[bool] = True
    """Whether a token attends to no later ones, so that half of all pairs are computed."""

    @property
    @abstractmethod
    def head_size(self) -> int:
        """Width of a head."""
        raise NotImplementedError

    def kind(self, layer: int) -> str:
        """Return the kind of a block: blocks of one kind have the same modules and shapes."""
        return ""

    def kinds(self, layers: Iterable[int] | None = None) -> dict[str, list[int]]:
        """Return the blocks of each kind; of `layers`, None: of all."""
        layers_by_kind: dict[str, list[int]] = {}
        for layer in range(self.layers) if layers is None else layers:
            layers_by_kind.setdefault(self.kind(layer), []).append(layer)
        return layers_by_kind

    def count_row_tokens(self, seq_len: int) -> int:
        """Return the tokens that blocks compute of a row of `training.seq_len` ids."""
        return seq_len

    def needs_mask(self, seq_len: int) -> bool:
        """Return whether attention in rows of a length needs a mask, besides causality and documents."""
        return False

    def sum_over_blocks(self, count: Callable[[int], float], layers: Iterable[int] | None = None) -> float:
        """Return the sum over blocks of what is the same for blocks of one kind; over `layers`, None: over all."""
        return sum(len(blocks) * count(blocks[0]) for blocks in self.kinds(layers).values())

    def linear_layers(self) -> dict[str, Matmul]:
        """Return the linear layers by the name of their module."""
        matmuls_by_kind = {kind: self.block_matmuls(layers[0]) for kind, layers in self.kinds().items()}
        blocks = {
            f"layers.{i}.{name}": matmul
            for i in range(self.layers)
            for name, matmul in matmuls_by_kind[self.kind(i)].items()
        }
        return self.embedding_matmuls() | blocks | self.head_matmuls()

    def embedding_matmuls(self) -> dict[str, Matmul]:
        """Return the linear layers of an embedding that is no look-up, by the name of their module."""
        return {}

    def embedding_activations(self, batch: RankBatch) -> float:
        """Return the bytes that an embedding which is no look-up saves for backward."""
        return 0.0

    def head_matmuls(self) -> dict[str, Matmul]:
        """Return the linear layers of the head by the name of their module, the one with the outputs last."""
        return {"head": Matmul(self.dim, self.vocab)}

    def matmuls(self) -> dict[str, Matmul]:
        """Return linear layers and experts, by the name of the module that has one or all of a block's experts."""
        experts = {
            f"layers.{layer}.{name}": WholeMatmul(*matmul)
            for layer in range(self.layers)
            if self.expert_parameters(layer)
            for name, matmul in self.expert_matmuls(layer).items()
        }
        linear, heads = self.linear_layers(), self.head_matmuls()
        return {name: linear[name] for name in linear if name not in heads} | experts | heads

    def block_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of a block by the name of their module in it."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attention.wq": Matmul(self.dim, queries),
            "attention.wk": Matmul(self.dim, keys),
            "attention.wv": Matmul(self.dim, keys),
            "attention.wo": Matmul(queries, self.dim, rowwise=True),
            **list_gated_matmuls("feed_forward", self.dim, self.ffn),
        }

    def block_matmul_parameters(self, layer: int = 0) -> int:
        """Return the parameters of one block's matrices."""
        return sum(matmul.size for matmul in self.block_matmuls(layer).values())

    def matmul_parameters(self) -> int:
        """Return the parameters of all linear layers, the head's tied or not."""
        ends = sum(matmul.size for matmul in (self.embedding_matmuls() | self.head_matmuls()).values())
        return int(self.sum_over_blocks(self.block_matmul_parameters)) + ends

    def block_parameters(self, layer: int = 0) -> int:
        """Return the exact number of parameters of one block."""
        return self.block_matmul_parameters(layer) + 2 * self.dim

    def expert_matmuls(self, layer: int = 0) -> dict[str, Matmul]:
        """Return the linear layers of one of a block's experts by the name of the module that has those of all."""
        return {}

    def expert_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a block's experts, all of them; they are a part of its matrices."""
        return 0

    def active_expert_parameters(self, layer: int = 0) -> int:
        """Return the parameters of a block's experts that compute a token."""
        return 0

    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of all parameters; a tied weight once, under the embedding's name."""
        blocks = (f"layers.{i}.{name}.weight" for i in range(self.layers) for name in self.block_modules(i))
        return ("tok_embeddings.weight", *blocks, "norm.weight", *(() if self.tied else ("head.weight",)))

    def block_modules(self, layer: int = 0) -> tuple[str, ...]:
        """Return the names of a block's modules with a weight, in order."""
        matmuls, experts = self.block_matmuls(layer), self.expert_matmuls(layer)
        attention = [name.removeprefix("attention.") for name in matmuls if name.startswith("attention.")]
        rest = [name for name in matmuls if not name.startswith("attention.")]
        router = ("feed_forward.router",) if experts else ()
        norms_and_attention = (f"attention.{name}" for name in self.order_attention(attention))
        return ("attention_norm", *norms_and_attention, "ffn_norm", *router, *experts, *rest)

    def order_attention(self, linear: list[str]) -> list[str]:
        """Return the modules of attention with a weight, in order: its linear layers, and norms."""
        return [*linear, *self.head_norms()]

    def head_norms(self) -> tuple[str, ...]:
        """Return the names of the norms of queries and keys, if the family has them."""
        return ()

    def embedding_parameters(self) -> int:
        """Return the exact number of parameters of the embedding."""
        return self.vocab * self.dim

    def head_parameters(self) -> int:
        """Return the parameters of the final norm and the head; a tied head on another stage is a replica."""
        return self.dim + self.vocab * self.dim

    def split_embedding_parameters(self, tensor: int) -> float:
        """Return the parameters of the embedding on one of `tensor` ranks."""
        return self.embedding_parameters() / tensor

    def split_head_parameters(self, tensor: int) -> float:
        """Return the parameters of the final norm and the head on one of `tensor` ranks."""
        return self.vocab * self.dim / tensor + self.dim

    def parameters(self) -> int:
        """Return the exact number of parameters: embedding, blocks and head; a tied weight counts once."""
        embedding = 0 if self.tied else self.embedding_parameters()
        return embedding + int(self.sum_over_blocks(self.block_parameters)) + self.head_parameters()

    def active_parameters(self) -> int:
        """Return the exact number of parameters that compute a token: of the experts only those that are chosen."""
        idle = self.sum_over_blocks(lambda i: self.expert_parameters(i) - self.active_expert_parameters(i))
        return self.parameters() - int(idle)

    def describe_size(self) -> str:
        """Return in words how many parameters there are, and how many compute a token if these are fewer."""
        return describe_parameters(self.parameters(), self.active_parameters())

    def block_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of one block, forward and backward; see `flops_per_token`."""
        idle = self.expert_parameters(layer) - self.active_expert_parameters(layer)
        return 6 * (self.block_matmul_parameters(layer) - idle) + self.attention_flops(seq_len, layer)

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        """Return FLOPs per token of a block's attention scores and values, forward and backward."""
        return float(12 * self.heads * self.head_size * seq_len)

    def attention_span(self, seq_len: float, layer: int = 0) -> float:
        """Return the most tokens that one attends to in a block, in rows of a length."""
        return seq_len

    def attention_elements(self, layer: int = 0) -> int:
        """Return the elements per token that attention reads and writes beside its matmuls: of rotated heads."""
        return 2 * self.head_size * (self.heads + self.kv_heads)

    def elementwise_elements(self, part: str, layer: int = 0) -> tuple[float, float]:
        """Return the elements per token that a block's operations beside matmuls read and write in a pass.

        Forward: each of two norms, with the addition before it, reads 2D and writes 2D; RoPE reads and writes queries
        and keys; the gate reads 2F and writes F. Backward: a norm reads 2D and the gradient of the sum, and writes D;
        the gate reads 3F and writes 2F.

        Args:
            part: "forward" or "backward".

        Returns:
            Those of the residual stream, and those of heads and of the feed-forward width, which tensor ranks split.
        """
        width = sum(m.outputs for name, m in self.block_matmuls(layer).items() if name.endswith(".w1"))
        gate = 3 if part == "forward" else 5
        return 8 * self.dim, self.attention_elements(layer) + gate * width

    def head_flops(self) -> float:
        """Return FLOPs per token of the head, forward and backward."""
        return float(6 * self.vocab * self.dim)

    def flops_per_token(self, seq_len: float) -> float:
        """Return FLOPs per token, forward and backward, as model FLOPs utilisation (MFU) counts them.

        6 for each parameter of a linear layer that computes the token and 12 * layers * heads * head_dim * seq_len for
        attention scores and values, not halved for causality and without recomputation (arXiv:2204.02311, appendix B).
        The embedding counts none. A token is an id of a row, of which blocks may compute another number of tokens
        (`count_row_tokens`).
        """
        return self.sum_over_blocks(lambda layer: self.block_flops(seq_len, layer)) + self.head_flops()

    def block_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> BlockActivations:
        """Return the activation memory of a pre-norm block of attention and SwiGLU.

        In addition to its parts it saves `RankBatch.count_norm_bytes` of each norm, and its output, which tensor ranks
        all-gather: the rank's part of it, or all.
        """
        c, n, s, t = batch.bytes, batch.tokens, batch.residual_tokens, batch.tensor
        dim, ffn, attention = self.dim, self.ffn, self.attention_activations(batch, context, layer)
        feed_forward, gradient = batch.count_swiglu_bytes(dim, ffn), c * dim * s
        norms = 2 * batch.count_norm_bytes(dim) * s + 2 * c * dim * (s if batch.regather else n)
        gates = c * n * max(2 * ffn / t, ffn / t + (dim if t > 1 and batch.sequence else 0))
        norm = (2 * c if batch.has_fused_norms else 16) * dim * s - feed_forward.saved
        # gradients of a region's input and first products, with the input and a copy
        regathered = c * (2 * ffn / t + (2 if batch.one_row else 3) * dim) * n if batch.regather else 0.0
        return BlockActivations(
            gradient,
            norms + attention.saved + feed_forward.saved,
            gradient + attention.selective + feed_forward.selective,
            gradient + max(gates, norm, c * dim * n, regathered - feed_forward.saved),
            attention.outputs + feed_forward.outputs,
        )

    def attention_activations(
        self, batch: RankBatch, context: ContextBytes = NO_CONTEXT, layer: int = 0
    ) -> LayerActivations:
        """Return the memory of attention: rotated queries and keys, values, the output and its log-sum-exp."""
        c, n, t = batch.bytes, batch.tokens, batch.tensor
        q, k = self.heads * self.head_size / t, self.kv_heads * self.head_size / t
        saved = (c * (2 * q + 2 * k) + 4 * self.heads / t + context.saved) * n
        if self.head_norms():
            saved += n * (batch.count_norm_bytes(q) + batch.count_norm_bytes(k))
        selective = (c * (q + k + q) + 4 * self.heads / t + context.selective) * n + batch.count_reduced_bytes(self.dim)
        return LayerActivations(saved, selective, c * (q + 2 * k + self.dim) * n, 4)

    def head_activations(
        self,
        batch: RankBatch,
        *,
        parts: bool = True,
        chunk: int | None = None,
        has_terms: bool = False,
        reads_logits: bool = False,
    ) -> HeadActivations:
        """Return the activation memory of the final norm, the head and the cross-entropy.

        Args:
            parts: whether tensor-parallel ranks compute the loss from sharded logits (loss parallel).
            chunk: tokens whose logits exist at a time; None: all.
            has_terms: whether there are loss terms next to cross-entropy; from statistics of the logits, which need no
                more.
            reads_logits: whether a term reads the logits themselves, all of them on every tensor-parallel rank.
        """
        c, n, s, t = batch.bytes, batch.tokens, batch.residual_tokens, batch.tensor
        dim, vocab, is_capped = self.dim, self.vocab, self.logit_cap is not None
        fused = has_terms or is_capped or (t > 1 and parts)  # see titan.model.loss_terms.Objective
        norm, hidden = batch.count_norm_bytes(dim) * s, c * dim * n
        norm_bytes = norm + ((2 * c if batch.has_fused_norms else 16) * dim + c * dim) * s
        term_bytes = 4 * (LOGIT_TERM_TENSORS + 1 - 1 / t) * reads_logits  # of whole logits, with gathering its part
        if chunk is not None:
            gradients = hidden + c * vocab * dim / t
            logit_bytes = 12 + 4 * is_capped if has_terms or is_capped else 4
            logits = min(chunk, n) * vocab / t * (logit_bytes + c % 4)
            logits += term_bytes * (min(chunk, n) * vocab)
            peak = norm + 2 * hidden + (4 + c) * vocab * dim / t + logits
            return HeadActivations(norm + gradients, peak, norm + 2 * gradients, norm_bytes)
        logits = n * vocab * (1 / t if fused else 1 + (t > 1) / t if batch.compiled else 1)
        # a compiler keeps logits once in the compute type and overwrites them by their gradient, except that it keeps
        # float32 logits across collectives; the gradient exists beside that of the weight
        kept, peak = 4, 8 + 4 * is_capped if fused else 8 + c % 4
        if batch.compiled:
            kept = 4 if fused and t > 1 else c
            peak = kept + 4 * is_capped + (c % 4 if is_capped or t > 1 else 0)
        saved_terms = 4 * LOGIT_TERM_SAVED * n * vocab
        forward = norm + hidden + peak * logits + term_bytes * (n * vocab)
        backward = forward + (c * vocab * dim / t if batch.compiled else 0 if fused else (4 - c % 4) * logits)
        return HeadActivations(
            norm + hidden + kept * logits + saved_terms * reads_logits, forward, backward, norm_bytes
        )
