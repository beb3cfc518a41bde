"""A search needs no layout that works: `titan.run.resolve`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.composing import compose_test_run
from titan.errors import ConfigError
from titan.memory.schema import Memory
from titan.parallelism.schema import Layout, Parallelism
from titan.run.resolve import list_typed_settings, resolve_open_layout
from titan.run.run import Run

NONE = {"pipeline": 1, "replicate": 1, "context": 1, "tensor": 1, "expert": 1}
TYPED = {
    "schedule": "GPipe", "stages": 8, "starts": (1, 2), "reshard": "never", "microbatches": 4, "async_tensor": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parallelism", "overrides", "expected"),
    [
        pytest.param(Parallelism(), ["model=llama8b"], {}, id="nothing"),
        pytest.param(Parallelism(tensor=4), ["parallelism.tensor=4"], {"tensor": 4}, id="a degree"),
        pytest.param(Parallelism(tensor=4), ["++parallelism.tensor=4"], {"tensor": 4}, id="a degree with a plus"),
        pytest.param(Parallelism(tensor=8), ["recipe=bench_405b_512"], {}, id="a recipe's degree"),
        pytest.param(Parallelism(shard=-1), ["parallelism=fsdp"], NONE, id="a choice"),
        pytest.param(
            Parallelism(tensor="auto", expert=-1), ["parallelism.tensor=auto", "parallelism.expert=-1"], {}, id="open"
        ),
        *(
            pytest.param(Parallelism(**TYPED), [f"parallelism.{name}=_"], {name: value}, id=name)
            for name, value in TYPED.items()
        ),
        pytest.param(Parallelism(**TYPED), ["recipe=x", "parallelism=fsdp"], {**NONE, "shard": 1}, id="not typed"),
        pytest.param(Parallelism(), ["parallelism.microbatches=auto", "parallelism.stages=auto"], {}, id="auto"),
        pytest.param(Parallelism(), ["memory=full"], {"checkpointing": "full"}, id="memory"),
        pytest.param(Parallelism(), ["+memory.checkpointing=full"], {"checkpointing": "full"}, id="checkpointing"),
        pytest.param(Parallelism(), ["memory.offload=true"], {}, id="offload"),
    ],
)
def test_typed_settings(parallelism: Parallelism, overrides: list[str], expected: dict[str, object]) -> None:
    recipe: Any = SimpleNamespace(parallelism=parallelism, memory=Memory(checkpointing="full"))
    assert list_typed_settings(recipe, overrides) == expected


def resolve_searched(*overrides: str, works: bool = False) -> Run:
    """Return a run whose layout is searched; unless it works, its recipe has a layout that can't."""
    common = ["model=llama1b", "dataset=synthetic", "checkpoint=off", "cluster=h100", "parallelism=fsdp"]
    run = compose_test_run([*common, "training.global_batch=65536", *overrides], remote=True)
    parallelism = run.parallelism if works else Parallelism(tensor=3, pipeline=50, microbatches=1000, async_tensor=True)
    changed = type(run)(**{**vars(run), "parallelism": parallelism})
    return resolve_open_layout(changed, run.machine, run.directory, remote=True)


@pytest.mark.full
def test_a_layout_that_can_not_work_is_open_and_its_settings_stay() -> None:
    run = resolve_searched()
    assert run.is_layout_open and run.layout == Layout(shard=8) and run.parallelism.tensor == 3


@pytest.mark.full
def test_a_layout_that_works_is_kept() -> None:
    run = resolve_searched(works=True)
    assert not run.is_layout_open and run.layout == Layout(shard=8)


def test_what_is_no_matter_of_the_layout_is_rejected() -> None:
    run = resolve_searched()
    changed = type(run)(**{**vars(run), "precision": type(run.precision)(weights="bf16", compute="fp32")})
    with pytest.raises(ConfigError, match="precision=bf16_pure"):
        resolve_open_layout(changed, run.machine, run.directory, remote=True)
