"""The model axis: shapes of decoders. Free of torch.

The shipped shapes are values in `conf/model/*.yaml`. A new model family is a dataclass that derives from one of these;
what is counted of a shape, `titan.model.counts`, are methods of it that a family may override.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from titan.config.settings import format_value, setting
from titan.errors import ConfigError
from titan.model.built_counts import is_titan_class, use_built_counts
from titan.model.counts import DecoderCounts

if TYPE_CHECKING:
    from titan.model.decoder import DecoderModel


WIDEST = 10**7
"""The largest accepted width and vocabulary."""


class UpdateFactors(NamedTuple):
    """By what an optimizer's settings are multiplied for a parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Decoder(DecoderCounts):
    """Shape of a decoder: pre-norm, RoPE, grouped-query attention, SwiGLU, RMSNorm, no biases.

    A family is a subclass that builds its module, sets its defaults, and counts what its blocks have besides; see
    `titan.model.counts.DecoderCounts`.
    """

    FREE: ClassVar[tuple[str, ...]] = ()
    """Settings on which weights of this shape do not depend."""
    SIZE_FREE: ClassVar[tuple[str, ...]] = ()
    """Settings of a family that stay the same at all sizes of a ladder (`titan.sweep.ladder`)."""
    UNUSED: ClassVar[tuple[str, ...]] = ()
    """Settings that a family has no use for: another value than the default is rejected."""
    AT_MOST: ClassVar[Mapping[str, str]] = {}
    """Settings with those that they may not exceed."""
    SPLIT: ClassVar[tuple[str, ...]] = ("kv_heads", "heads", "ffn", "vocab")
    """Settings that the degree of tensor parallelism must divide."""
    LACKS: ClassVar[tuple[str, ...]] = ()
    """Techniques that a family's module does not support, of `titan.run.model_limits`: they are rejected."""
    predicts_tokens: ClassVar[bool] = True
    """Whether the head gives logits of the next token; if not, `titan.run.model_limits` rejects what needs them."""
    uses_keys: ClassVar[bool] = False
    """Whether the module's `forward` gets `keys`, from which it draws what is random in a step."""

    dim: int = setting(256, "width of the hidden states", at_least=1, cap=WIDEST, unit="powers")
    layers: int = setting(6, "number of blocks", at_least=1, cap=10_000)
    heads: int = setting(4, "query heads", at_least=1, cap=WIDEST)
    kv_heads: int = setting(
        2, "key and value heads; each is shared by heads / kv_heads query heads", at_least=1, cap=WIDEST
    )
    head_dim: int | None = setting(None, "width of a head; null: dim / heads", at_least=2, cap=WIDEST)
    ffn: int = setting(640, "width of the feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    vocab: int = setting(4096, "size of the vocabulary", at_least=1, cap=WIDEST, unit="powers")
    rope_theta: float = setting(500000.0, "base of the rotary (RoPE) frequencies", above=0, cap=1e12)
    rope_factor: float = setting(
        1.0, "scaling factor of long rotary wavelengths (Llama 3.1); 1: none", at_least=1, cap=1e6
    )
    rope_low: float = setting(1.0, "wavelengths above rope_original / rope_low are scaled by rope_factor", above=0)
    rope_high: float = setting(4.0, "wavelengths below rope_original / rope_high are not scaled", above=0)
    rope_original: int = setting(8192, "sequence length before RoPE scaling", at_least=1, cap=10**9, unit="powers")
    norm_eps: float = setting(1e-5, "added to the mean square in RMSNorm", above=0, cap=1)
    tied: bool = setting(False, "tie the head's weight to the embedding's")
    logit_cap: float | None = setting(
        None, "logits are soft-capped: logit_cap * tanh(logits / logit_cap); null: they are not", above=0, later=True
    )

    @property
    def head_size(self) -> int:
        """Width of a head: `head_dim`, or dim / heads."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def rotary_size(self) -> int:
        """Width of the part of a head that RoPE rotates."""
        return self.head_size

    @property
    def row_format(self) -> str | None:
        """What the ids of a row mean, in words that a dataset says too; None: tokens, one after the other."""
        return None

    @property
    def evaluation_figures(self) -> tuple[str, ...]:
        """Names of what the head returns behind the loss where no gradients are computed: evaluation/NAME/loss."""
        return ()

    @abstractmethod
    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ConfigError with the first setting that contradicts another, its value and what to change."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self.UNUSED and value != field.default:
                raise ConfigError(
                    f"model.{field.name}={format_value(value)}: {type(self).__name__} has no use for it; leave it out."
                )
        self.check_heads()
        for name, limit in self.AT_MOST.items():
            if (value := getattr(self, name)) > getattr(self, limit):
                raise ConfigError(
                    f"model.{name}={value}: must be at most model.{limit}={getattr(self, limit)}; give fewer."
                )
        if self.rope_factor != 1 and self.rope_high < self.rope_low:
            raise ConfigError(
                f"model.rope_high={self.rope_high:g}: must be at least model.rope_low={self.rope_low:g}; raise it."
            )

    def check_rows(self, seq_len: int) -> None:
        """Raise ConfigError for a `training.seq_len` other than the ids of a row that the module reads."""

    def check_heads(self) -> None:
        """Raise ConfigError for heads that the family's attention does not have."""
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
                f"model.head_dim={self.head_size}: must be even, because rotary embedding rotates pairs; "
                f"set model.head_dim={self.head_size + self.head_size % 2 or 2}."
            )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not is_titan_class(cls):
            use_built_counts(cls)

    def update_factors(self, optimizer: Any) -> Mapping[str, UpdateFactors]:
        """Return by what the optimizer's settings are multiplied for some parameters, by their names; none: by one.

        They come on top of the optimizer's groups. A family of which hyperparameters transfer between sizes overrides
        it; it raises ConfigError for an optimizer, a `titan.optimizer.schema.Optimizer`, of which it knows no factors.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class Llama(Decoder):
    """Shape of a Llama 2, 3 or 3.x decoder (arXiv:2407.21783)."""

    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.llama import LlamaModel

        return LlamaModel(self)


@dataclass(frozen=True, kw_only=True)
class Qwen3(Decoder):
    """Shape of a dense Qwen3 decoder (arXiv:2505.09388): queries and keys are normalised per head before RoPE."""

    head_dim: int | None = setting(128, "width of a head; null: dim / heads", at_least=2, cap=WIDEST)
    rope_theta: float = setting(1000000.0, "base of the rotary (RoPE) frequencies", above=0, cap=1e12)
    norm_eps: float = setting(1e-6, "added to the mean square in RMSNorm", above=0, cap=1)

    def build(self) -> DecoderModel:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.qwen3 import Qwen3Model

        return Qwen3Model(self)

    def block_parameters(self, layer: int = 0) -> int:
        """Return the exact number of parameters of one block, including the norms of queries and keys."""
        return super().block_parameters(layer) + 2 * self.head_size

    def head_norms(self) -> tuple[str, ...]:
        """Return the norms of queries and keys."""
        return ("q_norm", "k_norm")
