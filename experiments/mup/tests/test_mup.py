"""Hyperparameters follow the table of exponents, at the base nothing changes, and layouts learn the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.mup import coordinates
from experiments.mup.coordinates import Settings
from experiments.mup.exponents import FIGURES, ROLES, ModelScale, compute_factor, find_role, read_table
from experiments.mup.schema import Llama, Qwen3, Qwen3Moe
from launchers.command import plan_command
from tests.support.composing import compose_test_run
from tests.support.runs import TINY, compose_tiny_run, read_learned_values, read_step_records, train_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.optimizer.schema import SGD, AdamW, Muon
from titan.optimizer.update_factors import build_optimizer
from titan.sweep.ladder import Variant, build_ladder, choose_rates
from titan.sweep.schema import Sweep

CONF_FOLDER = Path(__file__).resolve().parents[1] / "conf"
CONF = f"hydra.searchpath=[file://{CONF_FOLDER}]"
SHAPE: dict[str, Any] = {"vocab": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "base_dim": 16, "base_layers": 2}
WIDE: dict[str, Any] = {**SHAPE, "dim": 64, "layers": 8, "ffn": 96}
MOE: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_ffn": 32}
W, D = 4, 4  # WIDE is so many times as wide and deep as its base
BLOCK = "layers.3.attention."


def build_groups(schema: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The torch group of each parameter, by name."""
    with torch.device("meta"):
        model = schema.build()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    built = build_optimizer(optimizer, schema, model.named_parameters())
    return {names[id(p)]: group for group in built.param_groups for p in group["params"]}


@pytest.mark.parametrize(
    ("optimizer", "name", "lr", "decay", "eps"),
    [
        (AdamW, "tok_embeddings.weight", 1, 1, 1 / W),
        (AdamW, f"{BLOCK}wq.weight", 1 / W, W, 1 / W / D),
        (AdamW, f"{BLOCK}wo.weight", 1 / W / D, W * D, 1 / W),
        (AdamW, "layers.3.attention_norm.weight", 1, 1, 1 / W / D),
        (AdamW, "layers.3.feed_forward.router.weight", 1 / W, W, 1 / D),
        (AdamW, "layers.3.feed_forward.experts.w2.weight", 1 / W / D, W * D, 1 / W),
        (AdamW, "norm.weight", 1, 1, 1 / W),
        (AdamW, "head.weight", 1 / W, W, 1),
        (Muon, f"{BLOCK}wq.weight", W**-0.5, W**0.5, 1),
        (Muon, f"{BLOCK}wo.weight", W**-0.5 / D, W**0.5 * D, 1),
        (Muon, "layers.3.feed_forward.router.weight", 1 / W, W, 1),
        (Muon, "head.weight", 1 / W, W, 1),
    ],
)
def test_groups_follow_the_table(optimizer: Any, name: str, lr: float, decay: float, eps: float) -> None:
    settings = optimizer(lr=0.01, weight_decay=0.1, eps=1e-6)
    group = build_groups(Qwen3Moe(**WIDE, **MOE), settings)[name]
    assert (group["lr"], group["factor"]) == pytest.approx((0.01 * lr, lr))
    assert (group["weight_decay"], group["eps"]) == pytest.approx((0.1 * decay, 1e-6 * eps))


@pytest.mark.parametrize(
    "schema", [Llama(**WIDE), Qwen3(**WIDE), Qwen3Moe(**WIDE, **MOE)], ids=lambda s: type(s).__name__
)
def test_initial_values_follow_the_table(schema: Any) -> None:
    with torch.device("meta"):
        initial = schema.build().initial()
    base = 0.02 / (2 * schema.base_layers) ** 0.5
    found = {name: getattr(values, "std", None) for name, values in initial.items()}
    assert found["tok_embeddings.weight"] == 0.02 and found["head.weight"] == pytest.approx(0.02 / W)
    assert found[f"{BLOCK}wq.weight"] == pytest.approx(0.02 * W**-0.5)
    assert found[f"{BLOCK}wo.weight"] == pytest.approx(base * W**-0.5 / D)
    assert found["norm.weight"] is None and set(found) == set(schema.parameter_names())


def test_the_table_is_complete() -> None:
    table = read_table()
    optimizers = {optimizer for _, optimizer, _ in table}
    assert set(table) == {(role, name, figure) for role in ROLES for name in optimizers for figure in FIGURES}
    for role in ROLES:
        assert len({table[role, optimizer, "std"] for optimizer in optimizers}) == 1
        for optimizer in optimizers:  # the decay of a step, lr * weight_decay, is the same at all sizes
            lr, decay = table[role, optimizer, "lr"], table[role, optimizer, "weight_decay"]
            assert (lr.width + decay.width, lr.depth + decay.depth) == (0, 0)


COMPLETEP = {  # exponents of width and depth: multiplier of the forward pass, std, learning rate, weight decay, eps
    "embedding": ((0, 0), (0, 0), (0, 0), (0, 0), (-1, 0)),
    "hidden": ((0, 0), (-0.5, 0), (-1, 0), (1, 0), (-1, -1)),
    "residual": ((0, -1), (-0.5, 0), (-1, 0), (1, 0), (-1, -1)),
    "block_norm": ((0, 0), (0, 0), (0, 0), (0, 0), (-1, -1)),
    "norm": ((0, 0), (0, 0), (0, 0), (0, 0), (-1, 0)),
    "head": ((-1, 0), (0, 0), (0, 0), (0, 0), (-1, 0)),
}
"""Table 1 of arXiv:2505.01618 with alpha 1, as published: with multipliers of the residual branches and the logits."""


@pytest.mark.parametrize("role", COMPLETEP)
def test_the_table_is_completep_without_multipliers(role: str) -> None:
    """A multiplier goes into the matrix: std and rate grow by it, weight decay and eps fall by it."""
    multiplier, *published = COMPLETEP[role]
    table = read_table()
    for figure, exponents, sign in zip(FIGURES, published, (1, 1, -1, -1), strict=True):
        found = table[role, "adamw", figure]
        assert (found.width, found.depth) == tuple(e + sign * m for e, m in zip(exponents, multiplier, strict=True)), (
            figure
        )


@pytest.mark.parametrize("model", sorted(path.stem for path in (CONF_FOLDER / "model").glob("*.yaml")))
def test_each_model_transfers_as_it_is(model: str) -> None:
    assert compose_test_run([CONF, f"model={model}"]).model.update_factors(AdamW())


@pytest.mark.full
def test_groups_of_the_user_come_on_top() -> None:
    schema = Llama(**WIDE)
    run: Any = compose_tiny_run(
        Path("x"), CONF, "model=mup_llama", "model.dim=64", "+optimizer.groups.q={match:['*wq.weight'],lr:0.5}"
    )
    groups = build_groups(schema, run.optimizer)
    assert groups[f"{BLOCK}wq.weight"]["factor"] == 0.5 / W and groups[f"{BLOCK}wk.weight"]["factor"] == 1 / W


@pytest.mark.parametrize(
    ("settings", "optimizer", "sentence"),
    [
        pytest.param({}, SGD(), "optimizer=SGD: .* has no exponents", id="sgd"),
        pytest.param({}, AdamW(lr="auto"), "optimizer.lr=auto: ", id="auto"),
        pytest.param({"tied": True}, AdamW(), "model.tied=true: ", id="tied"),
    ],
)
def test_what_does_not_transfer_is_rejected(settings: dict[str, Any], optimizer: Any, sentence: str) -> None:
    schema = Llama(**WIDE, **settings)
    with pytest.raises(ConfigError, match=sentence):
        schema.check()
        optimizer.check(schema)
    Llama(**WIDE, **settings, transfer="none").check()


def test_a_parameter_without_a_role_is_rejected() -> None:
    assert find_role("layers.10.attention_norm.weight") == "block_norm"
    assert find_role("layers.10.attention.q_norm.weight") == "qk_norm"
    with pytest.raises(ConfigError, match=r"layers\.0\.extra\.weight has no role"):
        find_role("layers.0.extra.weight")


def test_a_ladder_leaves_rates_to_the_model() -> None:
    """Sizes vary width and depth, the base stays, and the learning rate is that of the base at every size."""
    model = Llama(**{**SHAPE, "heads": 8, "kv_heads": 4, "dim": 64, "layers": 4, "ffn": 96, "base_dim": 32})
    base = replace(compose_test_run([*TINY, "evaluation.tokens=64"]), model=model)
    ladder = build_ladder([Variant((), base)], Sweep(sizes=(16, 32, 64, 128), lengths=(8.0, 16.0), seeds=1))
    shapes = [(t.model.dim, t.model.layers, t.lr) for t in ladder.trunks]
    rate = base.optimizer.peak_lr
    assert shapes == [(16, 1, rate), (32, 2, rate), (64, 4, rate), (128, 8, rate)]
    assert {(t.model.base_dim, t.model.base_layers) for t in ladder.trunks} == {(32, 2)}
    factors = [t.model.update_factors(base.optimizer)["layers.0.attention.wq.weight"].lr for t in ladder.trunks]
    assert factors == [2.0, 1.0, 0.5, 0.25] and "the model scales it" in ladder.rule
    control = Variant((), replace(base, model=replace(model, transfer="none")))
    assert choose_rates([control], Sweep()).description == "in proportion to 1 / width"
    with pytest.raises(ConfigError, match="scales its learning rates"):
        choose_rates([Variant((), base)], Sweep(), is_auto=True)


@pytest.mark.full
def test_a_ladder_is_planned_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned: list[Any] = []
    sizes = ["sweep.sizes=[16,32,64,96]", "sweep.lengths=[8,16,32]", "sweep.seeds=1", "model.transfer=both,none"]
    shape = ["model.dim=64", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.ffn=96", "model.base_dim=32"]
    command = ["-m", CONF, "sweep=ladder", "model=mup_llama", *shape, *sizes, "cluster=cpu", "name=s"]
    assert plan_command(command, lambda run: 1, lambda trials: planned.extend(trials) or [0] * len(trials)) == 0
    assert len(planned) == 2 * 16 and {trial.run.model.base_dim for trial in planned} == {32}
    assert {trial.run.optimizer.lr for trial in planned} == {planned[0].run.optimizer.lr}


def test_attention_scale() -> None:
    with torch.device("meta"):
        model: Any = Llama(**{**WIDE, "head_dim": 32}, base_head_dim=8).build()
    assert model.layers["0"].attention.core.scale == pytest.approx(8**0.5 / 32)
    assert compute_factor("head.weight", "adamw", "lr", ModelScale(8, 2)) == 1 / 8


OWN = (
    CONF,
    "model.head_dim=8",
    "model.heads=4",
    "model.kv_heads=2",
    "model.base_dim=16",
    "model.base_layers=1",
    "checkpoint=off",
    "optimizer.eps=1e-4",
)
LLAMA, EXPERTS = ("model=mup_llama",), ("model=mup_qwen3_moe", "model.experts=4", "model.expert_ffn=16")


@pytest.mark.full
def test_at_the_base_nothing_changes(tmp_path: Path) -> None:
    base = ("model.base_dim=32", "model.base_layers=2")
    plain = compose_tiny_run(tmp_path / "plain", "checkpoint=off")
    same = compose_tiny_run(tmp_path / "same", CONF, *LLAMA, *base, "checkpoint=off")
    wide = compose_tiny_run(tmp_path / "wide", CONF, *LLAMA, "model.base_dim=16", "checkpoint=off")
    for run in (plain, same, wide):
        train_run(run)
    assert read_learned_values(same) == read_learned_values(plain) != read_learned_values(wide)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(LLAMA, ("parallelism=fsdp",), id="fsdp"),
        pytest.param(LLAMA, ("parallelism=tp",), id="tp"),
        pytest.param(LLAMA, ("parallelism=pp",), id="pp"),
        pytest.param(LLAMA, ("compile=block", "compile.backend=aot_eager"), id="compiled"),
        pytest.param((*LLAMA, "optimizer=muon"), ("parallelism=fsdp",), id="muon-fsdp"),
        pytest.param(EXPERTS, ("parallelism=ep",), id="experts"),
        pytest.param((*EXPERTS, "optimizer=muon"), ("parallelism=fsdp",), id="experts-muon-fsdp"),
    ],
)
def test_layouts_learn_the_same(tmp_path: Path, model: tuple[str, ...], options: tuple[str, ...]) -> None:
    alone = compose_tiny_run(tmp_path / "alone", *OWN, *model)
    split = compose_tiny_run(tmp_path / "split", *OWN, *model, *options)
    for run in (alone, split):
        train_run(run)
    for name in ("loss", "grad_norm"):
        wanted = [line[name] for line in read_step_records(alone)]
        assert [line[name] for line in read_step_records(split)] == pytest.approx(wanted, rel=1e-5)
        assert len(set(wanted)) == 3


SIZES = [
    pytest.param(Settings(base=64), [(64, 4), (128, 4), (256, 4), (512, 4)], id="width"),
    pytest.param(Settings(over="depth", layers=8), [(32, 8), (32, 16), (32, 32), (32, 64)], id="depth"),
]


@pytest.mark.parametrize(("settings", "sizes"), SIZES)
def test_a_check_is_over_eight_times_the_base(settings: Settings, sizes: list[tuple[int, int]]) -> None:
    assert coordinates.list_sizes(settings) == sizes


@pytest.mark.parametrize("settings", [Settings(optimizer="muon"), Settings(lr=0.016)], ids=["optimizer", "given"])
def test_a_check_is_at_the_rate_of_its_optimizer(settings: Settings) -> None:
    size = coordinates.list_sizes(settings)[0]
    assert coordinates.compose(size, "both", settings).optimizer.lr == 0.016


WRONG = "over=length base=48 base=0 base=² layers=0 layers=few seeds=0 steps=x blocks=4 optimizer=sgd"


@pytest.mark.parametrize("word", WRONG.split())
def test_a_check_of_other_sizes_is_rejected(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinates.main([word]) == 2
    assert f"titan: {word}: " in capsys.readouterr().err


@pytest.mark.parametrize(("transfer", "flat"), [full("both", True, id="transfer"), full("none", False, id="control")])
def test_changes_do_not_depend_on_the_width(transfer: str, flat: bool) -> None:
    sizes = [coordinates.ModelSize(32, 4), coordinates.ModelSize(128, 4)]
    changes = [coordinates.measure_changes(coordinates.compose(size, transfer, Settings()), 6)[-1] for size in sizes]
    spreads = {role: abs(changes[1][role] / changes[0][role] - 1) for role in ("hidden", "logits")}
    assert all((spread < 0.15) == flat for spread in spreads.values()), spreads
