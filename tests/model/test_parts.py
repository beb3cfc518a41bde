"""The parts of a block that are compiled by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from titan.model.experts import MixtureOfExperts, MoeBlock
from titan.model.layers import RMSNorm
from titan.model.parts import Part, is_one_part, list_parts
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_moe import Qwen3Moe


def block_of(schema: Any, layer: int = 0) -> nn.Module:
    with torch.device("meta"):
        model: Any = schema.build()
    return model.blocks()[layer]  # type: ignore[no-any-return]


class OtherBlock(MoeBlock):
    """A block that computes attention in another way than `attend`."""

    def forward(self, x: Any, cos: Any, sin: Any, mask: Any = None, valid: Any = None) -> Any:
        return self.feed_forward(self.attention(self.attention_norm(x), cos, sin, mask), valid)[0]


class SandwichBlock(MoeBlock):
    """A block with one more norm in `attend`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_norm = RMSNorm(config.dim, config.norm_eps)

    def attend(self, x: Any, cos: Any, sin: Any, mask: Any = None) -> Any:
        x = x + self.post_norm(self.attention(self.attention_norm(x), cos, sin, mask))
        return x, self.ffn_norm(x)


def is_mixture(module: nn.Module) -> bool:
    return isinstance(module, MixtureOfExperts)


QWEN = Qwen3Moe(dim=32, layers=1, heads=4, kv_heads=2, vocab=64, experts=4, top_k=2, expert_ffn=16)
DEEPSEEK = DeepseekV3(dim=32, layers=2, heads=4, kv_heads=4, vocab=64, experts=8, top_k=2, expert_ffn=16, first_dense=1)
EXPERTS = ["attention", "feed_forward.router", "feed_forward.experts"]


@pytest.mark.parametrize(
    ("block", "breaks", "hooked", "names"),
    [
        pytest.param(block_of(QWEN), lambda module: False, "", [""], id="one-graph"),
        pytest.param(block_of(QWEN), is_mixture, "", EXPERTS, id="experts"),
        pytest.param(block_of(DEEPSEEK, 1), is_mixture, "", [*EXPERTS, "feed_forward.shared"], id="shared-experts"),
        pytest.param(block_of(DEEPSEEK), is_mixture, "", [""], id="dense-block"),
        pytest.param(
            OtherBlock(QWEN),
            is_mixture,
            "",
            ["attention_norm", "attention", "ffn_norm", *EXPERTS[1:]],
            id="another-forward",
        ),
        pytest.param(
            SandwichBlock(QWEN),
            is_mixture,
            "",
            ["attention_norm", "attention", "ffn_norm", *EXPERTS[1:], "post_norm"],
            id="another-attend",
        ),
        pytest.param(
            block_of(DEEPSEEK), is_mixture, "feed_forward", ["attention", "feed_forward"], id="hooks-of-feed-forward"
        ),
        pytest.param(
            block_of(QWEN),
            lambda module: False,
            "attention",
            ["attention_norm", "attention", "ffn_norm", "feed_forward"],
            id="hooks-of-attention",
        ),
        pytest.param(nn.ModuleList([nn.Linear(2, 2), nn.SiLU()]), lambda module: False, "", ["0"], id="container"),
        pytest.param(nn.Sequential(nn.SiLU()), lambda module: isinstance(module, nn.SiLU), "", [], id="nothing"),
    ],
)
def test_the_parts_of_a_block(block: nn.Module, breaks: Any, hooked: str, names: list[str]) -> None:
    parts = list_parts(block, breaks, lambda module: hooked != "" and module is block.get_submodule(hooked))
    assert [part.name for part in parts] == names
    assert is_one_part(parts) == (names == [""])
    modules = [module for part in parts for module in part.list_modules()]
    assert len(modules) == len(set(modules))
    weights = {id(p) for m in modules for p in m.parameters()}
    if names:
        assert weights == {id(p) for p in block.parameters()}


def test_a_method_is_replaced() -> None:
    block: Any = block_of(QWEN)
    Part(block, "attend").replace(lambda attend: lambda *args: (attend, args))
    assert block.attend(1, 2)[1] == (1, 2)
