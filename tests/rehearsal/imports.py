"""Runs functions around the import of modules, so that torch finds the device and titan finds GPUs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from tests.rehearsal import cuda, nccl, triton_code, watch

Around = Callable[[Any], object]


def _do_nothing(module: Any) -> None:
    """Do nothing."""


class _Loader(importlib.abc.Loader):
    """A module's own loader, with functions before and after it."""

    def __init__(self, inner: Any, call_before: Around, call_after: Around) -> None:
        self.inner, self.call_before, self.call_after = inner, call_before, call_after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.call_before(module)
        self.inner.exec_module(module)
        self.call_after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, around: dict[str, tuple[Around, Around]]) -> None:
        self.around = around

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in self.around:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, *self.around[name])
        return spec


def install_finder() -> None:
    """Let the imports of this process find the device, where the environment names devices."""
    around: dict[str, tuple[Around, Around]] = {"titan.training.trainer": (_do_nothing, watch.watch_steps)}
    if cuda.count_devices():
        around |= {
            "torch": (lambda module: cuda.load_registrations(), cuda.finish_import),
            "torch.cuda": (lambda module: watch.watch_waits(cuda.define_names(sys.modules["torch"])), _do_nothing),
            "torch.distributed.constants": (lambda module: nccl.define_names(), _do_nothing),
            "torch.distributed.distributed_c10d": (lambda module: nccl.define_names(), nccl.replace_split),
            "titan.cluster.gpus": (_do_nothing, _find_gpus),
            "torch._inductor.graph": (_do_nothing, _write_triton),
        }
    sys.meta_path.insert(0, _Finder(around))


def _find_gpus(module: Any) -> None:
    """Let titan detect as many GPUs as there are devices, by what nvidia-smi would print."""
    real, run = module.Probe, module.run_program

    def answer_nvidia_smi(arguments: Sequence[str]) -> str | None:
        mib = int(cuda.read_total_memory() / 2**20)
        rows = (f"GPU-{i}{i}, NVIDIA H100 80GB HBM3, {mib}, 9.0" for i in range(cuda.count_devices()))
        return "\n".join(rows) if arguments[0] == "nvidia-smi" else run(arguments)

    def make_probe(**options: Any) -> Any:
        version = f"cuda: str = '{cuda.VERSION}'\n"
        return real(**{"run": answer_nvidia_smi, "torch_version": version, **options})

    module.Probe = make_probe


def _write_triton(module: Any) -> None:
    if os.environ.get(triton_code.FOLDER):
        triton_code.replace_modules(module)


def start_process() -> None:
    """Begin a process of a rehearsal, in sitecustomize or after a fork: the environment may name other devices."""
    cuda.configure_devices()
    if os.environ.get(watch.REPORT):
        watch.start_report()
