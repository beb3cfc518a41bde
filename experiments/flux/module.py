"""The transformer of FLUX.1 with the loss of rectified flow, as titan's trainer calls it.

A row has the ids of a caption and the values of an image. `forward` draws a timestep t and noise from the row's key,
mixes image and noise, x_t = (1 - t) x + t noise, and predicts the velocity noise - x (arXiv:2209.03003, 2403.03206).
Text and image tokens are one sequence, the text first: double-stream blocks have weights for each of the two,
single-stream blocks the same for both. Positions are rotary, by row and column of the image; text is at the origin.

Shapes: B rows, L words, N patches of the image, T = L + N, D hidden width, C values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.flux.draw import NOISE, TIME, draw_normal
from experiments.flux.layers import (
    FREQUENCIES,
    BiasedLinear,
    DoubleBlock,
    Modulation,
    Projector,
    SingleBlock,
    embed_number,
    modulate,
    normalise,
)
from experiments.flux.text import embed_caption, embed_words
from titan.model.decoder import DecoderModel, Placement
from titan.model.init_weights import Initializer, Normal, Ones
from titan.model.layers import IGNORED, inverse_frequencies

INITIAL = Normal(0.02)
ZERO = Normal(0.0)
"""adaLN-Zero: a block begins as the identity, and the predicted velocity as zero."""


class Embedding(nn.Module):
    """Maps patches and words to tokens, and timestep, guidance and caption to one vector of the row.

    Attributes:
        dtype: the compute type; None: that of the weights.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None
        self.image = BiasedLinear(config.patch_values, config.dim)
        self.words = BiasedLinear(config.text_width, config.dim)
        self.time = Projector(FREQUENCIES, config.dim)
        self.guidance = Projector(FREQUENCIES, config.dim) if config.guidance is not None else None
        self.caption = Projector(config.pooled_width, config.dim)

    def forward(
        self, patches: Tensor, words: Tensor, caption: Tensor, times: Tensor, guidance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [B, T, D] and vectors [B, D].

        Args:
            patches: float32 [B, N, C], with noise.
            words: float32 [B, L, text_width].
            caption: float32 [B, pooled_width].
            times: float32 [B], from 0 (image) to 1 (noise).
            guidance: float32 [B]; None for a model without.
        """
        dtype = self.dtype or self.image.linear.weight.dtype
        vector = self.time(embed_number(times).to(dtype)) + self.caption(caption.to(dtype))
        if self.guidance is not None and guidance is not None:
            vector = vector + self.guidance(embed_number(guidance).to(dtype))
        return torch.cat([self.words(words.to(dtype)), self.image(patches.to(dtype))], 1), vector


class LastNorm(nn.Module):
    """Layer normalisation without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, N, D] to [B, N, D]."""
        return normalise(x, self.eps)


class VelocityHead(nn.Module):
    """Maps hidden states to the velocity of each patch, and that to the loss."""

    def __init__(self, dim: int, values: int) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 2)
        self.projection = BiasedLinear(dim, values)

    def forward(self, outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        """Return the summed loss: of each row the mean squared error, times the ids that count.

        Args:
            outputs: what the model's `forward` returns; its B rows may be several copies of the batch's rows.
            targets: int64 [rows, ids of a row]; in rows of weight zero all are ignored.

        Returns:
            A float32 scalar; of several copies a vector: the mean over copies, then the sum of each copy.
        """
        hidden, vector, velocity = outputs
        errors = (self.predict(hidden, vector).float() - velocity).square().mean((1, 2))
        weights = (targets != IGNORED).sum(1).float()
        if len(errors) == len(targets):
            return (errors * weights).sum()
        sums = (errors.view(-1, len(targets)) * weights).sum(1)
        return torch.cat([sums.mean()[None], sums])

    def predict(self, hidden: Tensor, vector: Tensor) -> Tensor:
        """Return the velocity [B, N, C] in the compute type."""
        scale, shift = self.modulation(vector)
        velocity: Tensor = self.projection(modulate(hidden, shift, scale))
        return velocity


class FluxModel(DecoderModel):
    """FLUX.1's transformer (github.com/black-forest-labs/flux)."""

    STREAM_PLAN: ClassVar[Mapping[str, Placement]] = {
        "modulation.projection.linear": "sequence",
        "modulation.projection.bias": "sequence",
        "projections": "region",
        **{f"projections.to_{x}.{part}": "colwise" for x in "qkv" for part in ("linear", "bias")},
        "projections.q_norm": "heads",
        "projections.k_norm": "heads",
    }
    DOUBLE_PLAN: ClassVar[Mapping[str, Placement]] = {
        **STREAM_PLAN,
        "out.linear": "rowwise",
        "out.bias": "sequence",
        "feed_forward": "region",
        "feed_forward.w1.linear": "colwise",
        "feed_forward.w1.bias": "colwise",
        "feed_forward.w2.linear": "rowwise",
        "feed_forward.w2.bias": "sequence",
    }
    SINGLE_PLAN: ClassVar[Mapping[str, Placement]] = {
        **STREAM_PLAN,
        "projections.w1.linear": "colwise",
        "projections.w1.bias": "colwise",
        "out": "rowwise",
        "w2": "rowwise",
        "bias": "sequence",
    }

    def build_embedding(self) -> Embedding:
        """Return what maps rows to tokens and vectors."""
        return Embedding(self.config)

    def build_norm(self) -> LastNorm:
        """Return the norm of the image's tokens after the last block."""
        return LastNorm(self.config.norm_eps)

    def build_head(self) -> VelocityHead:
        """Return what predicts velocities."""
        return VelocityHead(self.config.dim, self.config.patch_values)

    def block_at(self, layer: int) -> nn.Module:
        """Return a block: the first `double` ones have two streams."""
        c = self.config
        shape = (c.dim, c.heads, c.head_size, c.ffn, c.norm_eps)
        return DoubleBlock(*shape, c.text_tokens) if layer < c.double else SingleBlock(*shape)

    def block_plan(self, layer: int) -> Mapping[str, Placement]:
        """Return the tensor-parallel plan of a block."""
        if layer >= self.config.double:
            return self.SINGLE_PLAN
        return {f"{s}.{name}": placement for s in ("text", "image") for name, placement in self.DOUBLE_PLAN.items()}

    def tensor_plan(self) -> dict[str, Placement]:
        """Return the plan of all modules; those outside of the blocks are whole on each rank."""
        plan: dict[str, Placement] = {
            f"layers.{i}.{name}": placement for i in self.layers for name, placement in self.block_plan(int(i)).items()
        }
        names = (name for name, _ in self.named_parameters() if not name.startswith("layers."))
        return plan | {name.removesuffix(".weight"): "sequence" for name in names}

    def compute_frequencies(self) -> Tensor:
        """Return the rotary frequencies: of a pair of a head for one axis, float32 [d / 2]."""
        return torch.cat([inverse_frequencies(size, self.config.rope_theta) for size in self.config.axes])

    def initial(self) -> dict[str, Initializer]:
        """Return the initial distribution of each parameter: adaLN-Zero, else normal with deviation 0.02."""

        def choose_initial(name: str) -> Initializer:
            if name.endswith("_norm.weight"):
                return Ones()
            is_zero = ".bias." in name or ".modulation." in name or name.startswith("head.")
            return ZERO if is_zero or name.endswith(".bias.weight") else INITIAL

        return {name: choose_initial(name) for name, _ in self.named_parameters()}

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Any:
        """Return what the head needs for the loss of rows; where no gradients are computed, at fixed timesteps.

        Args:
            x: ids [B, seq_len].
            positions: unused, since an image has its own.
            document_ids: unused, since a row is one image.
            valid: unused.
            keys: int64 [B], see `titan.parallelism.microbatches.Microbatches`.

        Returns:
            Normalised hidden states of patches [B, N, D], vectors [B, D] and velocities [B, N, C], float32. At K fixed
            timesteps they have K * B rows: all of the first timestep, then those of the next one.
        """
        if keys is None:
            raise RuntimeError("rows of images need keys")
        patches, words = self.split_row(x)
        if torch.is_grad_enabled():
            times = self.draw_times(keys)
        else:
            fixed = self.config.evaluation_times
            times = torch.tensor(fixed, device=x.device).repeat_interleave(len(x))
            patches, words, keys = (t.repeat(len(fixed), *[1] * (t.dim() - 1)) for t in (patches, words, keys))
        noise = draw_normal(keys, patches[0].numel(), NOISE).view_as(patches)
        mixed = torch.lerp(patches, noise, times[:, None, None])
        hidden, vector = self.compute_hidden(mixed, words, times)
        return hidden, vector, noise - patches

    def split_row(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return patches, float32 [B, N, C] from -1 to 1, and ids of words [B, L], of rows of ids."""
        c = self.config
        words, values = x[:, : c.text_tokens], x[:, c.text_tokens :]
        images = values.view(-1, c.height, c.width, c.channels).float() * (2 / (c.vocab - 1)) - 1
        return patchify(images, c.patch), words

    def draw_times(self, keys: Tensor) -> Tensor:
        """Return timesteps: logit-normal, shifted towards noise (arXiv:2403.03206, sections 3.1 and 5.3.2)."""
        c = self.config
        times = torch.sigmoid(c.time_mean + c.time_std * draw_normal(keys, 1, TIME)[:, 0])
        shifted: Tensor = c.time_shift * times / (1 + (c.time_shift - 1) * times)
        return shifted

    def compute_hidden(self, patches: Tensor, words: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised hidden states of patches with noise, and the rows' vectors, for ids of words."""
        c = self.config
        guidance = None if c.guidance is None else torch.full_like(times, c.guidance)
        captions = embed_words(words, c.text_width), embed_caption(words, c.pooled_width)
        return self.compute_from_text(patches, *captions, times, guidance)

    def compute_from_text(
        self, patches: Tensor, words: Tensor, caption: Tensor, times: Tensor, guidance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `compute_hidden`, from vectors of the text; see `Embedding.forward`."""
        hidden, vector = self.tok_embeddings(patches, words, caption, times, guidance)
        cos, sin = self.compute_axes_rotation(words.shape[1])
        for block in self.blocks():
            hidden = block(hidden, vector, cos, sin)
        return self.norm(hidden[:, words.shape[1] :]), vector

    def compute_axes_rotation(self, text_tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of text and image tokens, float32 [1, T, 1, d / 2]."""
        c, device = self.config, self.inv_freq.device
        rows = torch.arange(c.height // c.patch, device=device).repeat_interleave(c.width // c.patch)
        columns = torch.arange(c.width // c.patch, device=device).repeat(c.height // c.patch)
        image = torch.stack([torch.zeros_like(rows), rows, columns], 1)
        places = F.pad(image, (0, 0, text_tokens, 0))
        axes = [places[:, axis : axis + 1].expand(-1, size // 2) for axis, size in enumerate(c.axes)]
        angles = torch.cat(axes, 1).float() * self.inv_freq
        return angles.cos()[None, :, None], angles.sin()[None, :, None]


def patchify(images: Tensor, size: int) -> Tensor:
    """Return patches [B, N, C] of images [B, height, width, channels]; a patch's values by channel, row, column."""
    rows, height, width, channels = images.shape
    parts = images.view(rows, height // size, size, width // size, size, channels).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(rows, height // size * (width // size), channels * size * size)


def unpatchify(patches: Tensor, height: int, width: int, size: int) -> Tensor:
    """Return images [B, height, width, channels] of patches [B, N, C]."""
    rows, channels = len(patches), patches.shape[-1] // size**2
    parts = patches.view(rows, height // size, width // size, channels, size, size).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(rows, height, width, channels)
