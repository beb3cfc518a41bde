"""Runs a benchmark with sizes for a CPU in place of a GPU's: `python -m tests.rehearsal.smaller MODULE ARGUMENT...`."""

from __future__ import annotations

import importlib
import runpy
import sys

SIZES = {
    "titan.calibration.measurements": {
        "MATMUL_SHAPES": ((64, 64, 64), (64, 128, 64)),
        "ATTENTION": ((1, 2, 64, 16),),
        "UNCOMPILED": (64, 64, 128),
        "COPIED_MIB": 1,
    },
    "tests.measure.speed": {"CEILINGS": (64, 1)},
}
"""The sizes for CUDA in place of a GPU's, by module and name."""


def main() -> None:
    """Run the module."""
    for module, sizes in SIZES.items():
        for name, size in sizes.items():
            getattr(importlib.import_module(module), name)["cuda"] = size
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
