"""Experts in 8 bits: each one is a linear layer with the rows that it gets, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.precision.test_precision import BOUNDS, SGD, SHAPE, SMALL, expected
from tests.support.runs import are_identical, compose_tiny_run, compute_difference, read_step_records, train_run
from tests.support.tiers import full, list_further
from titan.model.expert_ops import multiply_grouped
from titan.model.experts import ExpertLinear
from titan.model.schema_moe import Qwen3Moe
from titan.precision import low_precision
from titan.precision.low_precision import set_compute_dtype
from titan.precision.schema import Precision

MOE = (
    "model=qwen3_moe_debug", "model.experts=4", "model.top_k=2", "model.expert_ffn=64", "model.head_dim=16",
    "model.aux_loss=0.1", "training.seed=3",
)  # fmt: skip
"""A seed with which no layout's rounding lets a token choose another expert: that alone moves a gradient by 15 %."""
LAYOUTS = {
    "ep": ("parallelism=fsdp", "parallelism.expert=2"),
    "tp": ("parallelism=tp",),
    "fsdp": ("parallelism=fsdp",),
    "ep_in_tp": ("parallelism=tp", "parallelism.expert=2"),
    "ep_pp": ("parallelism=pp", "parallelism.shard=2", "parallelism.expert=2", "parallelism.schedule=1F1B"),
}
ENDS = (7, 7, 39, 44)
"""Rows of four experts, of which one has none; six rows belong to no expert."""


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and a gradient of the results."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(size, generator=generator).bfloat16() for size in ((50, 64), (4, 96, 64), (50, 96)))
    return x * torch.logspace(-2, 2, 50)[:, None].bfloat16(), w, g


def computed(product: Any, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Result and both gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = product(x, w, torch.tensor(ENDS, dtype=torch.int32))
    return out.detach(), *torch.autograd.grad(out, (x, w), g)


@pytest.mark.parametrize("compiled", [False, full(True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", SMALL)
def test_each_expert_is_a_linear_layer_of_rounded_operands(kind: str, compiled: bool) -> None:
    x, w, g = operands()
    product = low_precision.build_expert_product(kind, emulate=True)
    function = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    out, of_x, of_w = computed(function, x, w, g)
    for expert, (start, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        if start == end:
            assert not of_w[expert].any()
            continue
        rows = [torch.cat([t[start:end], t.new_zeros(-(end - start) % 32, t.shape[1])]) for t in (x, g)]
        wanted = expected(kind, rows[0], w[expert], rows[1])
        for found, right in zip((out[start:end], of_x[start:end], of_w[expert]), wanted, strict=True):
            right = right[: len(found)]
            assert float((found.float() - right).norm() / right.norm()) < 4e-3, "rounding of the result to bf16"
    assert not out[ENDS[-1] :].any()
    assert not of_x[ENDS[-1] :].any()


@pytest.mark.parametrize("kind", SMALL[:3])
def test_emulation_computes_what_the_kernel_does(kind: str) -> None:
    """torch has the kernels of float8 for CPUs too."""
    for one, other in zip(
        *(computed(low_precision.build_expert_product(kind, e), *operands()) for e in (True, False)), strict=True
    ):
        assert float((one.float() - other.float()).norm() / one.float().norm()) < 1e-2


def test_a_kernel_gets_a_multiple_of_rows_and_no_others_count() -> None:
    def kernel(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        assert not (ends % 16).any()
        assert len(x) % 16 == 0
        out = multiply_grouped(x, weight, ends)
        return torch.where((torch.arange(len(x)) < ends[-1])[:, None], out, torch.nan)

    x, w, g = operands()
    x[ENDS[-1] :] = torch.nan  # rows that no expert gets may have any value
    found = computed(lambda *args: low_precision.multiply_padded(*args, 16, kernel), x, w, g)
    wanted = computed(multiply_grouped, x.nan_to_num(), w, g)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("settings", "tensor", "taken", "why"),
    [
        pytest.param({}, 1, {"w1", "w2", "w3"}, None, id="all"),
        pytest.param({}, 4, {"w1", "w2", "w3"}, None, id="whole-on-tensor-ranks"),
        pytest.param({"skip": ("head", "*.experts.*")}, 1, set(), "precision.skip", id="skipped"),
        pytest.param({"skip": ("head", "*.experts.w2")}, 1, {"w1", "w3"}, "precision.skip", id="one-skipped"),
        pytest.param({"min_size": 64}, 1, set(), "48 is below precision.min_size", id="size"),
    ],
)
def test_experts_are_chosen_as_linear_layers(settings: Any, tensor: int, taken: set[str], why: str | None) -> None:
    model = Qwen3Moe(dim=128, layers=1, heads=4, kv_heads=4, head_dim=64, expert_ffn=48, vocab=64)
    choice = Precision("bf16", matmuls="float8", **settings).select_layers(model.matmuls(), tensor)
    name = "layers.0.feed_forward.experts."
    assert {n.removeprefix(name) for n in choice.quantized if n.startswith(name)} == taken
    assert {choice.exclusions[n] for n in choice.exclusions if n.startswith(name)} == ({why} if why else set())
    assert not any("router" in n for n in choice.quantized)
    with torch.device("meta"):
        module = model.build()
    set_compute_dtype(module, Precision("bf16", matmuls="float8", **settings), choice.quantized)
    experts = {
        n for n, m in module.named_modules() if isinstance(m, ExpertLinear) and m.product is not multiply_grouped
    }
    assert {n.removeprefix(name) for n in experts} == taken


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Any] = {}

    def of(precision: str, *layout: str) -> Any:
        if (precision, layout) not in known:
            settings = (*SHAPE, *SGD, *MOE, f"precision={precision}", *layout)
            run = compose_tiny_run(tmp_path_factory.mktemp("experts"), *settings)
            known[precision, layout] = run, train_run(run)
        return known[precision, layout]

    return of


CASES = [
    pytest.param(kind, layout, id=f"{kind}-{layout}")
    for kind in SMALL
    for layout in LAYOUTS
    if (kind, layout) != ("float8", "ep_pp")  # an expert's scales are those of a micro-batch's few rows
]


@pytest.mark.full
@pytest.mark.parametrize(("precision", "layout"), list_further(lambda: CASES))
def test_layouts_differ_by_rounding_only(precision: str, layout: str, trained: Any) -> None:
    (one, (alone,)), (many, ranks) = trained(precision), trained(precision, *LAYOUTS[layout])
    gradients, losses, norms = BOUNDS[precision]
    first = {name: tensor for rank in ranks for name, tensor in rank.first.items()}
    found = {name: tensor for rank in ranks for name, tensor in rank.gradients.items()}
    assert are_identical(first, alone.first)
    assert compute_difference(found, alone.gradients) <= gradients
    for line, wanted in zip(read_step_records(many), read_step_records(one), strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=losses)
        assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=norms)


@pytest.mark.full
def test_start_says_which_experts_are_in_8_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how = ("precision=float8", "precision.skip=[head,layers.0.*.w1]", "training.steps=1", *SHAPE, *MOE)
    train_run(compose_tiny_run(tmp_path, *how))
    out = capfd.readouterr().out
    assert "13 of 15 matmuls in float8; in bf16: feed_forward.experts.w1 (precision.skip), head" in out
