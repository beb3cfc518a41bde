"""Measure this machine for planning: `python -m titan.calibrate to=conf/cluster/mine.yaml`; see `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.cluster import devices
from titan.cluster.environment import before_torch
from titan.config.arguments import arguments, describe, shows
from titan.config.settings import MISSING, setting
from titan.console import output
from titan.errors import ConfigError, RunError, exit_code
from titan.files.atomic import write_atomic

HELP = """\
Measure this machine for planning: python -m titan.calibrate to=FILE.yaml

  python -m titan.calibrate to=mine/cluster/here.yaml    then: python -m titan.plan --config-dir mine cluster=here ...

Measures matmuls, attention, memory, uncompiled work, launches and, with several ranks, their communication; it takes
less than five minutes. Let nothing else run meanwhile. The file is an option of the cluster axis.

Settings and their defaults:

{settings}

Exit codes: 0 success, 1 error, 2 wrong arguments (the message says what to change), 130 interrupted.
"""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.calibrate`."""

    to: str = setting(MISSING, "the file to write, such as mine/cluster/here.yaml")
    ranks: int = setting(2, "ranks that communicate; 1: do not measure communication", at_least=1, at_most=64)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    before_torch(os.environ)
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _main(given))


def _main(given: list[str]) -> int:
    if shows(given, HELP.format(settings=describe(Settings))):
        return 0
    settings = arguments(Settings, given)
    file = Path(settings.to).expanduser()
    if file.suffix != ".yaml":
        raise ConfigError(f"to={file}: is not a YAML file; give a name that ends in .yaml.")
    machine = devices.detect("auto")

    import torch  # only now: --help and rejected command lines need not wait for it

    from titan.bench import calibration

    torch.set_num_threads(machine.cores)
    print(f"measuring {machine.describe()}", flush=True)
    found = calibration.measure(torch.device(machine.device))
    if settings.ranks > 1:
        found |= calibration.link_figures(settings.ranks, machine.device)
    lines = [f"# {machine.name}, measured by titan.calibrate.", f"device: {machine.device}"]
    if machine.device == "cuda":
        lines += [f"devices_per_node: {machine.count}", f"device_name: {machine.name}"]
    lines += ["hardware:", *(f"  {name}: {value:.4g}" for name, value in found.items())]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, "\n".join(lines) + "\n")
    except OSError as error:
        raise RunError(f"to={file}: can't be written ({error.strerror}).") from error
    print("\n".join(lines[1:]))
    print(f"written: {file}")
    return 0


def cli() -> None:
    """The console script `titan-calibrate`."""
    output.run(main)


if __name__ == "__main__":
    cli()
