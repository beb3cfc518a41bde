"""A decoder of equal blocks, and what it declares about itself: blocks, tensor plan, initial values, names.

A family of models is a subclass that says what its blocks are and how their weights are called elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from titan.model.init_weights import Initial, Normal, Ones
from titan.model.layers import Embedding, Head, RMSNorm, inverse_frequencies, rotation, seen_by, stretch_frequencies

Cut = Literal["vocab", "region", "colwise", "rowwise", "sequence", "heads"]
"""How tensor parallelism treats a module.

vocab: embedding or head, its rows (the vocabulary) are cut. region: sees whole sequences; its products are cut.
colwise: a product whose outputs are cut, rowwise: one whose inputs are. sequence: a weight that every rank has whole
and uses on its part of the sequence. heads: likewise, used on its part of the heads.
"""

OTHER_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
"""Hugging Face's names of what is outside of the blocks, the same in all families."""
RESIDUAL = ("attention.wo", "feed_forward.w2")
"""The products whose results are added to the residual stream."""


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. Build it under `torch.device("meta")`, then
    `titan.model.init_weights.materialise` it.

    Attributes:
        mask: makes, once a micro-batch, of document ids [B, T] (or None), positions [1 or B, T] and the compute type
            what every block's attention takes to know which keys a query sees.
    """

    BLOCK_NAMES: ClassVar[Mapping[str, str]]
    """Hugging Face's name of each module of a block that has a weight."""
    BLOCK_PLAN: ClassVar[Mapping[str, Cut]]
    """The tensor plan of a block."""
    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        """Make all modules that a schema of `titan.model.schema` asks for."""
        super().__init__()
        self.config = config
        self.tok_embeddings: Embedding | None = Embedding(config.vocab, config.dim)
        # Keyed by index, so that names stay when a pipeline stage keeps only some of the layers.
        self.layers = nn.ModuleDict({str(i): self.block() for i in range(config.layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        self.head: Head | None = Head(config.dim, config.vocab)
        self.mask: Callable[[Tensor | None, Tensor, torch.dtype], Any] = seen_by
        self.aliases: dict[str, str] = {}  # parameters that are known by the name of another, whose copy they are
        if config.tied:
            self.head.weight = self.tok_embeddings.weight
        self.register_buffer("inv_freq", torch.empty(config.head_size // 2), persistent=False)
        self.init_buffers(self.inv_freq.device)

    def block(self) -> nn.Module:
        """One block of this family."""
        raise NotImplementedError

    def keep(self, layers: Iterable[int], first: bool, last: bool) -> None:
        """Keep the blocks `layers` only, the embedding if `first`, the final norm and the head if `last`."""
        kept = {str(i) for i in layers}
        for name in [n for n in self.layers if n not in kept]:
            del self.layers[name]
        if not first:
            self.tok_embeddings = None
        if not last:
            self.norm = self.head = None
        if self.config.tied and last and not first:
            self.aliases = {"head.weight": "tok_embeddings.weight"}

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary frequencies (on the CPU, so that they are the same for all devices) and put them there."""
        c = self.config
        frequencies = inverse_frequencies(c.head_size, c.rope_theta)
        if c.rope_factor != 1:
            frequencies = stretch_frequencies(frequencies, c.rope_factor, c.rope_low, c.rope_high, c.rope_original)
        self.inv_freq = frequencies.to(device)

    def forward(self, x: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm; `head` makes logits or the loss of them.

        Args:
            x: tokens [B, T] int64; without the embedding the hidden states [B, T, D] that came out of the block before.
            positions: [B, T] or [T] int64; None for 0 to T - 1.
            document_ids: [B, T] int64; attention stays within tokens of equal id. None: one document a row.

        Returns:
            [B, T, D] in the compute type; without the final norm what came out of the last block here.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        positions = positions.view(-1, positions.shape[-1])
        cos, sin = rotation(self.inv_freq, positions)
        hidden = x if self.tok_embeddings is None else self.tok_embeddings(x)
        seen = self.mask(document_ids, positions, hidden.dtype)
        for block in self.blocks():
            hidden = block(hidden, cos, sin, seen)
        return hidden if self.norm is None else self.norm(hidden)

    def blocks(self) -> list[nn.Module]:
        """The blocks that this module holds, in order."""
        return list(self.layers.values())

    def tensor_plan(self) -> dict[str, Cut]:
        """How tensor parallelism treats each module, by name; of what is here only."""
        plan: dict[str, Cut] = {f"layers.{i}.{name}": cut for i in self.layers for name, cut in self.BLOCK_PLAN.items()}
        if self.tok_embeddings is not None:
            plan["tok_embeddings"] = "vocab"
        if self.head is not None:
            plan |= {"norm": "sequence", "head": "vocab"}
        return plan

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
        """For each parameter here its name at Hugging Face; a tied head has no entry."""
        return {name: self._hf_name(name.removesuffix(".weight")) + ".weight" for name, _ in self.named_parameters()}

    def _hf_name(self, module: str) -> str:
        if not module.startswith("layers."):
            return OTHER_NAMES[module]
        _, index, inner = module.split(".", 2)
        return f"model.layers.{index}.{self.BLOCK_NAMES[inner]}"
