"""Measure this machine for planning: `python -m titan.calibrate to=conf/cluster/mine.yaml`; see `--help`."""

from __future__ import annotations

from titan.calibration.machine import Settings, run_calibration
from titan.config.command import Command

COMMAND = Command(
    "titan.calibrate",
    "Measure this machine for planning.",
    {"to=mine/cluster/here.yaml": "then: python -m titan.plan --config-dir mine cluster=here ..."},
    Settings,
    notes="""\
Measures matmuls, attention, memory, uncompiled work, launches and, with several ranks, their communication; on a CPU
also steps of small models in each layout. It takes less than five minutes. Let nothing else run meanwhile. The file is
an option of the cluster axis. If it fails, the same command continues with what is not measured yet.""",
    uses_torch=True,
)

main, cli = COMMAND.bind(run_calibration)

if __name__ == "__main__":
    cli()
