"""Laws 1 to 3 for every mix of parallelisms: against one device, in fp32."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.support.matrix import (
    COMPILED,
    EXACT,
    LayoutCase,
    TrainedLayout,
    compare_layouts,
    list_cases,
    list_layouts,
    list_schedules,
    list_variants,
    train_case,
)
from tests.support.runs import are_identical
from tests.support.tiers import full, select_cases

QUICK = (
    "tp", "pp-tied", "tp-whole-sequence", "full-off-zbv", "window-cp-allgather", "linear-selective-cp",
)  # fmt: skip
"""Kinds of schedule, ways to share a row and techniques, once each."""


BF16 = {"gradients": 4e-2, "weights": 4e-3, "loss": 1e-4, "norm": 1e-3, "validation": 2e-4, "terms": 0.0}
"""Bounds in bf16, some times what was measured: 1.6e-2 (tensor; 5e-3 to 9e-3 without it), 9e-4, 2e-5, 2e-4, 3e-5."""
IN_BF16 = ["tp", "cp", "pp", "fsdp-tp-pp", "cp-ring-balanced", "ZBVZeroBubble-fsdp"]


class OneDevice(dict[tuple[str, ...], TrainedLayout]):
    """Runs on one device by what they learn, each trained when it is first asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders

    def __missing__(self, science: tuple[str, ...]) -> TrainedLayout:
        self[science] = train_case(self.folders.mktemp("one"), None, science)
        return self[science]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> OneDevice:
    return OneDevice(tmp_path_factory)


@pytest.mark.parametrize("case", select_cases([pytest.param(case, id=case.id) for case in list_cases()], QUICK))
def test_a_layout_learns_what_one_device_learns(case: LayoutCase, one_device: OneDevice, tmp_path: Path) -> None:
    found = compare_layouts(train_case(tmp_path, case, case.science), one_device[case.science])
    assert found.pop("same start")
    assert found.pop("same rows")
    assert {name: value for name, value in found.items() if not value <= EXACT} == {}


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        pytest.param(("parallelism=pp",), 16, id="pp"),
        full(("parallelism=3d",), 16, id="3d"),  # one of its two data ranks has no row
        full(("parallelism=pp", "parallelism.pipeline=4"), 48, id="three rows, four stages"),
    ],
)
def test_a_pipeline_with_few_rows_learns_what_one_device_learns(
    layout: tuple[str, ...], tokens: int, one_device: OneDevice, tmp_path: Path
) -> None:
    science = (f"training.global_batch={tokens}",)
    trained = train_case(tmp_path, LayoutCase("few rows", layout), science)
    assert trained.run.parallelism.schedule == "GPipe"
    found = compare_layouts(trained, one_device[science])
    assert found.pop("same start")
    assert found.pop("same rows")
    assert {name: value for name, value in found.items() if not value <= EXACT} == {}


@pytest.mark.full
@pytest.mark.parametrize("name", IN_BF16)
def test_layouts_in_bf16_differ_by_rounding_only(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    (case,) = (c for c in list_cases() if c.id == name)
    science = ("precision=bf16",)
    one, many = (train_case(tmp_path_factory.mktemp("bf16"), c, science) for c in (None, case))
    found = compare_layouts(many, one)
    assert found.pop("same start")
    assert found.pop("same rows")
    assert {key: value for key, value in found.items() if not value <= BF16[key]} == {}


KEPT = [
    full("selective", "tp"),
    *(full("full", layout) for layout in ("fsdp", "tp", "pp", "cp ring", "3d")),
    *(full("selective", layout) for layout in ("fsdp", "pp", "cp ring", "3d")),
    full("every_n", "3d"),
]


@pytest.mark.parametrize(("memory", "layout"), KEPT)
def test_computing_again_changes_no_bit(memory: str, layout: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cases_ = [LayoutCase("none", COMPILED[layout]), LayoutCase(memory, (f"memory={memory}", *COMPILED[layout]))]
    none, again = (train_case(tmp_path_factory.mktemp("kept"), case) for case in cases_)
    for what in ("gradients", "last"):
        assert are_identical(again.merge_tensors(what), none.merge_tensors(what))
    assert again.validation == none.validation


def test_the_documentation_lists_what_is_proven() -> None:
    text = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
    table = text.partition("### The matrix")[2].partition("### bf16")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| ")]
    suffixes = {"both": ("", " (tied)"), "yes": (" (tied)",), "no": ("",)}
    listed = []
    for names, others, tied in cells[2:]:
        alone = names.split(", ")
        if others.startswith("each other"):
            found = [" ".join(chosen) for size in (1, 2, 3) for chosen in combinations(alone, size)]
        else:
            found = alone + [f"{name} {other}" for other in filter(None, others.split(", ")) for name in alone]
        listed += [name + suffix for name in found for suffix in suffixes[tied]]
    proven = [
        case.name + (" (tied)" if case.tied else "") for case in (*list_layouts(), *list_schedules(), *list_variants())
    ]
    assert sorted(listed) == sorted(proven)
