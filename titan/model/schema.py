"""The model axis: shapes, parameter and FLOP counts, and memory in closed form. Free of torch.

The shipped shapes are numbers in `conf/model/*.yaml`; another model is another dataclass with the same methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from titan.settings import Refusal, setting

if TYPE_CHECKING:
    from titan.model.decoder import Decoder as DecoderModule
    from titan.model.llama import Llama as LlamaModule
    from titan.model.qwen3 import Qwen3 as Qwen3Module

Checkpointing = Literal["none", "full", "every_n", "selective", "budget"]
"""What autograd keeps; see `Decoder.stage_activation_bytes`."""


class Product(NamedTuple):
    """A product with a weight [outputs, inputs]; tensor parallelism cuts its inputs (`rowwise`) or its outputs."""

    inputs: int
    outputs: int
    rowwise: bool = False

    def part(self, tensor: int) -> Product:
        """What one of `tensor` ranks computes of it."""
        inputs, outputs = (
            (self.inputs // tensor, self.outputs) if self.rowwise else (self.inputs, self.outputs // tensor)
        )
        return Product(inputs, outputs, self.rowwise)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of a decoder of equal blocks: pre-norm, rotary, grouped-query attention, SwiGLU, RMSNorm, no biases.

    A family is a subclass that builds its module, has its own defaults and counts what its blocks have besides.
    """

    dim: int = setting(256, "width of the hidden states", at_least=1)
    layers: int = setting(6, "number of blocks", at_least=1)
    heads: int = setting(4, "query heads", at_least=1)
    kv_heads: int = setting(2, "key and value heads; each serves heads / kv_heads query heads", at_least=1)
    head_dim: int | None = setting(None, "width of a head; null: dim / heads", at_least=2)
    ffn: int = setting(640, "width of the feed-forward layer", at_least=1)
    vocab: int = setting(4096, "entries of the vocabulary", at_least=1)
    rope_theta: float = setting(500000.0, "base of the rotary frequencies", above=0)
    rope_factor: float = setting(1.0, "stretch of the long rotary wavelengths (Llama 3.1); 1: none", at_least=1)
    rope_low: float = setting(1.0, "wavelengths above rope_original / rope_low are stretched in full", above=0)
    rope_high: float = setting(4.0, "wavelengths below rope_original / rope_high are not stretched", above=0)
    rope_original: int = setting(8192, "sequence length before the stretch", at_least=1)
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm", above=0)
    tied: bool = setting(False, "use the embedding's weight as the head's")

    @property
    def head_size(self) -> int:
        """Width of a head, whether it was given or follows from `dim`."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    def build(self) -> DecoderModule:
        """The module on the current default device; its caller chooses `torch.device("meta")`."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse fields that do not fit each other.

        Raises:
            Refusal: with the first setting that does not fit, its value and the way out.
        """
        if self.heads % self.kv_heads:
            raise Refusal(
                f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}; "
                f"set model.kv_heads to a divisor of {self.heads}."
            )
        if self.head_dim is None and self.dim % self.heads:
            raise Refusal(
                f"model.dim={self.dim}: must be a multiple of model.heads={self.heads}; "
                "change one of them or give model.head_dim."
            )
        if self.head_size % 2 or self.head_size == 0:
            raise Refusal(
                f"model.head_dim={self.head_size}: must be even, because rotary embedding turns pairs; "
                f"set model.head_dim={self.head_size + self.head_size % 2 or 2}."
            )
        if self.rope_factor != 1 and self.rope_high <= self.rope_low:
            raise Refusal(
                f"model.rope_high={self.rope_high:g}: must be above model.rope_low={self.rope_low:g}; raise it."
            )

    def products(self) -> dict[str, Product]:
        """All products with a weight, by the name of their module."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        block = {
            "attention.wq": Product(self.dim, queries),
            "attention.wk": Product(self.dim, keys),
            "attention.wv": Product(self.dim, keys),
            "attention.wo": Product(queries, self.dim, rowwise=True),
            "feed_forward.w1": Product(self.dim, self.ffn),
            "feed_forward.w2": Product(self.ffn, self.dim, rowwise=True),
            "feed_forward.w3": Product(self.dim, self.ffn),
        }
        blocks = {f"layers.{i}.{name}": product for i in range(self.layers) for name, product in block.items()}
        return blocks | {"head": Product(self.dim, self.vocab)}

    def block_matmul_parameters(self) -> int:
        """Weights of one block that enter matrix products: query, key, value, output and three of SwiGLU."""
        attention = 2 * self.dim * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.dim * self.ffn

    def matmul_parameters(self) -> int:
        """Weights that enter matrix products: the blocks' and the head's, tied or not; embedding is a look-up."""
        return self.layers * self.block_matmul_parameters() + self.vocab * self.dim

    def block_parameters(self) -> int:
        """The exact number of parameters of one block."""
        return self.block_matmul_parameters() + 2 * self.dim

    def parameter_names(self) -> tuple[str, ...]:
        """The names of all parameters, a tied weight's once: under the embedding's."""
        blocks = (f"layers.{i}.{name}.weight" for i in range(self.layers) for name in self.block_modules())
        return ("tok_embeddings.weight", *blocks, "norm.weight", *(() if self.tied else ("head.weight",)))

    def block_modules(self) -> tuple[str, ...]:
        """The names of a block's modules that have a weight, in order."""
        attention = tuple(f"attention.{name}" for name in ("wq", "wk", "wv", "wo", *self.head_norms()))
        return ("attention_norm", *attention, "ffn_norm", *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")))

    def head_norms(self) -> tuple[str, ...]:
        """The names of the norms of queries and keys in attention, where there are any."""
        return ()

    def embedding_parameters(self) -> int:
        """The exact number of parameters of the embedding."""
        return self.vocab * self.dim

    def head_parameters(self) -> int:
        """Parameters of the final norm and the head, of a tied head too: away from the embedding it is a copy."""
        return self.dim + self.vocab * self.dim

    def parameters(self) -> int:
        """The exact number of parameters: embedding, blocks and head, where a tied weight counts once."""
        twice = self.embedding_parameters() if self.tied else 0
        return self.embedding_parameters() + self.layers * self.block_parameters() + self.head_parameters() - twice

    def block_flops(self, seq_len: float) -> float:
        """Floating-point operations a token takes in one block, forward and backward; see `flops_per_token`."""
        return float(6 * self.block_matmul_parameters() + 12 * self.heads * self.head_size * seq_len)

    def head_flops(self) -> float:
        """Floating-point operations a token takes in the head, forward and backward."""
        return float(6 * self.vocab * self.dim)

    def flops_per_token(self, seq_len: float) -> float:
        """Floating-point operations a token takes in forward and backward, as model FLOPs utilisation counts them.

        6 for each matrix parameter and 12 * layers * heads * head_dim * seq_len for attention scores and values, not
        halved for causality and without recomputation (arXiv:2204.02311, appendix B). The embedding takes none.
        """
        return self.layers * self.block_flops(seq_len) + self.head_flops()

    def block_bytes(self, tokens: int, compute_bytes: int, fused_norm: bool = True) -> int:
        """Bytes that autograd keeps of one block, its input included, with flash attention.

        A token: in each norm its input and the inverse root mean square; its output, input of the products that
        follow; rotated queries and keys, values, attention's output and log-sum-exp; of SwiGLU both products, the
        gate's activation and their product. Arguments as for `activation_bytes`.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = compute_bytes * (self.dim + 2 * queries + 2 * keys) + 4 * self.heads
        feed_forward = compute_bytes * (self.dim + 4 * self.ffn)
        return tokens * (2 * norm_bytes(self.dim, compute_bytes, fused_norm) + attention + feed_forward)

    def selective_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Bytes that selective checkpointing keeps of one block, its input included.

        Attention's output and log-sum-exp and the results of every other matrix product in the order of execution:
        the queries', the values', w1's and w2's.
        """
        queries, values = self.heads * self.head_size, self.kv_heads * self.head_size
        products = queries + values + self.ffn + self.dim
        return tokens * (compute_bytes * (self.dim + products + queries) + 4 * self.heads)

    def head_bytes(self, tokens: int, compute_bytes: int, fused_norm: bool = True) -> int:
        """Bytes that autograd keeps of the final norm, the head and the loss (log-probabilities in float32)."""
        return tokens * (norm_bytes(self.dim, compute_bytes, fused_norm) + compute_bytes * self.dim + 4 * self.vocab)

    def head_peak(self, tokens: int, compute_bytes: int, fused_norm: bool = True, chunk: int | None = None) -> int:
        """Bytes of the final norm, the head and the loss where they take most.

        All logits at once: what autograd keeps and the logits' gradient. `chunk` tokens at a time: what is kept of the
        norm, the gradient of the hidden states, a chunk's logits in the compute type and in float32, and the weight's
        gradient in float32 and in the compute type, which ranks that share rows have whole.

        Args:
            tokens, compute_bytes, fused_norm: as for `activation_bytes`.
            chunk: `training.loss_chunk`.
        """
        if chunk is None:
            return self.head_bytes(tokens, compute_bytes, fused_norm) + 4 * tokens * self.vocab
        kept = tokens * (norm_bytes(self.dim, compute_bytes, fused_norm) + compute_bytes * self.dim)
        logits = min(chunk, tokens) * self.vocab * (4 + compute_bytes % 4)
        return kept + logits + self.vocab * self.dim * (4 + compute_bytes)

    def activation_bytes(
        self,
        tokens: int,
        compute_bytes: int,
        checkpointing: Checkpointing,
        fused_norm: bool = True,
        *,
        every: int = 2,
        budget: float = 0.5,
    ) -> int:
        """Bytes of activations of one micro-batch on one rank that holds the whole model, at the peak of backward.

        Args:
            tokens: of the micro-batch on this rank.
            compute_bytes: 4 for float32, 2 for bfloat16.
            checkpointing: see `stage_activation_bytes`.
            fused_norm: False for a device without a fused RMSNorm (CPU), where autograd keeps two float32 tensors.
            every: with "every_n", which blocks are recomputed.
            budget: with "budget", the share from 0 to 1 of what could be saved by recomputation that is kept.
        """
        return self.stage_activation_bytes(
            self.layers, True, tokens, compute_bytes, checkpointing, fused_norm, every=every, budget=budget
        )

    def stage_activation_bytes(
        self,
        layers: int,
        head: bool,
        tokens: int,
        compute_bytes: int,
        checkpointing: Checkpointing,
        fused_norm: bool = True,
        *,
        every: int = 2,
        budget: float = 0.5,
        chunk: int | None = None,
    ) -> int:
        """Bytes of activations of one micro-batch in a part of the model, at the peak of backward.

        Without a document mask, weights and copies of them not counted. The head brings `head_peak`. Blocks keep, by
        `checkpointing`:

        - none: all, `block_bytes`;
        - full: their input; each is recomputed in backward, when one whole block comes on top;
        - every_n: all, but each `every`-th (of `layers`, layers // every) its input only;
        - selective: what `selective_bytes` counts; the rest is recomputed, one whole block on top;
        - budget: what torch's activation memory budget asks of the compiler, linear from full (0) to none (1).

        Args:
            layers: blocks in this part; 0 where there is none.
            head: whether the final norm, the head and the loss are in this part.
            tokens, compute_bytes, fused_norm, every, budget: as for `activation_bytes`.
            chunk: tokens whose logits there are at a time; None: all.
        """
        block = self.block_bytes(tokens, compute_bytes, fused_norm)
        inputs, most = tokens * compute_bytes * self.dim, layers * block
        cut = layers // every
        kept = {
            "none": most,
            "full": layers * inputs,
            "every_n": (layers - cut) * block + cut * inputs,
            "selective": layers * self.selective_bytes(tokens, compute_bytes),
            "budget": layers * inputs,
        }
        # A block is recomputed after those behind it are done with, so that no mode holds more than "none".
        blocks = min(most, kept[checkpointing] + block)
        if checkpointing == "budget":
            blocks = math.ceil(blocks + budget * (most - blocks))
        return blocks + (self.head_peak(tokens, compute_bytes, fused_norm, chunk) if head else 0)


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """Shape of a Llama 2, 3 or 3.x decoder (arXiv:2407.21783)."""

    def build(self) -> LlamaModule:
        """The module on the current default device; its caller chooses `torch.device("meta")`."""
        from titan.model.llama import Llama as LlamaModule

        return LlamaModule(self)


@dataclass(frozen=True, kw_only=True)
class Qwen3(Decoder):
    """Shape of a dense Qwen3 decoder (arXiv:2505.09388): queries and keys are normalised a head before rotation."""

    head_dim: int | None = setting(128, "width of a head; null: dim / heads", at_least=2)
    rope_theta: float = setting(1000000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", above=0)

    def build(self) -> Qwen3Module:
        """The module on the current default device; its caller chooses `torch.device("meta")`."""
        from titan.model.qwen3 import Qwen3 as Qwen3Module

        return Qwen3Module(self)

    def block_parameters(self) -> int:
        """The exact number of parameters of one block, the weights of the two norms of heads included."""
        return super().block_parameters() + 2 * self.head_size

    def head_norms(self) -> tuple[str, ...]:
        """The norms of queries and keys."""
        return ("q_norm", "k_norm")

    def block_bytes(self, tokens: int, compute_bytes: int, fused_norm: bool = True) -> int:
        """As for every decoder, and what autograd keeps of the norms of queries and keys; rotation keeps no more."""
        norms = (self.heads + self.kv_heads) * norm_bytes(self.head_size, compute_bytes, fused_norm)
        return super().block_bytes(tokens, compute_bytes, fused_norm) + tokens * norms


def norm_bytes(width: int, compute_bytes: int, fused: bool) -> int:
    """Bytes that autograd keeps of the RMSNorm of `width` numbers, its output not included."""
    return (compute_bytes * width if fused else 8 * width) + 4
