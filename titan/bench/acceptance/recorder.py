"""What the Flight Recorder says of a device's collectives: `python -m titan.bench.acceptance.recorder DEVICE FILE`.

One rank is enough to see the form of NCCL's recorder: three collectives end, and on a GPU a fourth waits for a long
kernel while the recorder is read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from titan.debug import rank_state

CYCLES = 2_000_000_000
"""Of the kernel that the last collective waits for: about a second."""


def main(device: str, file: str) -> int:
    """Write the recorder's content to a file, and print what titan reads in it as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        for _ in range(3):
            dist.all_reduce(torch.ones(4, device=device))
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            dist.all_reduce(torch.ones(4, device=device))
        content = rank_state.dump_recorder()
        dist.destroy_process_group()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_bytes(content)
    collectives = rank_state.read_collectives(content)
    numbers = {
        "entered": max(collectives.entered.values(), default=0),
        "completed": max(collectives.completed.values(), default=0),
    }
    started = {None: "not known", True: "yes", False: "no"}
    print(
        json.dumps(
            {
                **numbers,
                "pending": len(collectives.pending),
                "started": [started[o.started] for o in collectives.pending],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
