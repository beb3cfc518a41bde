"""Faults of CUDA branches, planted in copies of the repository: `python -m tests.measure.rehearsal_faults [NAME...]`.

Each is found by one command of the rehearsal, by what it reports; a CPU's run finds none of them. The commands are
carried out without a fault first. Prints a table; exit code 1 where a fault was not found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.rehearsal import build, rehearse
from tests.support.planted import Fault, copy_repository, plant_fault

TRAINER, STAGING, METRICS = "titan/training/trainer.py", "titan/checkpoint/state.py", "titan/training/step_metrics.py"
MESH = "titan/parallelism/mesh.py"


@dataclass(frozen=True)
class DeviceFault:
    """A fault, the command that finds it, and a pattern of what that reports."""

    fault: Fault
    command: str
    report: str


def _define_device_fault(command: str, report: str, name: str, file: str, old: str, new: str) -> DeviceFault:
    return DeviceFault(Fault(name, file, old, new, ()), command, report)


DEVICES = (
    _define_device_fault(
        "single", "same device", "a tensor without device=",
        "titan/model/decoder.py", "torch.arange(x.shape[1], device=x.device)", "torch.arange(x.shape[1])",
    ),
    _define_device_fault(
        "ddp", "No backend type associated with device type cpu", "a collective of a CPU tensor on the devices' group",
        MESH, "            dist.all_reduce(tensor)\n        return tensor",
        "            host = tensor.cpu()\n            dist.all_reduce(host)\n        return tensor.copy_(host)",
    ),
    _define_device_fault(
        "ddp", "exit code 1, not 0", "gloo for a group of GPUs",
        MESH, '"nccl" if device_type == "cuda" else "gloo",', '"gloo",',
    ),
    _define_device_fault(
        "ddp", "several GPUs|same device", "a rank does not choose its GPU",
        MESH, "    torch.cuda.set_device(device)\n", "",
    ),
    _define_device_fault(
        "single", "_cuda_attachOutOfMemoryObserver", "a name that torch does not have",
        "titan/training/profiling.py", "_cuda_attach_out_of_memory_observer(", "_cuda_attachOutOfMemoryObserver(",
    ),
    _define_device_fault(
        "single", "enable_timing=True", "an event that measures no time",
        "titan/profile/waits.py", "torch.cuda.Event(enable_timing=True)", "torch.cuda.Event()",
    ),
)  # fmt: skip
WAITS = (
    _define_device_fault(
        "single", "Trainer._step: aten::_local_scalar_dense", "item() in a step",
        TRAINER, "norm = self.train_step.compute_norm()\n",
        "norm = self.train_step.compute_norm()\n        norm.item()\n",
    ),
    _define_device_fault(
        "single", "to_device.*pageable", "a batch in pageable memory",
        TRAINER, "fields = fields.pin_memory().to(", "fields = fields.to(",
    ),
    _define_device_fault(
        "single", "pack.*pageable", "a rank's metrics in pageable memory",
        METRICS, "        host = host.pin_memory()\n", "        pass\n",
    ),
    _define_device_fault(
        "single", "_copy_metrics_to_host.*pageable", "metrics copied into pageable memory",
        TRAINER, "dtype=metrics.dtype, pin_memory=True)", "dtype=metrics.dtype)",
    ),
    _define_device_fault(
        "single", "_update: copy_ to the host", "whether a step is bad, copied to the host",
        TRAINER, "memory.offload else skipped.float()",
        "memory.offload else skipped.float().cpu().to(skipped.device)",
    ),
    _define_device_fault(
        "hooks", "_start_copy.*pageable", "a hook's figure copied into pageable memory",
        "titan/hooks/context.py", "torch.empty((), dtype=torch.float64, pin_memory=True)",
        "torch.empty((), dtype=torch.float64)",
    ),
    _define_device_fault(
        "ep", "ExpertLoad|expert_load", "a device's tensor indexed by a list",
        "titan/training/expert_load.py", "[self._layer_indices, :-1]", "[list(self.routers), :-1]",
    ),
)  # fmt: skip
STREAMS = (
    _define_device_fault(
        "single", "differ from the CPU's|exit code", "metrics read before the device has copied them",
        METRICS, "        seconds = self.timer.wait()\n        values: NDArray[np.float64] = self.metrics.numpy()\n",
        "        values = self.metrics.numpy().copy()\n        seconds = self.timer.wait()\n",
    ),
    _define_device_fault(
        "muon, async save", "write after read: .* does not wait for copy_",
        "the update does not wait for the state's copy",
        STAGING, "            torch.cuda.current_stream().wait_event(self.pending_copy)\n", "            pass\n",
    ),
    _define_device_fault(
        "muon, async save", "write after read: .* does not wait for copy_", "an event recorded on the wrong stream",
        STAGING, "self.pending_copy = self.stream.record_event()",
        "self.pending_copy = torch.cuda.current_stream().record_event()",
    ),
    _define_device_fault(
        "muon, async save", "had this memory before", "memory that is freed while another stream copies it",
        STAGING, "local_tensor(tensor)) for name", "local_tensor(tensor).clone()) for name",
    ),
    _define_device_fault(
        "single", "pinned memory", "pinned memory that is written before the device has copied it",
        TRAINER, "            fields = fields.pin_memory().to(self.world.device, non_blocking=True)\n",
        "            host = fields.pin_memory()\n"
        "            fields = host.to(self.world.device, non_blocking=True)\n            host.zero_()\n",
    ),
)  # fmt: skip
FAULTS = (*DEVICES, *WAITS, *STREAMS)


@dataclass(frozen=True)
class DeviceFaultOutcome:
    """What came of a fault: the line that reports it, or why none does."""

    device_fault: DeviceFault
    caught: bool
    text: str
    seconds: float

    def format_row(self) -> str:
        """Return a line of the table."""
        excerpt = self.text.replace("\n", " ").replace("|", "/")[-160:]
        cell = excerpt if self.caught else f"NOT FOUND: {excerpt}"
        return f"| {self.device_fault.fault.name} | {self.device_fault.command} | {cell} | {self.seconds:.0f} |"


def judge_fault(device_fault: DeviceFault, root: Path, references: rehearse.References) -> DeviceFaultOutcome:
    """Plant a fault in a copy of the repository, and carry out its command."""
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-fault-", dir=root.parent))
    (rehearsed,) = (r for r in rehearse.TABLE if r.name == device_fault.command)
    with plant_fault(device_fault.fault, root), rehearse.Rehearsal(folder, root, references) as rehearsal:
        result = rehearsal.run(rehearsed)
    shutil.rmtree(folder)
    text = "\n".join(result.problems)
    match = re.search(f".*(?:{device_fault.report}).*", text)
    return DeviceFaultOutcome(
        device_fault, match is not None, match[0] if match else text or "no problem", time.monotonic() - start
    )


def compute_references(folder: Path, commands: Sequence[str]) -> rehearse.References:
    """Carry out commands without a fault, and return the losses of CPUs.

    Raises:
        RuntimeError: where something does not hold.
    """
    with rehearse.Rehearsal(folder) as rehearsal:
        for result in rehearse.rehearse_commands(rehearsal, [r for r in rehearse.TABLE if r.name in commands]):
            if result.problems:
                raise RuntimeError(f"{result.rehearsed.name} without a fault: {result.problems}")
    return rehearsal.references


def judge_faults(faults: Sequence[DeviceFault], folder: Path, lanes: int) -> Iterator[DeviceFaultOutcome]:
    """Judge faults, some at a time, each in a copy of the repository."""
    (folder / "without").mkdir()
    references = compute_references(folder / "without", [device_fault.command for device_fault in faults])

    def judge_in_copy(indexed: tuple[int, DeviceFault]) -> DeviceFaultOutcome:
        index, device_fault = indexed
        root = folder / str(index) / "copy"
        try:
            return judge_fault(device_fault, copy_repository(root), references)
        finally:
            shutil.rmtree(root.parent)

    with ThreadPoolExecutor(lanes) as pool:
        yield from pool.map(judge_in_copy, enumerate(faults))


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults that are asked for; 1 where one was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts, one of which a fault's name holds; none: all faults")
    args = parser.parse_args(arguments)
    if obstacle := build.find_obstacle():
        print(f"skipped: {obstacle}")
        return 0
    build.build_extension()
    faults = [f for f in FAULTS if not args.names or any(name in f.fault.name for name in args.names)]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        print("| fault | found by | what it reports | s |\n| --- | --- | --- | --- |", flush=True)
        for outcome in judge_faults(faults, Path(folder), rehearse.LANES):
            caught += outcome.caught
            print(outcome.format_row(), flush=True)
    print(f"{caught} of {len(faults)} faults were found", flush=True)
    return 0 if caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
