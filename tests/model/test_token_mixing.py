"""Parts of a model that mix tokens outside of its attention cores are rejected where ranks have parts of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.mup import schema as mup
from tests.support.own_models import OwnLlama
from titan.errors import ConfigError
from titan.generation.cache import can_cache
from titan.model import llama, schema, schema_deepseek, schema_llama4, schema_moe, token_mixing
from titan.model.built_counts import Identity
from titan.model.layers import Attention, Block, Embedding, FeedForward, Head, RMSNorm
from titan.model.loss_terms import LossInputs
from titan.model.module_checks import check_module
from titan.model.schema import Llama
from titan.model.token_mixing import TokenMixing, find_token_mixing

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Return a row whose token i is token i - `by`."""
    return F.pad(x, (0, 0, by, -by))


class Changed(llama.LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.change(self)


@dataclass(frozen=True, kw_only=True)
class ChangedLlama(Llama):
    change: Callable[[Any], object] = lambda model: None

    def build(self) -> Changed:
        return Changed(self)


def make_block(change: Callable[[Tensor], Tensor], layer: int = 0) -> Callable[[Any], None]:
    """Return what adds a function of a block's input to it."""

    class TokenShift(Block):
        def attend(self, x: Tensor, *inputs: Any) -> Any:
            return super().attend(x + change(x), *inputs)

    def set_class(model: Any) -> None:
        model.layers[str(layer)].__class__ = TokenShift

    return set_class


def look_at_neighbour(model: Any) -> None:
    class Neighbour(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + shift(x))

    model.layers["0"].feed_forward.__class__ = Neighbour


def shift_keys(model: Any) -> None:
    class ShortKeys(Attention):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
            q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            out: Tensor = self.wo(self.core(q, k + shift(k), v, mask).transpose(1, 2).flatten(-2))
            return out

    model.layers["1"].attention.__class__ = ShortKeys


def normalise_over_time(model: Any) -> None:
    class TimeNorm(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])

    model.layers["0"].ffn_norm.__class__ = TimeNorm


def smear_embeddings(model: Any) -> None:
    class Smeared(Changed):
        def forward(self, x: Tensor, positions: Any = None, document_ids: Any = None, valid: Any = None) -> Any:
            hidden = self.tok_embeddings(x)
            inputs = self.build_block_inputs(document_ids, positions, hidden)
            hidden = hidden + 0.1 * shift(hidden)
            for block in self.blocks():
                hidden = block(hidden, *inputs)
            return self.norm(hidden)

    model.__class__ = Smeared


def join_pairs(model: Any) -> None:
    class Pairs(Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + super().forward(tokens.roll(1, 1))

    model.tok_embeddings.__class__ = Pairs


def predict_two(model: Any) -> None:
    class TwoTokens(Head):
        def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
            loss = super().forward(hidden, targets)
            return loss if targets is None else loss + super().forward(hidden[:, :-1], targets[:, 1:])

    model.head.__class__ = TwoTokens


def compare_tokens(model: Any) -> None:
    class Compared(Block):
        def forward(self, x: Tensor, *inputs: Any) -> Any:
            hidden = super().forward(x, *inputs)
            return hidden, {"smooth": (hidden - shift(hidden)).float().square().mean(-1)}

    model.losses = {"smooth": 0.1}
    model.layers["0"].__class__ = Compared


def use_document_ids(model: Any) -> None:
    """Adds what depends on positions and documents, and a buffer: legitimate, since each rank has its tokens'."""

    class Placed(Changed):
        def forward(self, x: Tensor, positions: Any = None, document_ids: Any = None, valid: Any = None) -> Any:
            hidden = super().forward(x, positions, document_ids, valid)
            return hidden * (1 + positions + document_ids)[..., None].sqrt()

    model.__class__ = Placed


def last_to_first(x: Tensor) -> Tensor:
    """Return the last token of the first document for the first token of the next, zeros for others."""
    out = torch.zeros_like(x)
    out[:, token_mixing.FIRST_TOKENS] = x[:, token_mixing.FIRST_TOKENS - 1]
    return out


@pytest.mark.parametrize(
    ("change", "part", "spoils_regions"),
    [
        pytest.param(make_block(shift), "layers.0 (TokenShift)", True, id="shift"),
        pytest.param(make_block(lambda x: shift(x, -1)), "layers.0 (TokenShift)", True, id="later"),
        pytest.param(make_block(lambda x: shift(x, 100)), "layers.0 (TokenShift)", True, id="far"),
        pytest.param(make_block(last_to_first), "layers.0 (TokenShift)", True, id="one-pair"),
        pytest.param(make_block(lambda x: x.mean(1, keepdim=True), 1), "layers.1 (TokenShift)", True, id="mean"),
        pytest.param(normalise_over_time, "layers.0 (Block)", True, id="norm"),
        pytest.param(look_at_neighbour, "layers.0 (Block)", False, id="ffn"),
        pytest.param(shift_keys, "layers.1 (Block)", False, id="keys"),
        pytest.param(smear_embeddings, "forward of Smeared", True, id="forward"),
        pytest.param(join_pairs, "tok_embeddings (Pairs)", False, id="embedding"),
        pytest.param(predict_two, "head (TwoTokens)", False, id="head"),
        pytest.param(compare_tokens, "the loss term smooth of layers.0 (Compared)", True, id="loss"),
        pytest.param(use_document_ids, None, False, id="positions"),
    ],
)
def test_what_mixes_tokens(change: Callable[[Any], None], part: str | None, spoils_regions: bool) -> None:
    model = ChangedLlama(**SIZES, change=change)
    assert find_token_mixing(model) == TokenMixing(part)
    assert find_token_mixing(model, regions_have_rows=True) == TokenMixing(part if spoils_regions else None)


def test_layouts_that_split_rows_are_rejected_and_nothing_is_cached(capsys: pytest.CaptureFixture[str]) -> None:
    model = ChangedLlama(**SIZES, change=make_block(shift))
    check_module(model, tensor=2)
    name = r"layers\.0 \(TokenShift\) of the model .*ChangedLlama mixes tokens outside of its attention core"
    with pytest.raises(ConfigError, match=rf"parallelism\.context=2: .*{name}.* or give parallelism\.context=1\."):
        check_module(model, context=2)
    with pytest.raises(
        ConfigError, match=rf"sequence_parallel=true: .*{name}.* parallelism\.sequence_parallel=false\."
    ):
        check_module(model, tensor=2, sequence=True)
    assert not can_cache(model.build())
    assert (
        "no keys and values are cached, so each token takes longer: layers.0 (TokenShift) mixes"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "model",
    [
        *(OwnLlama(**SIZES, attention=attention) for attention in ("window", "linear", "whole", "gated")),
        OwnLlama(dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
        mup.Qwen3Moe(layers=2, base_head_dim=16),
        Llama(tied=True, logit_cap=30.0),
        schema.Qwen3(),
        schema_moe.Qwen3Moe(layers=2),
        schema_deepseek.DeepseekV3(layers=2, first_dense=1, heads=4, kv_heads=4),
        schema_llama4.Llama4(layers=4),
    ],
    ids=lambda model: f"{type(model).__name__}-{model.dim}-{getattr(model, 'attention', '')}",
)
def test_models_that_mix_tokens_in_cores_only(model: Any) -> None:
    assert token_mixing._judge_model(Identity(model)) == TokenMixing()


def test_what_is_random_is_not_judged_and_not_cached() -> None:
    model = ChangedLlama(**SIZES, change=make_block(torch.rand_like))
    assert not find_token_mixing(model).is_judged
    assert not can_cache(model.build())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (lambda tokens: tokens.logsumexp.square(), False),
        (lambda tokens: tokens.hidden.square().mean(-1) + tokens.targets, False),
        (lambda tokens: tokens.logits.softmax(-1).amax(-1), False),
        (lambda tokens: tokens.logsumexp - tokens.logsumexp.roll(1), True),
        (lambda tokens: tokens.logsumexp - tokens.logsumexp.mean(), True),
        (lambda tokens: (tokens.targets == tokens.targets.roll(-1)).float(), True),
        (lambda tokens: tokens.hidden.cumsum(0).square().mean(-1), True),
        (lambda tokens: tokens.weights, False),
    ],
    ids=["z", "own", "logits", "roll", "mean", "targets", "cumsum", "error"],
)
def test_loss_terms_of_other_tokens(values: Callable[[LossInputs], Tensor], expected: bool) -> None:
    assert token_mixing.mixes_tokens(values) is expected
