"""The model axis: shapes, parameter and FLOP counts, and memory in closed form. Free of torch.

The shipped shapes are numbers in `conf/model/*.yaml`; another model is another dataclass with the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan.settings import Refusal, setting

if TYPE_CHECKING:
    from titan.model.llama import Llama as LlamaModule

Checkpointing = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Shape of a Llama 2, 3 or 3.x decoder (arXiv:2407.21783): pre-norm, rotary, grouped-query attention, SwiGLU."""

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

    def build(self) -> LlamaModule:
        """The module on the current default device; its caller chooses `torch.device("meta")`."""
        from titan.model.llama import Llama as LlamaModule

        return LlamaModule(self)

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

    def block_matmul_parameters(self) -> int:
        """Weights of one block that enter matrix products: query, key, value, output and three of SwiGLU."""
        attention = 2 * self.dim * self.head_size * (self.heads + self.kv_heads)
        return attention + 3 * self.dim * self.ffn

    def matmul_parameters(self) -> int:
        """Weights that enter matrix products: the blocks' and the head's, tied or not; embedding is a look-up."""
        return self.layers * self.block_matmul_parameters() + self.vocab * self.dim

    def parameters(self) -> int:
        """The exact number of parameters; a tied weight counts once."""
        embedding = 0 if self.tied else self.vocab * self.dim
        norms = (2 * self.layers + 1) * self.dim
        return self.matmul_parameters() + embedding + norms

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations a token takes in forward and backward, as model FLOPs utilisation counts them.

        6 for each matrix parameter and 12 * layers * heads * head_dim * seq_len for attention scores and values, not
        halved for causality and without recomputation (arXiv:2204.02311, appendix B).
        """
        attention = 12 * self.layers * self.heads * self.head_size * seq_len
        return float(6 * self.matmul_parameters() + attention)

    def state_bytes(self, optimizer_bytes_per_parameter: int = 8) -> int:
        """Bytes of all weights and gradients in float32 and of the optimizer's state (8 a parameter: Adam's two)."""
        return self.parameters() * (4 + 4 + optimizer_bytes_per_parameter)

    def block_bytes(self, tokens: int, compute_bytes: int, fused_norm: bool = True) -> int:
        """Bytes that autograd keeps of one block, its input included, with flash attention; see `activation_bytes`."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = compute_bytes * (self.dim + 2 * queries + 2 * keys) + 4 * self.heads
        feed_forward = compute_bytes * (self.dim + 4 * self.ffn)
        return tokens * (2 * self._norm_bytes(compute_bytes, fused_norm) + attention + feed_forward)

    def head_bytes(self, tokens: int, compute_bytes: int, fused_norm: bool = True) -> int:
        """Bytes that autograd keeps of the final norm, the head and the loss (log-probabilities in float32)."""
        return tokens * (self._norm_bytes(compute_bytes, fused_norm) + compute_bytes * self.dim + 4 * self.vocab)

    def activation_bytes(
        self, tokens: int, compute_bytes: int, checkpointing: Checkpointing, fused_norm: bool = True
    ) -> int:
        """Bytes of activations of one micro-batch on one rank that holds the whole model, at the peak of backward.

        What autograd keeps, with flash attention and no document mask, a token: in each norm its input and the inverse
        root mean square; its output, input of the products that follow; rotated queries and keys, values, attention's
        output and log-sum-exp; of SwiGLU both products, the gate's activation and their product; in the loss the
        log-probabilities. On top comes the logits' gradient. With full checkpointing: each block's input and, while
        one block is recomputed, what that block keeps. Weights are not counted, nor copies of them in `compute_bytes`.

        Args:
            tokens: of the micro-batch on this rank.
            compute_bytes: 4 for float32, 2 for bfloat16.
            checkpointing: "none", or "full": every block is recomputed in backward.
            fused_norm: False for a device without a fused RMSNorm (CPU), where autograd keeps two float32 tensors.
        """
        block = self.block_bytes(tokens, compute_bytes, fused_norm)
        inputs = tokens * compute_bytes * self.dim
        blocks = self.layers * block if checkpointing == "none" else self.layers * inputs + block
        logits_gradient = 4 * tokens * self.vocab
        return blocks + self.head_bytes(tokens, compute_bytes, fused_norm) + logits_gradient

    def _norm_bytes(self, compute_bytes: int, fused: bool) -> int:
        """Bytes a token that autograd keeps of one RMSNorm, its output not included."""
        return (compute_bytes * self.dim if fused else 8 * self.dim) + 4
