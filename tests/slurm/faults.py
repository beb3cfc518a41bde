"""An optimizer that does harm in a job's first attempt: $FAULTS says which, as `LR:WORD:RANK,...`, for that learning
rate.

`slow` makes each step of all ranks take a tenth of a second more, `slower` four; at step 3 `raise` raises and
`kill` kills the rank. `always` raises in every attempt.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from titan.optimizer.schema import AdamW

FAULT_STEP = 3
SLOW_SECONDS = {"slow": 0.1, "slower": 0.4}


@dataclass(frozen=True, kw_only=True)
class Harmful(AdamW):
    """AdamW, with what $FAULTS says."""

    def build(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer over `parameters`, with a hook."""
        optimizer, steps = super().build(parameters), [0]
        faults = [f.split(":") for f in os.environ.get("FAULTS", "").split(",") if f]
        mine = [(word, int(rank)) for lr, word, rank in faults if float(lr) == self.lr]
        if "SLURM_RESTART_COUNT" in os.environ or "SLURM_JOB_DEPENDENCY" in os.environ:
            mine = [(word, rank) for word, rank in mine if word == "always"]

        def hook(*_: object) -> None:
            steps[0] += 1
            for word, rank in mine:
                harm(word, rank, steps[0])

        optimizer.register_step_pre_hook(hook)
        return optimizer


def harm(word: str, rank: int, step: int) -> None:
    own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if word in SLOW_SECONDS:
        time.sleep(SLOW_SECONDS[word])
    elif step == FAULT_STEP and own == rank:
        if word in ("raise", "always"):
            raise ZeroDivisionError(f"by rank {rank}")
        os.kill(os.getpid(), signal.SIGKILL)
