"""The schema of Llama 4's text model. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.counts_llama4 import Llama4Counts
from titan.model.schema import WIDEST
from titan.model.schema_moe import Moe

if TYPE_CHECKING:
    from titan.model.llama4 import Llama4Model as Llama4Model


@dataclass(frozen=True, kw_only=True)
class Llama4(Llama4Counts, Moe):
    """Shape of Llama 4's text model: most blocks attend within chunks, and every moe_every-th block has experts.

    Every nope_every-th block attends to the whole document, without rotary embedding. A block with experts has a shared
    expert of the same width as well; scores are sigmoids and scale the inputs of experts.
    """

    ffn: int = setting(16384, "feed-forward width of blocks without experts", at_least=1, cap=WIDEST, unit="powers")
    experts: int = setting(16, "experts of each block that has them", at_least=1, cap=10_000)
    top_k: int = setting(1, "experts that compute each token", at_least=1, cap=10_000)
    expert_ffn: int = setting(8192, "width of an expert's feed-forward layer", at_least=1, cap=WIDEST, unit="powers")
    norm_topk_prob: bool = setting(False, "scale the chosen experts' scores so that their sum is one")
    moe_every: int = setting(1, "of this many consecutive blocks the last one has experts", at_least=1)
    attention_chunk: int | None = setting(
        8192,
        "tokens of a chunk, within which blocks with rotary embedding attend; null: they attend to all",
        at_least=1,
        unit="powers",
    )
    nope_every: int = setting(4, "of this many consecutive blocks the last one has no rotary embedding", at_least=1)
    qk_norm: bool = setting(True, "normalise queries and keys after rotary embedding")
    attn_temperature_tuning: bool = setting(
        True, "scale the queries of blocks without rotary embedding by the logarithm of their position"
    )
    floor_scale: int = setting(8192, "positions below it are not scaled", at_least=1)
    attn_scale: float = setting(0.1, "factor of the logarithm in the scale of queries", at_least=0)

    def build(self) -> Llama4Model:
        """Return the module on the current default device; the caller chooses `torch.device("meta")`."""
        from titan.model.llama4 import Llama4Model as Llama4Model

        return Llama4Model(self)

    def check(self) -> None:
        """Raise ConfigError for settings that contradict each other; see `titan.model.schema.Decoder.check`."""
        super().check()
        if self.moe_every > self.layers:
            raise ConfigError(
                f"model.moe_every={self.moe_every}: none of model.layers={self.layers} blocks would have experts; give "
                f"at most {self.layers}."
            )

    def build_router_options(self) -> dict[str, Any]:
        """Return the options of the router."""
        return {**super().build_router_options(), "sigmoid": True}
