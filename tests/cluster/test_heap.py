"""What a CPU rank does with freed memory."""

from __future__ import annotations

import sys

import pytest

from titan.cluster import heap
from titan.cluster.heap import GROWTH, HeapTrimmer
from titan.files import platform


def list_trims(sizes: list[float], monkeypatch: pytest.MonkeyPatch, enabled: bool = True) -> list[int]:
    """The steps, from 0, after which pages are returned, with these sizes at the ends of steps."""
    trims: list[int] = []
    trimmer = HeapTrimmer(enabled)
    for step, size in enumerate(sizes):
        monkeypatch.setattr(heap, "read_resident_bytes", lambda size=size: int(1000 * size))
        monkeypatch.setattr(heap, "release_freed_memory", lambda step=step: trims.append(step))
        trimmer.end_step()
    return trims


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([1.0, 1.0, 1.0, 1.0], [0], id="after-the-first-step"),
        pytest.param([1.0, 1.0, 1.0 + (GROWTH - 1) / 2, 1.0], [0], id="little-growth"),
        pytest.param([1.0, 1.0, 1.02, 1.04, 1.06, 1.0, 1.04], [0, 4], id="creeping-growth"),
        pytest.param([1.0, 1.0, 2.0, 2.0, 2.0], [0, 2], id="a-larger-batch"),
        pytest.param([0.0, 0.0, 0.0], [], id="no-size-known"),
    ],
)
def test_pages_are_returned_when_a_rank_has_grown(
    sizes: list[float], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list_trims(sizes, monkeypatch) == expected


def test_nothing_is_done_where_tensors_are_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_trims([1.0, 2.0, 4.0], monkeypatch, enabled=False) == []


@pytest.mark.parametrize(
    ("variables", "gathers", "expected"),
    [
        pytest.param({}, False, {-1: 2**31 - 1, -3: 2**24, -8: 1}, id="titan"),
        pytest.param({}, True, {-1: 2**31 - 1, -3: 2**21, -8: 1}, id="fsdp"),
        pytest.param({"MALLOC_ARENA_MAX": "4"}, True, {}, id="malloc-variable"),
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, True, {}, id="tunables"),
    ],
)
def test_a_user_s_own_settings_are_kept(
    variables: dict[str, str], gathers: bool, expected: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters: dict[int, int] = {}
    monkeypatch.setattr(platform, "find_c_function", lambda name: parameters.__setitem__)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    heap.keep_freed_memory(gathers)
    assert parameters == expected


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_size_of_this_process_is_read() -> None:
    assert 2**20 < heap.read_resident_bytes() < 2**40
