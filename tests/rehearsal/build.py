"""Builds the extension on demand, once for each release of torch and version of its sources: about a minute."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
NAME = "rehearsal_device"
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")


def find_obstacle() -> str:
    """Return why the extension can't be built here; empty where it can."""
    if sys.platform != "linux":
        return f"the rehearsal's device is for Linux, and this is {sys.platform}"
    if shutil.which(_choose_compiler()) is None:
        return f"no C++ compiler ({_choose_compiler()}) to build the rehearsal's device: apt-get install g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no Python.h to build the rehearsal's device: apt-get install python3-dev"
    if "+cpu" not in version("torch") and _has_cuda_build():
        return "the rehearsal's device takes the place of CUDA in a CPU build of torch, and this one has CUDA"
    return ""


def build_extension() -> Path:
    """Return the shared library; another process may be building it, which this one then waits for.

    Raises:
        RuntimeError: with the compiler's message when it fails.
    """
    file = _choose_cache_folder() / f"{NAME}.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    with (file.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _compile_extension(file)
    return file


def _choose_cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return root / "titan" / "rehearsal" / f"torch-{version('torch')}-{python}-{digest.hexdigest()[:12]}"


def _compile_extension(file: Path) -> None:
    print(f"building the rehearsal's device in {file.parent}: about a minute", file=sys.stderr, flush=True)
    torch, part_file = find_torch_folder(), file.with_suffix(".part")
    folders = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    includes = [word for folder in folders for word in ("-isystem", str(folder))]
    libraries = ["-L", str(torch / "lib"), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    command = [_choose_compiler(), *FLAGS, *includes, str(SOURCES / "device.cpp"), "-o", str(part_file), *libraries]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the rehearsal's device can't be built:\n{result.stderr[-4000:]}")
    part_file.rename(file)


def _choose_compiler() -> str:
    return os.environ.get("CXX") or "g++"


def find_torch_folder() -> Path:
    """Return the folder of the installed torch, which is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


def _has_cuda_build() -> bool:
    return (find_torch_folder() / "lib" / "libtorch_cuda.so").exists()


if __name__ == "__main__":
    print(find_obstacle() or build_extension())
