"""The fitted constants of the cost model, from `constants.json`. Free of torch.

docs/plan_accuracy.md names the program that fits them on the published runs in `published.csv`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say about GPUs.

    Attributes:
        matmul: fraction of the peak that a large bf16 matmul reaches.
        matmul_8bit: the same for 8-bit matmuls.
        casts: memory traffic of casts to 8 bits, relative to one pass over each operand.
        memory: fraction of the memory's bandwidth that fused elementwise work reaches.
        eager: memory traffic of elementwise work that is not compiled, relative to fused.
        overlapped: fraction of tensor-parallel communication that stays exposed where matmuls overlap with it.
        per_doubling: fraction of a step lost for each doubling of the number of nodes.
        power: exponent with which speed follows a power limit: a third if power grows with the cube of the clock.
        fragments: memory that CUDA's caching allocator reserves beside live tensors, as a fraction of them.
        error: the 90th percentile of the relative error of step times, of runs that the fit has not seen: those in
            unseen.csv, or of the source that is predicted worst when it is left out, whichever is larger.
        memory_error: the 90th percentile of the relative error of peak memory where `fragments` is not fitted, because
            one source only states peaks of PyTorch.
        cpu_error: the 90th percentile of the relative error of step times on a CPU that `titan.calibrate` measured, of
            the small runs of docs/plan_accuracy.md.
        cpu_memory_error: that of peak memory, of the same runs.
        experts: the geometric mean of measured over predicted step times of the runs of models with experts in
            `experts.csv`, by which their predictions are multiplied.
        experts_least: the least of these ratios.
        experts_most: the largest of them.
        experts_error: the 90th percentile of the relative error of their step times, each predicted with the ratio of
            the runs of other models and devices.
    """

    matmul: float = 0.75
    matmul_8bit: float = 0.65
    casts: float = 1.0
    memory: float = 0.8
    eager: float = 3.0
    overlapped: float = 0.3
    per_doubling: float = 0.002
    power: float = 0.33
    fragments: float = 0.1
    error: float = 0.15
    memory_error: float = 0.1
    cpu_error: float = 0.29
    cpu_memory_error: float = 0.16
    experts: float = 1.0
    experts_least: float = 1.0
    experts_most: float = 1.0
    experts_error: float = 1.0

    @property
    def version(self) -> str:
        """Eight hexadecimal digits of a hash of all constants, by which a recorded prediction names them."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


@cache
def load_constants() -> Constants:
    """Return the fitted constants."""
    return Constants(**json.loads(FILE.read_text())["constants"]) if FILE.is_file() else Constants()
