"""Each name of torch that titan uses on CUDA exists in the CUDA wheels, and the rehearsal defines no other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rehearsal import names, surface, watch

RECORDED = names.read_names()


@pytest.mark.full
@pytest.mark.parametrize("release", sorted(RECORDED))
def test_titan_uses_only_names_that_cuda_builds_have(release: str) -> None:
    used = surface.list_used_names(watch.ROOT)
    known = RECORDED[release]
    modules = {name.rpartition(".")[0] for name in known}
    missing = {
        name: places
        for name, places in used.items()
        if name not in known and (name.rpartition(".")[0] in modules or name.startswith("torch._C._cuda"))
    }
    assert missing == {}
    assert len(used) >= 15 and "torch._C._cuda_attach_out_of_memory_observer" in used


def test_both_minor_releases_at_the_ends_of_the_supported_range_are_recorded() -> None:
    assert {"2.11", "2.13"} <= set(RECORDED)
    for known in RECORDED.values():
        assert {"torch._C._cuda_init", "torch.cuda.Event", "torch._C._distributed_c10d.ProcessGroupNCCL"} <= known
        assert len(known) > 1400


def test_the_rehearsal_defines_only_names_that_cuda_builds_have() -> None:
    defined = set()
    for file in ("cuda.py", "nccl.py"):
        tree = ast.parse((Path(__file__).parent / file).read_text())
        keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
        defined |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    defined = {name for name in defined if name.startswith(("_cuda", "_Cuda", "_CUDA", "_nccl"))}
    assert len(defined) > 30
    for release, known in RECORDED.items():
        assert {name for name in defined if f"torch._C.{name}" not in known} == set(), release


def test_a_misspelt_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "titan").mkdir()
    (tmp_path / "titan" / "x.py").write_text("library = torch._C\nlibrary._cuda_attachOutOfMemoryObserver(print)\n")
    ((name, places),) = surface.list_used_names(tmp_path).items()
    assert (name, places) == ("torch._C._cuda_attachOutOfMemoryObserver", ["titan/x.py:2"])
    assert all(name not in known for known in RECORDED.values())
