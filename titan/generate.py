"""Text from a trained model: `python -m titan.generate MODEL prompt="..." [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from titan.cluster import devices
from titan.cluster.environment import prepare_environment
from titan.config.command import Command, CommandLine
from titan.console import output
from titan.errors import ReasonReceiver, ignore_reason
from titan.files.output_files import check_output_file
from titan.generation.schema import Settings
from titan.weights.origin import check_source

COMMAND = Command(
    "titan.generate",
    "Generate text with a trained model.",
    {
        'runs/first prompt="def main("': "continue a text; it is streamed",
        "llama/ prompts=questions.txt to=answers.jsonl temperature=0": "the prompts of a file; into a file",
        "runs/first tokens=[1,2,3] samples=4": "four continuations of token ids",
    },
    Settings,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    prepare_environment(os.environ)
    return COMMAND.run(run_generation, argv)


def run_generation(command_line: CommandLine[Settings], report: ReasonReceiver = ignore_reason) -> int:
    """Generate, and return the exit code; `report` takes the error of the rank that failed first."""
    settings = command_line.settings
    layout = settings.parallelism.build_layout()
    texts = settings.read_texts()
    check_source(settings.source)
    if settings.to is not None:
        check_output_file(settings.to, (".jsonl",), sources=[settings.prompts or ""])
        output.ignore_write_errors()
    machine = devices.detect_machine(settings.device, setting="device")

    from titan.generation.request import build_job
    from titan.weights.formats import open_weights  # only now: errors need not wait for torch

    weights = open_weights(settings.source, "", verify=True)
    job = build_job(settings, layout, texts, weights, machine)
    from launchers.supervisor import make_scratch_folder, run_job

    with make_scratch_folder() if layout.devices > 1 else nullcontext(Path()) as folder:
        return run_job(job, layout.devices, folder, "titan.generation.rank", report)


def cli() -> None:
    """The console script `titan-generate`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
