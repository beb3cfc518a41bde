"""Llama as a module, and what it declares about itself: blocks, initial values, names at Hugging Face."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from titan.model import schema
from titan.model.layers import (
    Block,
    Embedding,
    Head,
    RMSNorm,
    document_mask,
    inverse_frequencies,
    rotation,
    stretch_frequencies,
)
from titan.rng import Initial, Normal, Ones

BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
OTHER_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
RESIDUAL = ("attention.wo", "feed_forward.w2")
"""The products whose results are added to the residual stream."""


class Llama(nn.Module):
    """A Llama decoder. Build it under `torch.device("meta")`, then `titan.rng.materialise` it."""

    inv_freq: Tensor

    def __init__(self, config: schema.Llama) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab, config.dim)
        # Keyed by index, so that names stay when a pipeline stage keeps only some of the layers.
        self.layers = nn.ModuleDict({str(i): self._block() for i in range(config.layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = Head(config.dim, config.vocab)
        if config.tied:
            self.head.weight = self.tok_embeddings.weight
        self.register_buffer("inv_freq", torch.empty(config.head_size // 2), persistent=False)
        self.init_buffers(self.inv_freq.device)

    def _block(self) -> Block:
        c = self.config
        return Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary frequencies (on the CPU, so that they are the same for all devices) and put them there."""
        c = self.config
        frequencies = inverse_frequencies(c.head_size, c.rope_theta)
        if c.rope_factor != 1:
            frequencies = stretch_frequencies(frequencies, c.rope_factor, c.rope_low, c.rope_high, c.rope_original)
        self.inv_freq = frequencies.to(device)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm; `head` makes logits or the loss of them.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] or [T] int64; None for 0 to T - 1.
            document_ids: [B, T] int64; attention stays within tokens of equal id. None: one document a row.

        Returns:
            [B, T, D] in the compute type.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotation(self.inv_freq, positions.view(-1, tokens.shape[1]))
        mask = None if document_ids is None else document_mask(document_ids)
        hidden = self.tok_embeddings(tokens)
        for block in self.blocks():
            hidden = block(hidden, cos, sin, mask)
        out: Tensor = self.norm(hidden)
        return out

    def blocks(self) -> list[nn.Module]:
        """The blocks that this module holds, in order."""
        return list(self.layers.values())

    def initial(self) -> dict[str, Initial]:
        """How each parameter starts, by name.

        Matrices are normal with deviation 0.02; those that write to the residual stream 0.02 / sqrt(2 * layers), so
        that the stream's variance does not grow with depth (GPT-2: Radford et al. 2019, section 2.3). Norms are one.
        """
        residual = Normal(0.02 / math.sqrt(2 * self.config.layers))

        def start(name: str) -> Initial:
            if name.endswith("norm.weight"):
                return Ones()
            return residual if name.removesuffix(".weight").endswith(RESIDUAL) else Normal(0.02)

        return {name: start(name) for name, _ in self.named_parameters()}

    def hf_names(self) -> dict[str, str]:
        """For each parameter here its name in Hugging Face's `LlamaForCausalLM`; a tied head has no entry."""
        return {name: _hf_name(name.removesuffix(".weight")) + ".weight" for name, _ in self.named_parameters()}


def _hf_name(module: str) -> str:
    if not module.startswith("layers."):
        return OTHER_NAMES[module]
    _, index, inner = module.split(".", 2)
    return f"model.layers.{index}.{BLOCK_NAMES[inner]}"
