"""The model axis: shapes, parameter and FLOP counts, and memory in closed form. Free of torch.

The shipped shapes are numbers in `conf/model/*.yaml`; another model is another dataclass with the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.activations import Block, Head, Share, block, head

if TYPE_CHECKING:
    from titan.model.decoder import Decoder as DecoderModule
    from titan.model.llama import Llama as LlamaModule
    from titan.model.qwen3 import Qwen3 as Qwen3Module


WIDEST = 10**7
"""No width and no vocabulary comes near it."""


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

    dim: int = setting(256, "width of the hidden states", at_least=1, cap=WIDEST)
    layers: int = setting(6, "number of blocks", at_least=1, cap=10_000)
    heads: int = setting(4, "query heads", at_least=1, cap=WIDEST)
    kv_heads: int = setting(2, "key and value heads; each serves heads / kv_heads query heads", at_least=1, cap=WIDEST)
    head_dim: int | None = setting(None, "width of a head; null: dim / heads", at_least=2, cap=WIDEST)
    ffn: int = setting(640, "width of the feed-forward layer", at_least=1, cap=WIDEST)
    vocab: int = setting(4096, "entries of the vocabulary", at_least=1, cap=WIDEST)
    rope_theta: float = setting(500000.0, "base of the rotary frequencies", above=0, cap=1e12)
    rope_factor: float = setting(
        1.0, "stretch of the long rotary wavelengths (Llama 3.1); 1: none", at_least=1, cap=1e6
    )
    rope_low: float = setting(1.0, "wavelengths above rope_original / rope_low are stretched in full", above=0)
    rope_high: float = setting(4.0, "wavelengths below rope_original / rope_high are not stretched", above=0)
    rope_original: int = setting(8192, "sequence length before the stretch", at_least=1, cap=10**9)
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm", above=0, cap=1)
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
            ConfigError: with the first setting that does not fit, its value and the way out.
        """
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads}: must be a multiple of model.kv_heads={self.kv_heads}; "
                f"set model.kv_heads to a divisor of {self.heads}."
            )
        if self.head_dim is None and self.dim % self.heads:
            raise ConfigError(
                f"model.dim={self.dim}: must be a multiple of model.heads={self.heads}; "
                "change one of them or give model.head_dim."
            )
        if self.head_size % 2 or self.head_size == 0:
            raise ConfigError(
                f"model.head_dim={self.head_size}: must be even, because rotary embedding turns pairs; "
                f"set model.head_dim={self.head_size + self.head_size % 2 or 2}."
            )
        if self.rope_factor != 1 and self.rope_high <= self.rope_low:
            raise ConfigError(
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

    def block_activations(self, share: Share, core: float = 0.0) -> Block:
        """Bytes that a block's activations take; see `titan.model.activations.block`."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return block(share, self.dim, queries, keys, self.heads, self.ffn, bool(self.head_norms()), core)

    def head_activations(self, share: Share, *, parts: bool = True, chunk: int | None = None) -> Head:
        """Bytes that the final norm, the head and the loss take; see `titan.model.activations.head`."""
        return head(share, self.dim, self.vocab, parts=parts, chunk=chunk)


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

    head_dim: int | None = setting(128, "width of a head; null: dim / heads", at_least=2, cap=WIDEST)
    rope_theta: float = setting(1000000.0, "base of the rotary frequencies", above=0, cap=1e12)
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", above=0, cap=1)

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
