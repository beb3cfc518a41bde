"""Settings of the transformer of FLUX.1 that titan trains by rectified flow. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from experiments.flux.counts import FluxCounts
from experiments.flux.shapes import describe_rows
from titan.config.settings import format_value, setting
from titan.errors import ConfigError
from titan.model.schema import WIDEST, Decoder

if TYPE_CHECKING:
    from experiments.flux.module import FluxModel


@dataclass(frozen=True, kw_only=True)
class Flux(FluxCounts, Decoder):
    """Shape of FLUX.1's transformer, of the images that it makes, and of its training by rectified flow.

    `layers` are all blocks, `ffn` the width of a feed-forward layer, and `vocab` the number of values of an id.
    """

    UNUSED: ClassVar[tuple[str, ...]] = (
        "rope_factor", "rope_low", "rope_high", "rope_original", "tied", "logit_cap",
    )  # fmt: skip
    FREE: ClassVar[tuple[str, ...]] = ("time_mean", "time_std", "time_shift", "timesteps")
    SPLIT: ClassVar[tuple[str, ...]] = ("heads", "ffn")
    LACKS: ClassVar[tuple[str, ...]] = ("pipeline", "context", "sequence_parallel", "eight_bit")
    predicts_tokens: ClassVar[bool] = False
    uses_keys: ClassVar[bool] = True

    kv_heads: int = setting(4, "as many as heads: each has its own keys and values", at_least=1, cap=WIDEST)
    vocab: int = setting(256, "values of an id: levels of an image's values, and words", at_least=2, cap=WIDEST)
    rope_theta: float = setting(10000.0, "base of the rotary (RoPE) frequencies", above=0, cap=1e12)
    norm_eps: float = setting(1e-6, "added to the variance in norms", above=0, cap=1)
    double: int = setting(2, "first blocks with a stream for text and one for the image", at_least=0, cap=10_000)
    axes: tuple[int, ...] = setting((4, 14, 14), "of a head's width the parts that rotate by constant, row and column")
    height: int = setting(16, "rows of the image's values", at_least=1, cap=65536)
    width: int = setting(16, "columns of the image's values", at_least=1, cap=65536)
    channels: int = setting(3, "values at a place: 3 of RGB, 16 of FLUX.1's latents", at_least=1, cap=4096)
    patch: int = setting(2, "rows and columns of a patch, which is a token", at_least=1, cap=256)
    text_tokens: int = setting(8, "words of a caption; shorter ones are filled up", at_least=1, cap=65536)
    text_width: int = setting(64, "width of a word's vector; that of T5-XXL is 4096", at_least=1, cap=WIDEST)
    pooled_width: int = setting(32, "width of a caption's vector; that of CLIP-L is 768", at_least=1, cap=WIDEST)
    guidance: float | None = setting(
        None, "guidance that the model is given, as an embedded number; null: it has no embedding of it", cap=1e3
    )
    time_mean: float = setting(0.0, "mean of the logit of timesteps in training", cap=100)
    time_std: float = setting(1.0, "standard deviation of the logit of timesteps in training", above=0, cap=100)
    time_shift: float = setting(
        1.0, "shift of timesteps towards noise, for images of many tokens; 1: none", above=0, cap=1000
    )
    timesteps: int = setting(8, "timesteps at which the validation loss is computed", at_least=1, cap=1000)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.channels * self.patch**2

    @property
    def image_tokens(self) -> int:
        """Patches of an image."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def row_ids(self) -> int:
        """Ids of a row: words and values."""
        return self.text_tokens + self.height * self.width * self.channels

    @property
    def row_format(self) -> str:
        """What the ids of a row mean."""
        return describe_rows(self.text_tokens, self.height, self.width, self.channels, self.vocab)

    @property
    def evaluation_times(self) -> tuple[float, ...]:
        """The timesteps of the validation loss: the centres of equal parts from 0 to 1."""
        return tuple((k + 0.5) / self.timesteps for k in range(self.timesteps))

    @property
    def evaluation_figures(self) -> tuple[str, ...]:
        """Names of the loss at each timestep."""
        return tuple(f"t{time:.4g}" for time in self.evaluation_times)

    def build(self) -> FluxModel:
        """Return the module on the current default device."""
        from experiments.flux.module import FluxModel as FluxModel

        return FluxModel(self)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        super().check()
        for name in ("height", "width"):
            if (size := getattr(self, name)) % self.patch:
                raise ConfigError(
                    f"model.{name}={size}: must be a multiple of model.patch={self.patch}; give "
                    f"{size + -size % self.patch}."
                )
        if self.double > self.layers:
            raise ConfigError(f"model.double={self.double}: must be at most model.layers={self.layers}; give fewer.")

    def check_heads(self) -> None:
        """Raise ConfigError for heads that the attention does not have."""
        if self.kv_heads != self.heads:
            raise ConfigError(
                f"model.kv_heads={self.kv_heads}: each head has its own keys and values; give model.kv_heads="
                f"{self.heads}."
            )
        if self.heads * self.head_size != self.dim:
            raise ConfigError(
                f"model.heads={self.heads}: heads of width {self.head_size} must have model.dim={self.dim} elements "
                f"together; give model.dim={self.heads * self.head_size}."
            )
        if len(self.axes) != 3 or any(size < 2 or size % 2 for size in self.axes) or sum(self.axes) != self.head_size:
            raise ConfigError(
                f"model.axes={format_value(self.axes)}: must be three even numbers whose sum is the width of a head, "
                f"{self.head_size}; change them."
            )

    def check_rows(self, seq_len: int) -> None:
        """Raise ConfigError for rows that are no caption and image."""
        if seq_len != self.row_ids:
            raise ConfigError(
                f"training.seq_len={seq_len}: a row has {self.row_format}, {self.row_ids} ids; give "
                f"training.seq_len={self.row_ids}."
            )
