"""Lets Inductor write Triton code for the device, and executes the graphs given: `tests.measure.inductor`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.rehearsal import cuda

FOLDER = "REHEARSAL_TRITON_CODE"
"""The environment variable with the folder that gets Inductor's code."""


def replace_modules(graph: Any) -> None:
    """Write Inductor's code in place of loading it, and execute its graph.

    Args:
        graph: torch._inductor.graph.
    """
    _set_target()
    graph.config.force_disable_caches = True  # they would keep graphs whose code is not loaded

    def write_code(lowering: Any) -> SimpleNamespace:
        code = lowering.codegen()[0].value
        name = hashlib.sha256(code.encode()).hexdigest()[:16]
        file = Path(os.environ[FOLDER]) / f"{name}.py"
        file.write_text(code)
        lowering.cache_key, lowering.cache_path, lowering.cache_linemap = name, str(file), []
        graph_module = lowering.module

        def run_graph(arguments: list[Any]) -> Any:
            values = tuple(arguments)
            arguments.clear()
            return graph_module(*values)

        return SimpleNamespace(call=run_graph, __file__=str(file), key=name)

    graph.GraphLowering._compile_to_module = write_code


def _set_target() -> None:
    """Let Triton write code for an H100."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 10 * cuda.CAPABILITY[0] + cuda.CAPABILITY[1], 32))
        get_current_device = staticmethod(lambda: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    triton.runtime.driver.set_active(Driver())
