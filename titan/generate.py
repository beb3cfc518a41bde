"""Text from a trained model: `python -m titan.generate MODEL prompt="..." [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from titan.cluster import devices
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file
from titan.console import output
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
    uses_torch=True,
    keep_going=False,
)


def run_generation(command_line: CommandLine[Settings]) -> int:
    """Generate, and return the exit code."""
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
        return run_job(job, layout.devices, folder, "titan.generation.rank", command_line.report)


main, cli = COMMAND.bind(run_generation)

if __name__ == "__main__":
    cli()
