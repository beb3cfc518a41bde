"""Text from a trained model: `python -m titan.generate from=DIR prompt="..." [SETTING=VALUE ...]`; see `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titan.cluster import devices
from titan.cluster.environment import prepare_environment
from titan.config.arguments import describe_settings, parse_arguments, show_help
from titan.console import output
from titan.errors import ConfigError, exit_code
from titan.generation.schema import Degrees, Settings
from titan.parallelism.schema import Layout

HELP = """\
Text from a trained model: python -m titan.generate from=DIR prompt="..." [SETTING=VALUE ...]

  python -m titan.generate from=runs/first prompt="def main("          continue a text; it is streamed
  python -m titan.generate from=llama/ prompts=questions.txt output=answers.jsonl temperature=0
  python -m titan.generate from=runs/first tokens=[1,2,3] samples=4    four continuations of token ids

Settings and their defaults:

{settings}
  parallelism.tensor=1 ranks that each weight matrix is split over

Exit codes: 0 done, 1 failed, 2 wrong settings (the message says how to correct them), 130 interrupted.
"""
_PREFIX = "parallelism."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    prepare_environment(os.environ)
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run_generation(words))


def _run_generation(words: list[str]) -> int:
    if show_help(words, HELP.format(settings=describe_settings(Settings))):
        return 0
    settings = parse_arguments(Settings, [argument for argument in words if not argument.startswith(_PREFIX)])
    layout = _parse_layout([argument for argument in words if argument.startswith(_PREFIX)])
    texts = settings.read_texts()
    _check_paths(settings)
    if settings.output:
        output.ignore_write_errors()
    machine = devices.detect_machine(settings.device)

    from titan.generation.request import build_job
    from titan.weights.formats import open_weights, verify_checksums  # only now: errors need not wait for torch

    weights = open_weights(settings.from_, "from")
    job = build_job(settings, layout, texts, weights, machine)
    verify_checksums(weights, "from")
    if layout.devices == 1:
        from titan.cluster.rank_info import RankInfo
        from titan.generation.worker import work

        return work(job, RankInfo())
    from launchers.scratch import make_scratch_folder
    from launchers.supervisor import run_ranks

    with make_scratch_folder() as folder:
        return run_ranks(job, layout.devices, folder, module="titan.generation.rank")


def _parse_layout(words: list[str]) -> Layout:
    try:
        degrees = parse_arguments(Degrees, [argument.removeprefix(_PREFIX) for argument in words])
    except ConfigError as error:
        raise ConfigError(f"{_PREFIX}{error}") from None
    return degrees.build_layout()


def _check_paths(settings: Settings) -> None:
    """Raise ConfigError for paths that can't be right; a name at Hugging Face's hub looks like a path, too."""
    path = Path(settings.from_).expanduser()
    if not path.exists() and (path.parent.is_dir() or len(path.parts) != 2):
        raise ConfigError(f"from={settings.from_}: there is no such directory; correct the path.")
    output = Path(settings.output or "x").expanduser()
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise ConfigError(f"output={settings.output}: {problem}; give another file.")


def cli() -> None:
    """The console script `titan-generate`."""
    output.run(main, keep_going=False)


if __name__ == "__main__":
    cli()
