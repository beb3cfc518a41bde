"""What titan can't count of a model of one's own, or a layout can't treat, is rejected when the run is composed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.made_weights import QWEN3_MOE, SMALL
from tests.support.own_models import LinearCore, OwnLlama, WindowCore
from titan.errors import ConfigError
from titan.model import llama
from titan.model.core import KeyValueCore
from titan.model.decoder import DecoderModel
from titan.model.experts import ExpertLinear, Experts
from titan.model.layers import Block, CausalAttention, FeedForward, Linear
from titan.model.module_checks import check_module
from titan.model.qwen3_moe import Qwen3MoeModel
from titan.model.schema import Llama
from titan.model.schema_moe import Qwen3Moe


class Silent(KeyValueCore):
    """States no FLOPs."""


class Inline(nn.Module):
    """Attention that has no core."""

    def __init__(self) -> None:
        super().__init__()
        self.wo = Linear(32, 32)


class Derived(CausalAttention):
    """May compute something else than the class that it is derived from."""


class Anything(nn.Module):
    """No class of titan."""


def set_core(core: Callable[[], nn.Module]) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        block.attention.core = core()

    return change


def set_inline(block: Any) -> None:
    block.attention = Inline()


def add_bias(block: Any) -> None:
    block.feed_forward.bias = nn.Parameter(torch.empty(32))


MOE: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "experts": 8, "top_k": 2}


def derive(base: type[Llama | Qwen3Moe], build_module: Callable[[Any], Any]) -> Any:
    """Return a schema of a user's own, whose module is another one."""
    return dataclass(frozen=True, kw_only=True)(type("Own", (base,), {"build": lambda self: build_module(self)}))


class Changed(llama.LlamaModel):
    """A model with changed blocks."""

    def block(self) -> nn.Module:
        block = super().block()
        self.config.change(block)
        return block


@dataclass(frozen=True, kw_only=True)
class ChangedLlama(Llama):
    change: Any = None

    def build(self) -> Changed:
        return Changed(self)


@dataclass(frozen=True, kw_only=True)
class Counted(ChangedLlama):
    """Counts attention itself, and parameters wrongly."""

    def attention_flops(self, seq_len: float, layer: int = 0) -> float:
        return 1.0

    def block_parameters(self, layer: int = 0) -> int:
        return 5


@pytest.mark.parametrize(
    ("schema", "layout", "expected"),
    [
        pytest.param(OwnLlama(attention="whole"), {"context": 2}, "attention WholeCore of layers.0", id="whole-rows"),
        pytest.param(ChangedLlama(change=set_core(Derived)), {"context": 2}, "attention Derived of", id="derived"),
        pytest.param(
            Counted(change=set_core(Anything)), {"context": 2}, "attention Anything of", id="no-class-of-titan"
        ),
        pytest.param(Counted(change=set_inline), {"context": 2}, "attention Inline of", id="no-core"),
        pytest.param(ChangedLlama(change=set_core(Derived)), {"tensor": 2}, "each head by itself", id="heads"),
        pytest.param(
            ChangedLlama(change=set_core(Silent)), {}, "attention Silent does not state its FLOPs", id="flops"
        ),
        pytest.param(ChangedLlama(change=set_core(Anything)), {}, "FLOPs of attention Anything", id="unknown-flops"),
        pytest.param(Counted(change=set_core(WindowCore)), {}, "and the model counts", id="counted-wrongly"),
    ],
)
def test_what_is_rejected(schema: Llama, layout: dict[str, int], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check_module(schema, **layout)


@pytest.mark.parametrize("attention", ["window", "linear", "gated"])
def test_what_every_layout_can_treat(attention: str) -> None:
    check_module(OwnLlama(attention=attention), context=2, tensor=1 if attention == "linear" else 2)


def test_experts_that_get_no_tokens_from_other_ranks_are_rejected() -> None:
    class Loop(FeedForward):
        def __init__(self) -> None:
            super().__init__(32, 48)
            self.experts = ExpertLinear(8, 32, 48)

    class Model(Qwen3MoeModel):
        def block(self) -> nn.Module:
            block: Any = super().block()
            block.feed_forward = Loop()
            return block

    shape = {field: getattr(QWEN3_MOE, field) for field in ("dim", "layers", "heads", "kv_heads")}
    with pytest.raises(ConfigError, match=r"parallelism\.expert=2: the experts of layers\.0"):
        check_module(derive(Qwen3Moe, Model)(**shape), expert=2)


def test_experts_that_take_no_weights_are_rejected() -> None:
    class Unweighted(Experts):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
            return x

    class Model(Qwen3MoeModel):
        def block(self) -> nn.Module:
            block: Any = super().block()
            block.feed_forward.experts = Unweighted(8, 32, 48)
            return block

    with pytest.raises(ConfigError, match=r"layers\.0\.feed_forward\.experts, a Unweighted, does not take"):
        check_module(derive(Qwen3Moe, Model)(**MOE, expert_ffn=48))


def test_counts_are_those_of_the_module() -> None:
    gated, plain = OwnLlama(**SMALL, attention="gated"), Llama(**SMALL)
    added = plain.dim * plain.heads * plain.head_size
    assert gated.parameters() == plain.parameters() + plain.layers * added
    assert "attention.wg" in gated.block_matmuls()
    assert gated.block_flops(64) == plain.block_flops(64) + 6 * added
    assert "layers.1.attention.wg.weight" in gated.parameter_names()
    assert ChangedLlama(**SMALL, change=add_bias).block_parameters() == plain.block_parameters() + 32
    same = ChangedLlama(**SMALL, change=lambda block: None)
    assert same.parameter_names() == plain.parameter_names()
    assert same.flops_per_token(64) == plain.flops_per_token(64)
    assert same.linear_layers() == plain.linear_layers()


def test_blocks_of_two_kinds_are_counted_apart() -> None:
    model = OwnLlama(**SMALL, attention="window")
    assert list(model.kinds().values()) == [[i for i in range(model.layers) if i % 2 == k] for k in (0, 1)]
    assert model.attention_flops(64, 0) == 12 * model.heads * model.head_size * 5
    assert model.attention_flops(64, 1) == 12 * model.heads * model.head_size * 64
    linear = OwnLlama(**SMALL, attention="linear")
    assert linear.parameters() == Llama(**SMALL).parameters() + (linear.layers + 1) // 2
    assert isinstance(linear.build().layers["0"].attention.core, LinearCore)


def test_a_layer_with_another_forward_is_no_matmul_of_titan() -> None:
    class Scaled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    def change(block: Any) -> None:
        block.feed_forward.w1 = Scaled(block.feed_forward.w1.in_features, block.feed_forward.w1.out_features)

    model = ChangedLlama(**SMALL, change=change)
    assert "feed_forward.w1" not in model.block_matmuls()
    assert model.flops_per_token(64) == Llama(**SMALL).flops_per_token(64)


def test_a_model_without_a_plan_is_counted_and_not_split() -> None:
    class Unplanned(DecoderModel):
        def block(self) -> nn.Module:
            c = self.config
            return Block(c.dim, c.heads, c.kv_heads, c.head_size, c.ffn, c.norm_eps)

    model = derive(Llama, Unplanned)(**SMALL)
    assert model.parameters() == Llama(**SMALL).parameters()
    check_module(model)
    with pytest.raises(ConfigError, match="declares no BLOCK_PLAN"):
        check_module(model, tensor=2)


def test_a_head_that_skips_settings_of_the_loss_is_rejected() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(SMALL["vocab"], SMALL["dim"]))

    class Model(llama.LlamaModel):
        def build_head(self) -> Any:
            return Plain()

    class Images(derive(Llama, Model)):  # type: ignore[misc]
        predicts_tokens = False

    with pytest.raises(ConfigError, match="the head is a Plain, on which settings of logits and the loss"):
        check_module(derive(Llama, Model)(**SMALL))
    check_module(Images(**SMALL))


def test_experts_of_another_number_are_rejected() -> None:
    wider = derive(Qwen3Moe, lambda model: Qwen3MoeModel(dataclasses.replace(model, expert_ffn=2 * model.expert_ffn)))
    with pytest.raises(ConfigError, match=r"experts of layers\.0 have 98,304 .* counts 49,152"):
        check_module(wider(**MOE, expert_ffn=64))
