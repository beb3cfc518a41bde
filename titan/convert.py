"""Convert weights from one format to another: `python -m titan.convert SOURCE to=DIR [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

from titan.config.command import Command
from titan.weights.convert import Convert, run_conversion

COMMAND = Command(
    "titan.convert",
    "Convert weights from one format to another.",
    {
        "runs/first to=exported": "for transformers, in bf16",
        "exported to=again format=titan": "for titan: checkpoint.weights=again",
        "meta-llama/Llama-3.2-1B to=llama": "from Hugging Face's hub",
    },
    Convert,
    notes="At most one file's tensors are in memory. To restart an interrupted conversion, rerun its command.",
)

main, cli = COMMAND.bind(run_conversion)

if __name__ == "__main__":
    cli()
