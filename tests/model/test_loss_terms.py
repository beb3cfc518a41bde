"""Loss terms next to cross-entropy and capped logits: values and gradients of torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.model.test_loss import EXACT, case, far
from tests.support.loss_terms import compute_entropy
from tests.support.ranks import run_ranks
from tests.support.tiers import full
from titan.errors import RunError
from titan.model import loss_terms
from titan.model.layers import IGNORED, Head
from titan.model.loss_terms import Term, label_smoothing, z_loss
from titan.model.schema import Llama
from titan.parallelism import tensor

SHAPE = (2, 8, 8, 12)
Z, SMOOTH, OWN = Term("z", 0.02, z_loss), Term("smooth", 0.1, label_smoothing), Term("own", -0.3, compute_entropy)


def expected(
    hidden: Tensor, weight: Tensor, targets: Tensor, names: tuple[str, ...], cap: float | None
) -> tuple[Tensor, list[Tensor]]:
    """The objective and the figures, by torch's own functions."""
    logits, targets = (hidden @ weight.T).flatten(0, -2), targets.flatten()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    valid, log_p = targets != IGNORED, logits.log_softmax(-1)
    plain = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    smoothed = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1)
    own = hidden.flatten(0, -2).square().mean(-1) - (log_p.exp() * log_p).sum(-1)
    figures = {
        "z": logits.logsumexp(-1)[valid].square().sum(),
        "smooth": (log_p[valid, targets[valid]] - log_p[valid].mean(-1)).sum(),
        "own": own[valid].sum(),
    }
    added = {"z": 0.02 * figures["z"], "smooth": smoothed - plain, "own": -0.3 * figures["own"]}
    return sum((added[n] for n in names), plain), [plain, *(figures[n] for n in names)]


TERMS = [
    pytest.param((Z,), None, id="z-loss"),
    pytest.param((SMOOTH,), None, id="label-smoothing"),
    pytest.param((), 1.5, id="capped"),
    pytest.param((OWN,), None, id="own"),
    pytest.param((Z, SMOOTH, OWN), 1.5, id="all"),
]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(("terms", "cap"), TERMS)
def test_figures_and_gradients(terms: tuple[Term, ...], cap: float | None, chunk: int | None) -> None:
    check(terms, cap, chunk, None)


@pytest.mark.parametrize("chunk", [full(None), full(5)])
def test_figures_and_gradients_of_one_graph(chunk: int | None) -> None:
    torch._dynamo.reset()
    check((Z, SMOOTH, OWN), 1.5, chunk, "aot_eager")


def check(terms: tuple[Term, ...], cap: float | None, chunk: int | None, backend: str | None) -> None:
    """A head against torch's own functions."""
    hidden, weight, targets = case(SHAPE, 1, 0.3)
    other, *more = case(SHAPE, 1, 0.3)
    head = Head(SHAPE[2], SHAPE[3])
    head.weight = nn.Parameter(weight.detach())
    loss_terms.set_head_loss(head, terms, chunk, cap)
    if backend:
        head.compile(backend=backend, fullgraph=True)
    found = head(hidden, targets)
    wanted, figures = expected(other, *more, tuple(term.name for term in terms), cap)
    assert found.flatten().tolist() == pytest.approx([f.item() for f in figures], rel=EXACT)
    found.backward(torch.full_like(found, 0.25))
    (wanted * 0.25).backward()  # type: ignore[no-untyped-call]
    assert far(hidden.grad, other.grad) <= EXACT  # type: ignore[arg-type]
    assert far(head.weight.grad, more[0].grad) <= EXACT  # type: ignore[arg-type]
    with torch.no_grad():
        alone = head(hidden, targets)
    assert alone.shape == () and alone.item() == pytest.approx(figures[0].item(), rel=EXACT)


def parts(
    rank: int, world: int, terms: tuple[Term, ...], sequence: bool, chunk: int | None, backend: str | None
) -> tuple[float, float, float]:
    """How far figures and gradients from parts of the vocabulary are from those of whole logits."""
    hidden, weight, targets = case(SHAPE, 1, 0.3)
    other, *more = case(SHAPE, 1, 0.3)
    mesh = init_device_mesh("cpu", (world,))
    config = Llama(dim=8, layers=1, heads=2, kv_heads=2, ffn=8, vocab=12, logit_cap=1.5 if terms else None)
    model: Any = config.build()
    model.keep([], first=False, last=True)
    loss_terms.set_head_loss(model.head, terms, chunk, config.logit_cap)
    tensor.apply_tensor_plan(model, mesh, sequence_parallel=sequence, loss_parallel=True, chunk=chunk)
    model.head.weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None))
    if backend:
        model.head.compile(backend=backend, fullgraph=True)
    found = model.head(hidden.chunk(world, 1)[rank] if sequence else hidden, targets)
    found.backward(torch.ones_like(found))
    wanted, figures = expected(other, *more, tuple(term.name for term in terms), config.logit_cap)
    wanted.backward()  # type: ignore[no-untyped-call]
    mine, grad = (x.grad.chunk(world, 1)[rank] if sequence else x.grad for x in (hidden, other))  # type: ignore[union-attr]
    assert mine is not None and grad is not None and more[0].grad is not None
    distance = far(found.flatten(), torch.stack(figures))
    return distance, far(mine, grad), far(model.head.weight.grad.full_tensor(), more[0].grad)


@pytest.mark.parametrize(
    ("terms", "sequence", "chunk", "backend"),
    [
        pytest.param((Z, SMOOTH, OWN), True, None, None, id="sequence"),
        pytest.param((Z, SMOOTH, OWN), False, 5, None, id="whole-chunks"),
        full((Z, SMOOTH, OWN), False, None, None, id="whole"),
        full((Z, SMOOTH, OWN), True, 5, None, id="sequence-chunks"),
        pytest.param((), True, 5, None, id="sequence-without-terms"),
        full((), False, 5, "aot_eager", id="one-graph-without-terms"),
    ],
)
def test_parts_of_the_vocabulary_give_the_same(
    terms: tuple[Term, ...], sequence: bool, chunk: int | None, backend: str | None
) -> None:
    for found in run_ranks(parts, 2, terms, sequence, chunk, backend):
        assert max(found) <= EXACT


def test_statistics_of_logits_need_no_memory_beyond_cross_entropy() -> None:
    hidden, weight, targets = case(SHAPE, 1, 0)
    head, kept = Head(SHAPE[2], SHAPE[3]), set[int]()
    head.weight = nn.Parameter(weight.detach())
    loss_terms.set_head_loss(head, (Z, SMOOTH), None, 1.5)

    def keep(x: Tensor) -> Tensor:
        kept.update({x.data_ptr()} if x.numel() == targets.numel() * SHAPE[3] else set())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        head(hidden, targets)
    assert len(kept) == 1


def test_capped_logits_are_what_generation_sees() -> None:
    model: Any = Llama(dim=8, layers=1, heads=2, kv_heads=2, ffn=8, vocab=12, logit_cap=0.5).build()
    nn.init.normal_(model.head.weight)
    hidden = torch.randn(1, 3, 8)
    assert torch.allclose(model.head(hidden), 0.5 * torch.tanh(hidden @ model.head.weight.T / 0.5))


@pytest.mark.parametrize("values", [lambda t: t.logits, lambda t: t.logsumexp.sum()], ids=["matrix", "scalar"])
def test_a_term_gives_one_value_for_each_token(values: Callable[[Any], Tensor]) -> None:
    head = Head(SHAPE[2], SHAPE[3])
    hidden, weight, targets = case(SHAPE, 1, 0)
    head.weight = nn.Parameter(weight.detach())
    loss_terms.set_head_loss(head, (Term("mine", 1.0, values),))
    with pytest.raises(RunError, match=r"training\.loss_terms\.mine: returned the shape"):
        head(hidden, targets)
