"""Check that this machine can compile kernels: compilers and versions. Free of torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from functools import cache

from titan.cluster.devices import Machine
from titan.files.platform import CXX

TRITON_CAPABILITY = 7.0
"""The lowest compute capability that triton supports."""


def find_missing_compiler(machine: Machine, backend: str, is_remote: bool = False) -> str | None:
    """Return what is missing to compile kernels with a backend; None if nothing is, or if it can't be known.

    Args:
        backend: as in `Compile`; only inductor compiles kernels.
        is_remote: whether `machine` is a node that a scheduler will allocate, which may have other programs.
    """
    if is_remote or backend != "inductor":
        return None
    if machine.device == "cuda":
        return _find_missing_triton(machine)
    return _find_missing_program("C++", os.environ.get("CXX", CXX))  # Inductor looks for no other


def _find_missing_triton(machine: Machine) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if machine.capability is not None and machine.capability < TRITON_CAPABILITY:
        capability = f"{machine.name} has compute capability {machine.capability:g}"
        return f"{capability}, but triton needs {TRITON_CAPABILITY} or higher"
    compiler = os.environ.get("CC")
    return _find_missing_program("C", compiler) if compiler else _find_missing_program("C", "gcc", "clang")


def _find_missing_program(language: str, *programs: str) -> str | None:
    """Return that none of these compilers is in PATH; None if one is."""
    if any(map(shutil.which, programs)):
        return None
    return f"no {language} compiler ({' or '.join(programs)}) in PATH"


@cache
def read_torch_version() -> tuple[int, ...]:
    """Return the installed torch's version without importing it; empty without torch."""
    try:
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ()
