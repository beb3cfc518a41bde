"""Attention that does not do what its class states is rejected: a layout would train another model with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.model.test_module_checks import ChangedLlama
from tests.support.own_models import CORES, LinearCore, OwnLlama, WholeCore, WindowCore
from titan.errors import ConfigError
from titan.model.core import KeyValueCore, State
from titan.model.masks import CoreInputs
from titan.model.module_checks import check_module
from titan.model.schema import Llama


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)


class Costed(KeyValueCore):
    def count_flops(self, heads: int, width: int, seq_len: float) -> float:
        return 1.0


class Causal(Costed):
    """Ignores documents."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        return attend(q, k, v, None, is_causal=True)


class Open(Costed):
    """Sees later tokens of a document."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        ids, keys = tokens.queries.document_ids, tokens.keys.document_ids
        return attend(q, k, v, (ids[..., None] == keys[..., None, :])[:, None])


class Indexed(Costed):
    """A window by indices of keys instead of positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        near = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(-2)
        return attend(q, k, v, tokens.find_visible() & near)


class FirstRow(Costed):
    """Takes the positions of the first row for those of all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        return attend(q, k, v, tokens.find_visible()[:1])


class Shaped(Costed):
    """Returns tokens before heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        return attend(q, k, v, tokens.find_visible()).transpose(1, 2)


class Dropping(Costed):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        return attend(q, k, v, tokens.find_visible(), dropout_p=0.5)


class Mixing(Costed):
    """Adds the mean of all heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        out = attend(q, k, v, tokens.find_visible())
        return out + out.mean(1, keepdim=True)


class WholeMean(WholeCore):
    """Subtracts the mean of the queries of a row up to each: right for whole rows only."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        visible = tokens.find_visible().float()
        return super().attend(q - visible @ q / visible.sum(-1, keepdim=True), k, v, tokens)


class Forgetting(LinearCore):
    """Hands on the state of its tokens without earlier ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs, state: State | None = None) -> Any:
        out, _ = super().attend(q, k, v, tokens, state)
        return out, super().attend(q, k, v, tokens, self.init_state(q, k, v))[1]


class Strict(Costed):
    """Can't be computed here: not judged."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        raise RuntimeError("needs a GPU")


class Counting(Costed):
    """Takes indices of keys for positions of queries: raises for some queries of a row."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        distance = torch.arange(k.shape[2])[:, None] - tokens.keys.positions[..., None, :]
        return attend(q, k, v, (-0.5 * distance[:, None]).masked_fill(~tokens.find_visible(), -torch.inf))


class FourHeads(Costed):
    """Has a slope for each of four heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        distance = tokens.queries.positions[..., None] - tokens.keys.positions[..., None, :]
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
        return attend(q, k, v, (-slopes * distance[:, None]).masked_fill(~tokens.find_visible(), -torch.inf))


class Unchunked(LinearCore):
    """Computes chunks of at least four tokens only."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs, state: State | None = None) -> Any:
        if q.shape[2] < 4:
            raise ValueError
        return super().attend(q, k, v, tokens, state)


class Sloped(Costed):
    """Has a bias by distance (arXiv:2108.12409), with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5]), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: CoreInputs) -> Tensor:
        distance = tokens.queries.positions[..., None] - tokens.keys.positions[..., None, :]
        bias = (-self.slopes * distance)[:, None].masked_fill(~tokens.find_visible(), -torch.inf)
        return attend(q, k, v, bias)


class Attribute(Sloped):
    def __init__(self) -> None:
        super().__init__()
        del self.slopes
        self.slopes = torch.tensor([0.5])


def check(core: type[nn.Module], **degrees: int) -> None:
    def change(block: Any) -> None:
        block.attention.core = core()

    check_module(ChangedLlama(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, change=change), **degrees)


@pytest.mark.parametrize(
    ("core", "expected"),
    [
        (Causal, "attention Causal of layers.0 lets a token see another document"),
        (Open, "lets a token see later ones"),
        (Indexed, "other results for some queries of a row; compare positions"),
        (FirstRow, "other results for rows of different lengths"),
        (Shaped, "returns [1, 12, 4, 8] for queries of [1, 4, 12, 8]"),
        (Dropping, "gives other results for the same tokens"),
        (Counting, "raises RuntimeError for some queries of a row (The size of tensor "),
        (Unchunked, "raises ValueError for a row in chunks; return the state of all earlier tokens, or"),
        (Forgetting, "other results for a row in chunks"),
        (Sloped, "nothing sets the values of the buffer layers.0.attention.core.slopes"),
        (Attribute, "the tensor slopes of layers.0.attention.core is neither a parameter nor a buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_rejected(core: type[nn.Module], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(core)
    assert expected in str(error.value)


def test_heads_that_need_others_are_rejected_where_ranks_have_some() -> None:
    check(Mixing)
    with pytest.raises(ConfigError, match=r"some of the heads by themselves; give parallelism\.tensor=1"):
        check(Mixing, tensor=2)


def test_heads_that_raise_without_others_are_rejected_where_ranks_have_some() -> None:
    check(FourHeads)
    with pytest.raises(ConfigError, match=r"FourHeads of layers\.0 raises RuntimeError for some of the heads .*=1"):
        check(FourHeads, tensor=2)


@pytest.mark.parametrize("core", [*CORES.values(), WholeMean, Strict], ids=lambda core: core.__name__)
def test_what_is_right_is_accepted(core: type[nn.Module]) -> None:
    check(core, tensor=1 if issubclass(core, LinearCore) else 2)


def test_buffers_that_the_model_sets_are_accepted() -> None:
    class Model(OwnLlama):
        def build(self) -> Any:
            model = super().build()
            set_others = model.init_buffers

            def init_buffers(device: Any) -> None:
                set_others(device)
                for block in model.blocks():
                    block.attention.core = core = Sloped()
                    core.slopes = torch.tensor([0.5], device=device)

            model.init_buffers = init_buffers
            model.init_buffers("meta")
            return model

    check_module(Model(attention="window"), context=2)


def test_dropout_is_rejected() -> None:
    def change(block: Any) -> None:
        block.attention.core = nn.Sequential(WindowCore(), nn.Dropout(0.1))

    schema: Llama = ChangedLlama(dim=32, layers=1, heads=4, kv_heads=2, ffn=48, vocab=64, change=change)
    with pytest.raises(ConfigError, match="is a Dropout, and titan seeds no randomness"):
        check_module(schema)
