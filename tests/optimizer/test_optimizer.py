"""Optimizers on one device: what they compute, in which types, for which parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from titan.config import settings
from titan.errors import ConfigError
from titan.model.schema import Llama
from titan.optimizer import mixed_precision
from titan.optimizer.muon import compute_scale, orthogonalise_matrix
from titan.optimizer.schema import LARGEST_BETA2, SGD, AdamW, Group, Muon, Optimizer

NAMES = {
    "tok_embeddings.weight": (6, 4),
    "layers.0.attention.wq.weight": (8, 4),
    "layers.0.attention.wo.weight": (4, 8),
    "layers.0.ffn_norm.weight": (4,),
    "norm.weight": (4,),
    "head.weight": (6, 4),
}
MATRICES = [name for name in NAMES if name.startswith("layers.") and "norm" not in name]
IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]
BF16 = torch.bfloat16

Weights = dict[str, nn.Parameter]


def made(how: Optimizer, dtype: torch.dtype = torch.float32, names: Any = NAMES) -> tuple[Weights, Any]:
    """Parameters of chance values, always the same, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    weights = {n: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for n, shape in names.items()}
    return weights, how.build(weights.items())


def step(weights: Weights, optimizer: Any, number: int = 0, bad: float | None = None) -> None:
    """Run a step with random gradients; `bad` is passed as the trainer passes it."""
    generator = torch.Generator().manual_seed(100 + number)
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        if bad:
            weight.grad[0] = torch.nan
    if bad is not None:
        optimizer.found_inf = torch.tensor(bad)
    optimizer.step()


def after(how: Optimizer, steps: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The weights after some steps."""
    weights, optimizer = made(how, dtype)
    for number in range(steps):
        step(weights, optimizer, number)
    return {name: weight.detach() for name, weight in weights.items()}


def content(weights: Weights, optimizer: Any) -> dict[str, Tensor]:
    """Return clones of all weights and all state."""
    found = {name: weight.detach().clone() for name, weight in weights.items()}
    for name, weight in weights.items():
        found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[weight].items()}
    return found


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(AdamW(), id="adamw"),
        pytest.param(AdamW(decay="matrices", groups={"a": Group(match=("norm*",), lr=0.5)}), id="adamw-groups"),
        pytest.param(SGD(momentum=0.9), id="sgd"),
        pytest.param(Muon(), id="muon"),
    ],
)
def test_implementations_agree(how: Any, implementation: Any) -> None:
    reference = after(how)
    found = after(settings.build(type(how), settings.to_plain(how) | {"implementation": implementation}))
    for name in reference:
        torch.testing.assert_close(found[name], reference[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("weights", "moments"), [("fp32", "bf16"), ("bf16", "auto"), ("bf16", "fp32"), ("bf16", "bf16")]
)
def test_what_is_not_fp32_is_rounded_once(weights: str, moments: Any, implementation: Any) -> None:
    """Each step is torch's in fp32 on what is kept, then rounded."""
    how = AdamW(moments=moments, implementation=implementation, lr=0.01)
    dtype = {"fp32": torch.float32, "bf16": BF16}[weights]
    kept = {"auto": dtype, "fp32": torch.float32, "bf16": BF16}[moments]
    ours, optimizer = made(how, dtype)
    exact, reference = made(AdamW(implementation=implementation, lr=0.01))
    for name in NAMES:
        exact[name].data.copy_(ours[name].data)
    for number in range(3):
        step(ours, optimizer, number)
        for name in NAMES:
            exact[name].grad = ours[name].grad.float()  # type: ignore[union-attr]
        reference.step()
        for name in NAMES:
            mine, theirs = optimizer.state[ours[name]], reference.state[exact[name]]
            assert torch.equal(ours[name], exact[name].to(dtype))
            exact[name].data.copy_(ours[name].data)
            assert mine["step"] == theirs["step"] == number + 1
            for key in ("exp_avg", "exp_avg_sq"):
                assert mine[key].dtype == kept
                assert torch.equal(mine[key], theirs[key].to(kept))
                theirs[key].copy_(mine[key])


def test_pieces_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = after(AdamW(moments="bf16"))
    sizes: list[int] = []
    update = mixed_precision.MixedPrecisionAdamW._update_bucket

    def watched(self: Any, bucket: list[mixed_precision.Piece], group: dict[str, Any]) -> None:
        sizes.append(sum(piece.weight.numel() for piece in bucket))
        update(self, bucket, group)

    monkeypatch.setattr(mixed_precision, "BUCKET", 9)
    monkeypatch.setattr(mixed_precision.MixedPrecisionAdamW, "_update_bucket", watched)
    pieces = after(AdamW(moments="bf16"))
    assert max(sizes) <= 9
    assert all(torch.equal(whole[name], pieces[name]) for name in NAMES)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(AdamW(), id="adamw"),
        pytest.param(AdamW(moments="bf16"), id="adamw-bf16"),
        pytest.param(Muon(), id="muon"),
        pytest.param(Muon(moments="bf16"), id="muon-bf16"),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(BF16, id="bf16")])
def test_a_bad_step_changes_nothing_and_needs_no_host(how: Optimizer, dtype: torch.dtype) -> None:
    weights, optimizer = made(how, dtype)
    assert optimizer._step_supports_amp_scaling
    step(weights, optimizer, 0, bad=0.0)
    before = content(weights, optimizer)
    step(weights, optimizer, 1, bad=1.0)
    now = content(weights, optimizer)
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name], now[name]) for name in before)
    step(weights, optimizer, 2, bad=0.0)
    later = content(weights, optimizer)
    assert all(not torch.equal(before[name], later[name]) for name in before if not name.endswith("weight"))
    assert any(not torch.equal(before[name], later[name]) for name in MATRICES)


def test_other_implementations_leave_the_question_to_the_caller() -> None:
    for how in (AdamW(moments="bf16", implementation="foreach"), Muon(implementation="for-loop")):
        assert not made(how)[1]._step_supports_amp_scaling


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("shape", "iterations"), [((8, 4), 5), ((4, 8), 5), ((6, 6), 3)])
def test_muon_is_torchs(adjust: Any, nesterov: bool, shape: tuple[int, int], iterations: int) -> None:
    how = Muon(adjust=adjust, nesterov=nesterov, iterations=iterations, newton_schulz="bf16", lr=0.02)
    name = MATRICES[0]
    weights, optimizer = made(how, names={name: shape})
    theirs = nn.Parameter(weights[name].detach().clone())
    reference = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, ns_steps=iterations, adjust_lr_fn=adjust
    )
    for number in range(4):
        step(weights, optimizer, number)
        theirs.grad = weights[name].grad
        reference.step()
    torch.testing.assert_close(weights[name].detach(), theirs.detach(), rtol=1e-6, atol=1e-7)


def test_muon_is_adamw_for_all_but_the_blocks_matrices() -> None:
    muon, adamw = after(Muon()), after(AdamW())
    for name in NAMES:
        assert torch.allclose(muon[name], adamw[name], rtol=1e-6, atol=1e-7) == (name not in MATRICES)


@given(st.integers(1, 12), st.integers(1, 12), st.floats(1e-3, 1e3))
def test_orthogonalised_matrices_have_singular_values_near_one(rows: int, columns: int, size: float) -> None:
    """Whatever their size and shape; of a chance matrix the least one may take more iterations to come up."""
    matrix = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 13 + columns))
    values = torch.linalg.svdvals(orthogonalise_matrix(matrix, 12))
    assert float(values.max()) < 1.3
    assert float(values.min()) > 0.5


def test_nothing_to_orthogonalise_is_no_fault() -> None:
    assert not orthogonalise_matrix(torch.zeros(3, 5), 5).any()


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (128, 128)])
def test_updates_of_matrices_are_as_large_as_adamws(shape: tuple[int, int]) -> None:
    """About 0.2 per element (arXiv:2502.16982)."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    update = orthogonalise_matrix(matrix, 5) * compute_scale("match_rms_adamw", shape)
    assert 0.14 < float(update.square().mean().sqrt()) < 0.24


@given(st.integers(-100, 100), st.integers(0, 127))
def test_a_second_moment_in_bf16_falls_up_to_the_bound_and_not_beyond(exponent: int, mantissa: int) -> None:
    value = torch.tensor(2.0**exponent * (1 + mantissa / 128), dtype=BF16)
    assert (value.float() * LARGEST_BETA2).to(BF16) < value
    low = torch.tensor(2.0**exponent * (1 + 1 / 128), dtype=BF16)
    assert (low.float() * (LARGEST_BETA2 + 1e-4)).to(BF16) == low


@pytest.mark.parametrize(
    ("changes", "decays"),
    [
        pytest.param({}, [0.1] * 6, id="all"),
        pytest.param({"decay": "matrices"}, [0.0, 0.1, 0.1, 0.0, 0.0, 0.1], id="matrices"),
        pytest.param(
            {"groups": {"a": {"match": ["*.wq.*"], "weight_decay": 0.5}, "b": {"match": ["layers.*"]}}},
            [0.1, 0.5, 0.1, 0.1, 0.1, 0.1],
            id="the-first-match-holds",
        ),
        pytest.param(
            {"decay": "matrices", "groups": {"a": {"match": ["*norm*"], "weight_decay": 0.3}}},
            [0.0, 0.1, 0.1, 0.3, 0.3, 0.1],
            id="a-group-has-its-way",
        ),
    ],
)
@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
def test_decay_is_for_what_was_said(kind: Any, changes: dict[str, Any], decays: list[float]) -> None:
    weights, optimizer = made(settings.build(kind, {"weight_decay": 0.1, **changes}, "optimizer"))
    found = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [found[id(weight)] for weight in weights.values()] == decays


@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
def test_a_groups_rate_is_its_factor_of_the_optimizers(kind: Any) -> None:
    groups = {
        "still": {"match": ["tok*", "layers.0.attention.wq*"], "lr": 0.0},
        "slow": {"match": ["norm*"], "lr": 0.5},
    }
    weights, optimizer = made(settings.build(kind, {"lr": 0.02, "groups": groups}, "optimizer"))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(w)] for w in weights.values()] == [0.0, 0.0, 0.02, 0.02, 0.01, 0.02]
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    step(weights, optimizer)
    still = [name for name in NAMES if torch.equal(start[name], weights[name])]
    assert still == ["tok_embeddings.weight", "layers.0.attention.wq.weight"]


@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
def test_a_pattern_that_no_name_matches_is_rejected(kind: Any) -> None:
    how = kind(groups={"mine": Group(match=("norm*", "heads.*"))})
    with pytest.raises(ConfigError, match=r"optimizer\.groups\.mine\.match=.*matches heads\.\*"):
        how.check(Llama())
    kind(groups={"mine": Group(match=("norm*", "head.*"))}).check(Llama())
    with pytest.raises(ConfigError, match=r"matches head\.\*"):
        kind(groups={"mine": Group(match=("head.*",))}).check(Llama(tied=True))


@pytest.mark.parametrize(
    ("how", "weight_bytes", "rejected"),
    [
        pytest.param(AdamW(betas=(0.9, 0.999)), 4, False, id="fp32"),
        pytest.param(AdamW(betas=(0.9, 0.999), moments="bf16"), 4, True, id="bf16"),
        pytest.param(AdamW(betas=(0.9, 0.996), moments="bf16"), 4, False, id="just"),
        pytest.param(Muon(betas=(0.9, 0.997), moments="bf16"), 4, True, id="just-not"),
        pytest.param(AdamW(betas=(0.9, 0.999)), 2, True, id="bf16-weights"),
        pytest.param(AdamW(betas=(0.9, 0.999), moments="fp32"), 2, False, id="bf16-weights-fp32-moments"),
    ],
)
def test_a_decay_too_slow_for_bf16_is_rejected(how: AdamW, weight_bytes: int, rejected: bool) -> None:
    if rejected:
        with pytest.raises(ConfigError, match=r"optimizer\.betas=\[0\.9,0\.99\d*\].*optimizer\.moments=fp32"):
            how.check(Llama(), weight_bytes)
    else:
        how.check(Llama(), weight_bytes)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(BF16, id="bf16")])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(AdamW(), id="adamw"),
        pytest.param(AdamW(moments="bf16"), id="adamw-bf16"),
        pytest.param(AdamW(moments="fp32"), id="adamw-fp32"),
        pytest.param(SGD(), id="sgd"),
        pytest.param(SGD(momentum=0.9), id="sgd-momentum"),
        pytest.param(Muon(), id="muon"),
        pytest.param(Muon(moments="bf16"), id="muon-bf16"),
    ],
)
def test_state_takes_the_bytes_that_are_counted(how: Optimizer, dtype: torch.dtype) -> None:
    weights, optimizer = made(how, dtype)
    step(weights, optimizer)
    stored = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
    matrices = sum(weights[name].numel() for name in MATRICES)
    others = sum(weight.numel() for weight in weights.values()) - matrices
    counted = how.state_bytes(matrices, others, dtype.itemsize)
    assert sum(v.numel() * v.element_size() for v in stored) == counted


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param(AdamW(), "", id="plain"),
        pytest.param(
            AdamW(moments="bf16", decay="matrices"), "moments in bf16; weight decay for matrices only", id="bf16"
        ),
        pytest.param(SGD(groups={"norms": Group(match=("*norm*",))}), "groups norms", id="groups"),
        pytest.param(Muon(), "muon for the blocks' matrices, adamw for the rest", id="muon"),
    ],
)
def test_description(how: Optimizer, text: str) -> None:
    assert how.describe() == text
