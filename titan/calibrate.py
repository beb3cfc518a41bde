"""Measure this machine for planning: `python -m titan.calibrate to=conf/cluster/mine.yaml`; see `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.cluster import devices
from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.config.settings import MISSING, setting
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code
from titan.files.atomic import write_atomic

HELP = """\
Measure this machine for planning: python -m titan.calibrate to=FILE.yaml

  python -m titan.calibrate to=mine/cluster/here.yaml    then: python -m titan.plan --config-dir mine cluster=here ...

Measures matmuls, attention, memory, uncompiled work, launches and, with several ranks, their communication; on a CPU
also steps of small models in each layout. It takes less than five minutes. Let nothing else run meanwhile. The file is
an option of the cluster axis.

Settings and their defaults:

{settings}

Exit codes: 0 success, 1 error, 2 wrong arguments (the message says what to change), 130 interrupted.
"""


CPU_RANKS = 2
"""Ranks that measure communication on a CPU."""
BUSY_LOAD = 0.25
"""Load average above which measurements of a CPU are disturbed."""
NO_LINK = "a layout of several devices needs link_gb_per_second and link_microseconds as well."


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    prepare_environment(os.environ)
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_calibration(words))


def _run_calibration(words: list[str]) -> int:
    if show_help(words, HELP.format(settings=describe_settings(Settings))):
        return 0
    settings = parse_arguments(Settings, words)
    file = _check_file(settings.to)
    machine = devices.detect_machine("auto")
    ranks = choose_ranks(settings.ranks, machine)
    print(f"measuring {machine.describe()}", flush=True)
    if busy := count_busy_cores():
        print(f"{busy:.1f} cores are busy with something else; end it and measure again, or the figures are too low.")
    text = format_cluster(machine, _measure_figures(machine, ranks), ranks)
    _write_file(file, text)
    print(text, end="")
    print(f"written: {file}")
    return 0


def count_busy_cores() -> float:
    """Return how many cores other processes have kept busy in the last minute; 0 below a quarter of one."""
    load = os.getloadavg()[0]
    return load if load > BUSY_LOAD else 0.0


def _check_file(to: str) -> Path:
    file = Path(to).expanduser()
    if file.suffix != ".yaml":
        raise ConfigError(f"to={file}: is not a YAML file; give a name that ends in .yaml.")
    return file


def choose_ranks(ranks_setting: int | str, machine: devices.Machine) -> int:
    """Return the number of ranks that measure communication.

    Raises:
        ConfigError: for more ranks than GPUs.
    """
    if ranks_setting == "auto":
        return CPU_RANKS if machine.device == "cpu" else machine.count
    if machine.device == "cuda" and int(ranks_setting) > machine.count:
        raise ConfigError(
            f"ranks={ranks_setting}: this machine has {machine.count} x {machine.name}, and each rank needs one; give "
            f"ranks={machine.count} or ranks=auto."
        )
    return int(ranks_setting)


def _measure_figures(machine: devices.Machine, ranks: int) -> dict[str, float]:
    """Return the figures by their names in `Hardware`."""
    import torch  # only now: --help and rejected command lines need not wait for it

    from titan.bench import calibration, step_figures

    torch.set_num_threads(machine.cores)
    figures = calibration.measure(torch.device(machine.device), machine.bf16_fast)
    if ranks > 1:
        figures |= calibration.measure_links(ranks, machine.device)
    if machine.device == "cpu":
        figures |= step_figures.measure_step_figures(figures, machine.cores, min(ranks, machine.cores))
        figures |= step_figures.measure_layout_figures(figures) if ranks > 1 else {}
    return figures


def format_cluster(machine: devices.Machine, figures: Mapping[str, float], ranks: int) -> str:
    """Return the file of a cluster with these figures."""
    lines = [f"# {machine.name}, measured by titan.calibrate.", f"device: {machine.device}"]
    if ranks == 1:
        lines.insert(1, "# No link was measured: " + NO_LINK)
    if machine.device == "cuda":
        lines += [f"devices_per_node: {machine.count}", f"device_name: {machine.name}"]
    lines += ["hardware:", *(f"  {name}: {value:.4g}" for name, value in figures.items())]
    return "\n".join(lines) + "\n"


def _write_file(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        raise RunError(f"to={file}: can't be written ({error.strerror}).") from error


def cli() -> None:
    """The console script `titan-calibrate`."""
    output.run(main)


if __name__ == "__main__":
    cli()
