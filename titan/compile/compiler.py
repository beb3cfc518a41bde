"""Whether this machine can compile: compilers and versions. Free of torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan.cluster.devices import Machine


TRITON_CAPABILITY = 7.0
"""The least compute capability of a GPU that triton makes kernels for."""


def missing_compiler(machine: Machine, backend: str, elsewhere: bool = False) -> str | None:
    """What keeps a backend from making kernels here; None where nothing does, or nothing is known.

    Args:
        machine: where it would compile.
        backend: as in `Compile`; only inductor makes kernels.
        elsewhere: `machine` is a node that a scheduler will give, with programs of its own.
    """
    if elsewhere or backend != "inductor":
        return None
    if machine.device == "cuda":
        return _missing_triton(machine)
    return _missing_program("C++", os.environ.get("CXX", "g++"))  # all that it looks for


def _missing_triton(machine: Machine) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if machine.capability is not None and machine.capability < TRITON_CAPABILITY:
        has = f"{machine.name} has compute capability {machine.capability:g}"
        return f"{has}, and triton takes {TRITON_CAPABILITY} or more"
    named = os.environ.get("CC")
    return _missing_program("C", named) if named else _missing_program("C", "gcc", "clang")


def _missing_program(language: str, *programs: str) -> str | None:
    """That none of these compilers is there; None where one is."""
    if any(map(shutil.which, programs)):
        return None
    return f"no {language} compiler in PATH, which would be {' or '.join(programs)}"


def torch_version() -> tuple[int, ...]:
    """The installed torch's version, without loading it; nothing where there is none."""
    try:
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ()
