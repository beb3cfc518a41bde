"""Show the profiles of a run: `python -m titan.profile RUN`; see `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.console.text import sanitize_line
from titan.errors import ConfigError
from titan.files.run_directory import check_run_directory
from titan.profile import summary


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.profile`."""

    run: str = operand("RUN", "the directory of a run, such as runs/NAME")
    step: int | None = setting(None, "a step that was recorded; null: the latest profile", at_least=1)
    rank: int | None = setting(None, "the rank whose table is shown; null: the one with most work", at_least=0)


COMMAND = Command(
    "titan.profile",
    "Show where the time and memory of profiled steps went.",
    {
        "runs/first": "the latest profile, and ranks that are slower than the others",
        "runs/first step=20": "the profile that recorded step 20",
    },
    Settings,
    notes="A running run is profiled on demand: touch runs/first/profile/now\n"
    "Traces for https://ui.perfetto.dev are in runs/first/profile/step-N/.",
    keep_going=False,
)


def _show_profile(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    directory = check_run_directory(settings.run)
    summaries = summary.read(directory, settings.step)
    selected = _select_rank(summaries, settings.rank)
    trace = summary.build_trace_path(directory / "profile", selected.steps[0], selected.rank)
    for line in [*summary.format_table(selected), *summary.compare_ranks(summaries), f"trace: {trace}"]:
        print(sanitize_line(line))
    return 0


def _select_rank(summaries: list[summary.Summary], rank: int | None) -> summary.Summary:
    if rank is None:
        return max(summaries, key=lambda rank_summary: rank_summary.own_seconds)
    selected = next((rank_summary for rank_summary in summaries if rank_summary.rank == rank), None)
    if selected is None:
        ranks = ", ".join(str(rank_summary.rank) for rank_summary in summaries)
        raise ConfigError(f"rank={rank}: was not profiled; give one of {ranks}, or train with profile.ranks=[].")
    return selected


main, cli = COMMAND.bind(_show_profile)

if __name__ == "__main__":
    cli()
