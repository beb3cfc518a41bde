"""A decoder with a mixture of experts in its blocks."""

from __future__ import annotations

from typing import Any

from titan.model.decoder import DecoderModel


class MoeDecoder(DecoderModel):
    """Has the losses that balance the experts' load, and counts it."""

    def __init__(self, config: Any) -> None:
        """Create the modules of a `titan.model.schema_moe.Moe`."""
        super().__init__(config)
        self.losses = config.balance_losses()
        self.counted = config.experts + 1
