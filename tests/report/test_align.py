"""Which runs make a variant, what it is called, and which one is the baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.made_runs import H200, Story, make_run
from tests.support.tiers import full
from titan.errors import ConfigError
from titan.report import align, rank
from titan.report.align import RunGroup
from titan.report.collect import collect_runs

FSDP, DDP, SINGLE = "parallelism=fsdp", "parallelism=ddp", "parallelism=single"
Point = tuple[Story, tuple[str, ...]]


def groups(tmp_path: Path, *points: Point) -> list[RunGroup]:
    for index, (story, overrides) in enumerate(points):
        make_run(tmp_path / "runs" / f"{index:02}", story, *overrides)
    return align.group_runs(collect_runs([tmp_path / "runs"]).runs)


S = Story()
LABELS = [
    pytest.param([(S, (SINGLE,)), (S, (FSDP,))], [SINGLE, FSDP], id="an-option-stands-for-its-settings"),
    full(
        [(S, (DDP,)), (S, (DDP, "cluster.devices=3"))], ["devices=2", "devices=3"], id="more-devices-of-one-option"
    ),
    full(
        [(S, (FSDP, "parallelism.reshard=never")), (S, (FSDP, "parallelism.reshard=always")), (S, (DDP,))],
        [f"{FSDP} reshard=never", f"{FSDP} reshard=always", f"{DDP} reshard=auto"],
        id="what-was-typed-is-named-beside-it",
    ),
    pytest.param(
        [(S, ("optimizer.lr=1e-3",)), (S, ("optimizer.lr=3e-3",))], ["lr=0.001", "lr=0.003"], id="without-its-axis"
    ),
    full(
        [
            (S, (FSDP, "dataset.seed=1", "parallelism.prefetch=0")),
            (S, (FSDP, "dataset.seed=2", "parallelism.prefetch=2", "dataset.prefetch=3")),
        ],
        ["dataset.seed=1 prefetch=0", "dataset.seed=2 prefetch=2"],
        id="another-seed-than-the-runs-is-named-in-full",
    ),
    full(
        [(S, ("model.rope_factor=2",)), (S, ("model.rope_factor=1", "memory=full"))],
        ["memory=none rope_factor=2.0", "memory=full rope_factor=1.0"],
        id="several-axes",
    ),
    pytest.param(
        [(S, ()), (Story(device=H200 | {"name": "AMD MI300X"}), ())],
        ["hardware=NVIDIA H200", "hardware=AMD MI300X"],
        id="hardware",
    ),
    pytest.param([(S, ()), (Story(digest="e" * 64), ())], ["data=dddddddd", "data=eeeeeeee"], id="content-of-data"),
    full(
        [(S, ("schedule=cosine",)), (S, ("schedule=linear",)), (S, ("schedule=wsd",))],
        ["schedule=cosine", "schedule=linear", "schedule=wsd"],
        id="kinds-with-equal-settings",
    ),
    pytest.param(
        [(S, ()), (S, ("modules=[tests]", "+hooks.a={_target_: tests.support.own_hooks.Norms}"))],
        ["hooks=[]", "hooks=[a]"],
        id="hooks-by-their-names",
    ),
    pytest.param(
        [(S, (FSDP, "schedule.warmup=auto")), (S, (FSDP, "schedule.warmup=1", "parallelism.reshard=never"))],
        ["schedule.warmup=4 reshard=always", "schedule.warmup=1 reshard=never"],
        id="settings-that-are-auto-are-what-they-meant",
    ),
    pytest.param([(S, ()), (Story(seed=1), ())], ["model=debug parallelism=single"], id="one"),
    full(
        [(S, ()), (Story(repeat=1), ("metrics.tensorboard=true", "checkpoint.keep=5", "training.step_seconds=0.1"))],
        ["model=debug parallelism=single"],
        id="what-changes-nothing-that-counts",
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("points", "labels"), LABELS)
def test_variants_and_their_labels(points: list[Point], labels: list[str], tmp_path: Path) -> None:
    assert [group.label for group in groups(tmp_path, *points)] == labels


@pytest.mark.full
def test_names_that_would_be_mistaken_keep_their_axis(tmp_path: Path) -> None:
    found = groups(tmp_path, (S, ()), (S, ("dataset.longest=400", "dataset.vocab=63", "model.vocab=63")))
    assert found[1].label == "model.vocab=63 dataset.vocab=63 longest=400"
    assert set(found[1].settings) == {"model.vocab", "dataset.vocab", "dataset.longest"}


@pytest.mark.full
def test_what_differs_with_its_values(tmp_path: Path) -> None:
    found = groups(tmp_path, (S, (SINGLE,)), (S, (FSDP,)), (S, (FSDP, "memory=full")))
    assert align.collect_differing_settings(found) == {"parallelism": ("single", "fsdp"), "memory": ("none", "full")}


@pytest.mark.full
def test_labels_of_runs_name_seed_and_repeat_only_where_these_vary(tmp_path: Path) -> None:
    found = groups(tmp_path, (S, (SINGLE,)), (Story(seed=1), (SINGLE,)), (S, (FSDP,)), (S, (FSDP,)))
    assert align.label_runs(found[0], found) == [f"{SINGLE} seed=0", f"{SINGLE} seed=1"]
    assert align.label_runs(found[1], found) == [f"{FSDP} seed=0 (02)", f"{FSDP} seed=0 (03)"]


BASELINES = [
    pytest.param(None, {}, [0], id="the-first"),
    pytest.param(None, {"parallelism": "fsdp"}, [1, 2], id="the-sweeps-at-any-rate"),
    pytest.param(None, {"parallelism": "fsdp", "optimizer.lr": "3e-3"}, [2], id="the-sweeps-numbers-as-typed"),
    pytest.param("parallelism=fsdp,optimizer.lr=0.003", {"parallelism": "single"}, [2], id="the-users"),
    pytest.param("lr=3e-3", {}, [2], id="in-short"),
    pytest.param("parallelism=fsdp lr=0.001", {}, [1], id="a-label"),
    pytest.param("parallelism=tp", {}, None, id="fits-none"),
    pytest.param("parallelism=fsdp", {}, [1, 2], id="at-any-rate"),
    pytest.param("optimizer.weight_decay=0.1", {}, None, id="fits-several"),
    pytest.param("fsdp", {}, [1, 2], id="an-option-at-any-rate"),
]


def rewrite(directory: Path, *replacements: tuple[str, str]) -> None:
    """Rewrite lines of a run.yaml as another version of titan wrote them."""
    file = directory / "run.yaml"
    text = file.read_text()
    for line, other in replacements:
        assert f"    {line}\n" in text, line
        text = text.replace(f"    {line}\n", other)
    file.write_text(text)


OLD = (
    ("prefetch: auto", "    prefetch: 0\n"),
    ("regather: auto", ""),
    ("dispatcher: alltoall", ""),
    ("reduce_buffers: 1", ""),
    ("separate_reduce: false", ""),
    ("symmetric_memory: false", ""),
)


TP = ("parallelism=tp", "model.kv_heads=2")


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        pytest.param((FSDP,), ["model=debug parallelism=fsdp"], id="fsdp"),
        pytest.param((SINGLE,), ["model=debug parallelism=single"], id="single"),
        full(TP, ["regather=true", "regather=false"], id="tensor, which regathers now"),
        full((*TP, "memory=full"), ["model=debug parallelism=tp"], id="tensor, which recomputes"),
    ],
)
def test_a_run_of_an_older_version_is_a_seed_of_the_same_variant(
    overrides: tuple[str, ...], labels: list[str], tmp_path: Path
) -> None:
    groups(tmp_path, (S, overrides), (Story(seed=1), overrides))
    rewrite(tmp_path / "runs/01", *OLD)
    found = align.group_runs(collect_runs([tmp_path / "runs"]).runs)
    assert [group.label for group in found] == labels


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "same"),
    [
        pytest.param("reshard=always", True, id="reshard"),
        pytest.param("reshard=never", False, id="reshard-never"),
        pytest.param("accumulate=sharded", True, id="accumulate"),
        pytest.param("accumulate=whole", False, id="accumulate-whole"),
        pytest.param("prefetch=0", True, id="prefetch"),
        pytest.param("prefetch=1", False, id="prefetch-one"),
    ],
)
def test_what_auto_means_by_name_is_the_same_variant(typed: str, same: bool, tmp_path: Path) -> None:
    found = groups(tmp_path, (S, (FSDP,)), (Story(seed=1), (FSDP, f"parallelism.{typed}")))
    assert len(found) == (1 if same else 2)


def make_auto(directory: Path) -> None:
    """A run whose precision=auto was bf16, whatever this machine computes fast in."""
    file = make_run(directory, S, "precision=bf16", "compile=off") / "run.yaml"
    text = (
        file.read_text()
        .replace("\n  precision: bf16", "\n  precision: auto")
        .replace("\n  compile: 'off'", "\n  compile: auto")
    )
    file.write_text(text)
    assert text.count(": auto") >= 2


@pytest.mark.full
def test_auto_is_called_by_what_it_meant(tmp_path: Path) -> None:
    make_auto(tmp_path / "runs" / "90")
    found = groups(tmp_path, (S, ("precision=fp32", "compile=block")))
    assert [group.label for group in found] == ["precision=fp32 compile=block", "precision=bf16 compile=off"]
    for option in ("precision=bf16", "precision=auto", "compile=auto,precision=bf16"):
        assert rank.find_baselines(found, option, {}) == [1]


def test_auto_that_would_be_mistaken_for_another_variant_keeps_its_name(tmp_path: Path) -> None:
    make_auto(tmp_path / "runs" / "90")
    found = groups(tmp_path, (S, ("precision=bf16", "optimizer.lr=2e-3")), (S, ("precision=fp32",)))
    assert [group.label for group in found] == [
        "precision=bf16 lr=0.002", "precision=fp32 lr=0.001", "precision=auto lr=0.001",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("option", "asked", "places"), BASELINES)
def test_the_baseline(option: str | None, asked: dict[str, str], places: list[int] | None, tmp_path: Path) -> None:
    found = groups(tmp_path, (S, (SINGLE,)), (S, (FSDP,)), (S, (FSDP, "optimizer.lr=3e-3")))
    if places is not None:
        assert rank.find_baselines(found, option, asked) == places
        return
    with pytest.raises(ConfigError, match=f"baseline={option}: matches"):
        rank.find_baselines(found, option, asked)


@pytest.mark.full
def test_a_label_of_sampled_numbers_names_the_baseline(tmp_path: Path) -> None:
    rates = ("0.00031622776601683794", "0.0010743298123456789")
    found = groups(tmp_path, *((S, (f"optimizer.lr={rate}",)) for rate in rates))
    assert [group.label for group in found] == ["lr=0.0003162", "lr=0.001074"]
    for index, (group, rate) in enumerate(zip(found, rates, strict=True)):
        assert rank.find_baselines(found, None, dict([group.label.split("=")])) == [index]
        assert rank.find_baselines(found, f"optimizer.lr={group.settings['optimizer.lr']}", {}) == [index]
        assert rank.find_baselines(found, f"optimizer.lr={rate}", {}) == [index]


@pytest.mark.parametrize(
    ("rates", "labels"),
    [
        pytest.param(
            ("0.000123456789", "0.000123451234"), ["lr=0.00012346", "lr=0.00012345"], id="one-digit-more-than-usual"
        ),
        pytest.param(("3e-05", "3.0000000000000004e-05"), ["lr=3e-5", "lr=3.0000000000000004e-5"], id="rounding-error"),
        full(("0.00012345678", "0.00012345679"), ["lr=0.00012345678", "lr=0.00012345679"], id="all-digits"),
    ],
)
def test_variants_of_close_sampled_numbers_have_different_labels(
    tmp_path: Path, rates: tuple[str, str], labels: list[str]
) -> None:
    found = groups(tmp_path, *((S, (f"optimizer.lr={rate}",)) for rate in rates))
    assert [group.label for group in found] == labels


def test_the_baseline_by_its_directory(tmp_path: Path) -> None:
    found = groups(tmp_path, (S, (SINGLE,)), (S, (FSDP,)))
    assert rank.find_baselines(found, str(tmp_path / "runs" / "01"), {}) == [1]
