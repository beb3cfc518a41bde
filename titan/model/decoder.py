"""A decoder, and what it declares: blocks, tensor-parallel plan, initial values, Hugging Face names.

A model family is a subclass that defines its blocks and the Hugging Face names of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from titan.model import loss_terms
from titan.model.core import find_cores
from titan.model.experts import Router
from titan.model.init_weights import Initializer, Normal, Ones
from titan.model.layers import (
    Embedding,
    Head,
    RMSNorm,
    compute_rotation,
    inverse_frequencies,
    make_mask,
    soft_cap,
    stretch_frequencies,
)
from titan.model.masks import DocumentTokens, add_tokens, number_documents

Placement = Literal["vocab", "region", "colwise", "rowwise", "sequence", "heads"]
"""How tensor parallelism treats a module.

vocab: embedding or head, sharded over the vocabulary. region: gets whole sequences; its linear layers are sharded.
colwise: a linear layer with sharded outputs, rowwise: with sharded inputs. sequence: a replicated weight that is used
on the rank's part of the sequence. heads: a replicated weight that is used on the rank's heads.
"""

OUTER_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
"""Hugging Face's names of the modules outside of the blocks, the same in all families."""
RESIDUAL = ("attention.wo", "feed_forward.w2", "feed_forward.experts.w2", "feed_forward.shared.w2")
"""The linear layers whose outputs are added to the residual stream."""


class DecoderModel(nn.Module):
    """Embedding, blocks, norm and head. Build it under `torch.device("meta")`, then call
    `titan.model.init_weights.materialise_model`.

    Attributes:
        BLOCK_NAMES: Hugging Face's name of each module of a block that has a weight, and the full name of a parameter
            that is no module's `weight`.
        BLOCK_PLAN: the tensor-parallel plan of a block, where all blocks have the same.
        mask: called once per micro-batch with document ids [B, T] (or None), positions [1 or B, T] and the compute
            type; returns the mask that every block's attention uses. Where blocks have chunked attention, called with
            the length of a chunk too; returns `titan.model.masks.Masks`.
        find_keys: returns the tokens of the keys from those of the queries, for attention of one's own; None: the same.
        losses: coefficients of the loss terms that blocks return, by name; a block may then return its hidden states
            and a mapping from these names to values of its tokens, float32 [B, t].
        counted: the number of figures that a block with experts counts of its tokens and returns as a third result,
            E + 1 (`titan.model.balance`); 0 in a model without experts.
        aliases: parameters that are replicas of a tied weight on another stage, with that weight's name.
    """

    BLOCK_NAMES: ClassVar[Mapping[str, str]]
    BLOCK_PLAN: ClassVar[Mapping[str, Placement]]
    inv_freq: Tensor

    def __init__(self, config: Any) -> None:
        """Create the modules of a `titan.model.schema.Decoder`."""
        super().__init__()
        self.config = config
        self.tok_embeddings: Any = self.build_embedding()
        # Keyed by index, so that parameter names stay when a pipeline stage keeps only some of the layers.
        self.layers = nn.ModuleDict({str(i): self.block_at(i) for i in range(config.layers)})
        self.norm: Any = self.build_norm()
        self.head: Any = self.build_head()
        self.mask: Callable[..., Any] = make_mask
        self.find_keys: Callable[[DocumentTokens], DocumentTokens] | None = None
        self.aliases: dict[str, str] = {}
        self.losses: Mapping[str, float] = {}
        self.counted = 0
        if config.logit_cap is not None:
            self.head.complete_logits = partial(soft_cap, cap=config.logit_cap)
            loss_terms.set_head_loss(self.head, cap=config.logit_cap)
        if config.tied:
            self.head.weight = self.tok_embeddings.weight
        self.register_buffer("inv_freq", torch.empty(config.rotary_size // 2), persistent=False)
        self.init_buffers(self.inv_freq.device)

    def build_embedding(self) -> Any:
        """Return what maps a row's ids to hidden states, in the type of its attribute `dtype`; None: its weights'."""
        return Embedding(self.config.vocab, self.config.dim)

    def build_norm(self) -> Any:
        """Return what `forward` applies to the last block's output."""
        return RMSNorm(self.config.dim, self.config.norm_eps)

    def build_head(self) -> Any:
        """Return what maps what `forward` returns, and a row's targets, to the summed loss, a float32 scalar."""
        return Head(self.config.dim, self.config.vocab)

    def block(self) -> nn.Module:
        """Return one block, of a family in which all are equal."""
        raise NotImplementedError

    def block_at(self, layer: int) -> nn.Module:
        """Return the block of an index; a family whose blocks differ overrides it."""
        return self.block()

    def keep(self, layers: Iterable[int], first: bool, last: bool) -> None:
        """Keep the blocks `layers` only, the embedding if `first`, the final norm and the head if `last`."""
        names = {str(i) for i in layers}
        for name in [n for n in self.layers if n not in names]:
            del self.layers[name]
        if not first:
            self.tok_embeddings = None
        if not last:
            self.norm = self.head = None
        if self.config.tied and last and not first:
            self.aliases = {"head.weight": "tok_embeddings.weight"}

    def init_buffers(self, device: torch.device | str) -> None:
        """Compute the rotary frequencies on the CPU, so that they are equal everywhere, and move them to `device`."""
        self.inv_freq = self.compute_frequencies().to(device)
        for router in self.routers().values():
            router.init_buffers(device)

    def compute_frequencies(self) -> Tensor:
        """Return the rotary frequencies, float32 on the CPU; a family that scales them otherwise overrides it."""
        c = self.config
        frequencies = inverse_frequencies(c.rotary_size, c.rope_theta)
        if c.rope_factor == 1:
            return frequencies
        return stretch_frequencies(frequencies, c.rope_factor, c.rope_low, c.rope_high, c.rope_original)

    def compute_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of each position's angles; see `titan.model.layers.compute_rotation`."""
        return compute_rotation(self.inv_freq, positions)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Any:
        """Return hidden states after the final norm, from which `head` computes logits or the loss.

        Args:
            x: tokens [B, T] int64; on stages without the embedding the hidden states [B, T, D] of the previous stage.
            positions: [B, T] or [T] int64; None for 0 to T - 1.
            document_ids: [B, T] int64; tokens attend only to tokens of the same id. None: one document per row.
            valid: which tokens of the blocks' input count in the loss, bool [B, t]; None: none of the following is
                computed.

        Returns:
            [B, T, D] in the compute type; on stages without the final norm the output of the last block. Where `losses`
            or `counted` are set, with `valid`: these, the blocks' summed values, float32 [terms, B, t], and what blocks
            count, float32 [layers of the whole model, counted].
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        positions = positions.view(-1, positions.shape[-1])
        hidden = x if self.tok_embeddings is None else self.tok_embeddings(x)
        inputs = self.build_block_inputs(document_ids, positions, hidden)
        if self.losses or valid is not None:
            hidden, *values_and_counts = self._forward_with_losses(hidden, valid, *inputs)
            return hidden if valid is None else (hidden, *values_and_counts)
        for block in self.blocks():
            hidden = block(hidden, *inputs)
        return hidden if self.norm is None else self.norm(hidden)

    def build_block_inputs(self, document_ids: Tensor | None, positions: Tensor, hidden: Tensor) -> tuple[Any, ...]:
        """Return cos, sin and mask of all blocks, for their input."""
        return (*self.compute_rotation(positions), self.build_masks(document_ids, positions, hidden.dtype))

    def _forward_with_losses(self, hidden: Tensor, valid: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the blocks and the final norm, and collect the values and counts that blocks return."""
        total = loss_terms.sum_values({}, tuple(self.losses), hidden)
        counts = hidden.new_zeros(self.config.layers, self.counted, dtype=torch.float32)
        for number, block in self.layers.items():
            out = block(hidden, *args, valid) if getattr(block, "routes", False) else block(hidden, *args)
            hidden, values, block_counts = (*out, None)[:3] if isinstance(out, tuple) else (out, {}, None)
            total = total + loss_terms.sum_values(values, tuple(self.losses), hidden)
            if block_counts is not None:
                counts[int(number)] = block_counts
        return hidden if self.norm is None else self.norm(hidden), total, counts

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what files of weights hold: the parameters, and the routers' biases, which no optimizer updates."""
        yield from self.named_parameters()
        for name, router in self.routers().items():
            if router.bias is not None:
                yield f"{name}.bias", router.bias

    def routers(self) -> dict[str, Router]:
        """Return the routers of this module by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}

    def build_masks(self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype) -> Any:
        """Return what blocks get as `mask`, once per micro-batch; a family with several kinds of masks overrides it."""
        return self.build_core_inputs(document_ids, positions, dtype)

    def build_core_inputs(self, document_ids: Tensor | None, positions: Tensor, dtype: torch.dtype, *chunk: int) -> Any:
        """Return what cores get: the mask, and for attention of one's own the tokens (`titan.model.masks`)."""
        cores = find_cores(self.blocks())
        mask = self.mask(document_ids, positions, dtype, *chunk) if cores.has_titan else None
        if not cores.has_own:
            return mask
        queries = number_documents(document_ids, positions)
        return add_tokens(mask, queries, self.find_keys(queries) if self.find_keys else queries, *chunk)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this module, in order."""
        return list(self.layers.values())

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        """Return the tensor-parallel plan of a block."""
        return self.BLOCK_PLAN

    def tensor_plan(self) -> dict[str, Placement]:
        """Return the tensor-parallel plan of this module's submodules, by name."""
        plan: dict[str, Placement] = {
            f"layers.{i}.{name}": placement for i in self.layers for name, placement in self.block_plan(int(i)).items()
        }
        if self.tok_embeddings is not None:
            plan["tok_embeddings"] = "vocab"
        if self.head is not None:
            plan |= {"norm": "sequence", "head": "vocab"}
        return plan

    def initial(self) -> dict[str, Initializer]:
        """Return the initial distribution of each parameter, by name.

        Matrices are normal with standard deviation 0.02; those that write to the residual stream
        0.02 / sqrt(2 * layers), so that the stream's variance does not grow with depth (GPT-2: Radford et al. 2019,
        section 2.3). Norms are one.
        """
        residual = Normal(0.02 / math.sqrt(2 * self.config.layers))

        def choose_initial(name: str) -> Initializer:
            if name.endswith("norm.weight"):
                return Ones()
            return residual if name.removesuffix(".weight").endswith(RESIDUAL) else Normal(0.02)

        return {name: choose_initial(name) for name, _ in self.named_parameters()}

    def hf_names(self) -> dict[str, str]:
        """Return the Hugging Face name of each of this module's weights; a tied head has no entry.

        With {} for the number of an expert: a file has a tensor for each, of the parameter's first dimension. With :I/N
        the parameter, its last two dimensions transposed, is the I-th of N equal parts of a tensor's last dimension.
        """

        def build_name(name: str) -> str:
            module = name.removesuffix(".weight")
            if not name.startswith("layers."):
                return f"{OUTER_NAMES[module]}.weight"
            _, index, inner = module.split(".", 2)
            hf_name = self.BLOCK_NAMES[inner]
            suffix = ".weight" if name != module and ":" not in hf_name else ""
            return f"model.layers.{index}.{hf_name}{suffix}"

        return {name: build_name(name) for name, _ in self.named_weights()}


class MoeDecoder(DecoderModel):
    """A decoder with a mixture of experts in its blocks: has the losses that balance their load, and counts it."""

    def __init__(self, config: Any) -> None:
        """Create the modules of a `titan.model.schema_moe.Moe`."""
        super().__init__(config)
        self.losses = config.balance_losses()
        self.counted = config.experts + 1
