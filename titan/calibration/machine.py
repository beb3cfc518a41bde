"""Measure this machine part by part, and write the file of a cluster, as `titan.calibrate` does."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from titan.cluster import devices
from titan.config.command import CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import MISSING, setting
from titan.console.requirements import VERSION
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.atomic import write_json

CPU_RANKS = 2
"""Ranks that measure communication on a CPU."""
BUSY_LOAD = 0.25
"""Load average above which measurements of a CPU are disturbed."""
NO_LINK = "a layout of several devices needs link_gb_per_second and link_microseconds as well."

Figures = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.calibrate`."""

    to: str = setting(MISSING, "the file to write, such as mine/cluster/here.yaml")
    ranks: int | str = setting(
        "auto",
        "ranks that communicate; auto: 2 on a CPU, all GPUs of this machine; 1: do not measure communication",
        at_least=1,
        at_most=64,
        words=("auto",),
    )


def run_calibration(command_line: CommandLine[Settings]) -> int:
    """Measure, print the file and write it; return the exit code."""
    settings = command_line.settings
    file = check_output_file(settings.to, (".yaml",), makes_folder=True)
    machine = devices.detect_machine("auto")
    ranks = choose_ranks(settings.ranks, machine)
    print(f"measuring {machine.describe()}", flush=True)
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        print(f"{load:.1f} cores are busy with something else; end it and measure again, or the figures are too low.")
    subject = {"host": platform.node(), "machine": machine.describe(), "cores": machine.cores, "ranks": ranks}
    parts = MeasuredParts(file, {**subject, "torch": metadata.version("torch"), "titan": VERSION})
    if parts.parts:
        print(f"measured before: {', '.join(parts.parts)}; delete {parts.file} to measure all again", flush=True)
    text = format_cluster(machine, _measure_figures(machine, ranks, parts), ranks)
    print(text, end="", flush=True)  # before the file, which may fail
    write_output_file(file, text, makes_folder=True)
    parts.remove()
    print(f"written: {file}")
    return 0


def choose_ranks(ranks_setting: int | str, machine: devices.Machine) -> int:
    """Return the number of ranks that measure communication."""
    if ranks_setting == "auto":
        return CPU_RANKS if machine.device == "cpu" else machine.count
    if machine.device == "cuda" and int(ranks_setting) > machine.count:
        raise ConfigError(
            f"ranks={ranks_setting}: this machine has {machine.count} x {machine.name}, and each rank needs one; give "
            f"ranks={machine.count} or ranks=auto."
        )
    return int(ranks_setting)


def _measure_figures(machine: devices.Machine, ranks: int, parts: MeasuredParts) -> Figures:
    """Return the figures by their names in `Hardware`; those of `parts` are not measured again."""
    import torch  # only now: --help and rejected command lines need not wait for it

    torch.set_num_threads(machine.cores)
    figures: Figures = {}
    try:
        for name, measure in _list_parts(machine, ranks).items():
            if name not in parts.parts:
                print(f"measuring {name}", flush=True)
                parts.add(name, measure(figures))
            figures |= parts.parts[name]
    except BaseException:
        if parts.parts:
            print(f"kept: {', '.join(parts.parts)}; the same command measures the rest", flush=True)
        raise
    return figures


def _list_parts(machine: devices.Machine, ranks: int) -> dict[str, Callable[[Figures], Figures]]:
    """Return the parts of the measurement in their order; each takes the figures of those before it."""
    import torch

    from titan.calibration import measurements

    device, single_ranks = torch.device(machine.device), min(ranks, machine.cores)
    parts: dict[str, Callable[[Figures], Figures]] = {
        "matmuls, attention and memory": lambda _: measurements.measure(device, machine.bf16_fast)
    }
    if ranks > 1:
        parts["communication"] = lambda _: measurements.measure_links(ranks, machine.device)
    if machine.device == "cpu":
        parts["steps on one device"] = lambda figures: measurements.measure_step_figures(
            figures, machine.cores, single_ranks
        )
    if machine.device == "cpu" and ranks > 1:
        parts["memory of a process"] = lambda _: measurements.measure_process_memory()
        parts |= {
            f"steps with {layout}": partial(measurements.measure_layout_figures, layout)
            for layout in measurements.DIMENSIONS
        }
    return parts


def format_cluster(machine: devices.Machine, figures: Mapping[str, float], ranks: int) -> str:
    """Return the file of a cluster with these figures."""
    lines = [f"# {machine.name}, measured by titan.calibrate.", f"device: {machine.device}"]
    if ranks == 1:
        lines.insert(1, "# No link was measured: " + NO_LINK)
    if machine.device == "cuda":
        lines += [f"devices_per_node: {machine.count}", f"device_name: {machine.name}"]
    lines += ["hardware:", *(f"  {name}: {value:.4g}" for name, value in figures.items())]
    return "\n".join(lines) + "\n"


class MeasuredParts:
    """The figures of each measured part by its name, in a file beside the target until the calibration is complete.

    A calibration takes minutes, and a rank may fail in the last one. The same command then continues with the part that
    is missing.
    """

    def __init__(self, target: Path, subject: Mapping[str, Any]) -> None:
        """Read what an earlier calibration of a subject has measured.

        Parts of another machine or another version of torch, which the subject names, are not used.
        """
        self.file = target.with_name(f".{target.name}.part")
        self._keeps = not os.path.exists(target) or os.path.isfile(target)  # beside a device nothing is written
        self._subject, self.parts = dict(subject), dict[str, Figures]()
        with contextlib.suppress(OSError, ValueError):  # none is there, or it is of something else
            content = untrusted.parse_object(untrusted.read_regular_file(self.file).decode())
            untrusted.check_type(content.get("parts"), dict[str, dict[str, float]], "parts")
            self.parts |= content["parts"] if content.get("subject") == self._subject else {}

    def add(self, name: str, figures: Figures) -> None:
        """Keep the figures of a part; a file that can't be written is no reason to stop measuring."""
        self.parts[name] = figures
        if not self._keeps:
            return
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, {"subject": self._subject, "parts": self.parts})

    def remove(self) -> None:
        """Remove the file: the calibration is complete."""
        with contextlib.suppress(OSError):
            self.file.unlink(missing_ok=True)
