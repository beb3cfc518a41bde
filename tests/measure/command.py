"""Speeds, costs, and whether a device is right: `python -m tests.measure suite=NAME [KEY=VALUE ...]`.

    cpu, gpu, tiny       titan against the bare PyTorch loop: `tests.measure.training`
    modes, checkpoint    memory modes, and saving, each in a separate run: `tests.measure.separate_runs`
    acceptance           is a device right: `tests.measure.acceptance`
    data                 reading and preparing data: `tests.measure.preparing`
    generate             generating text: `tests.measure.generation`
    features, experts    what features of debugging, and experts, cost: modules of the same names
    scale                what grows with the ranks: `tests.measure.scale`

Suites need no package of the tests. Further programs in this folder: `tests.measure.fit_costs` fits the planner's
constants, `tests.measure.predicted` compares its predictions with measurements, and `tests.measure.tables` published
figures with titan's; others say in their first lines what they measure.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.measure import acceptance, experts, features, separate_runs, speed, training
from tests.measure.common import LONG, QUIET, SMALL
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.run import compose, identity
from titan.run.run import Run


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m tests.measure`."""

    suite: str = setting(
        "cpu",
        "what to measure: cpu, gpu, tiny, modes, checkpoint, acceptance, data, generate, features, experts, scale",
    )
    rounds: int = setting(9, "rounds per case", at_least=1, cap=10**6)
    steps: int = setting(5, "steps per round", at_least=1, cap=10**6)
    case: str = setting(
        "", "only cases whose title contains this text; of training also one of several with ; between", any_text=True
    )
    to: str | None = setting(
        None, "a JSON file to write, with all figures; of suite=acceptance the folder of the report; null: acceptance"
    )
    operators: bool = setting(False, "print the slowest operators of each case instead")
    only: Literal["titan", "bare", "sync"] | None = setting(
        None, "measure one side in this process, as suites do in others"
    )
    autocast: bool = setting(False, "with only=bare: under torch.autocast")

    def write(self, figures: Any) -> None:
        """Write the figures found so far to the file of `to`."""
        if self.to is not None:
            write_output_file(Path(self.to).expanduser(), figures)


COMMAND = Command(
    "tests.measure",
    "Measure titan's speed, as a ratio to the bare PyTorch loop, what its parts cost, and whether a device is right.",
    {
        "": "training on this CPU",
        "case='bf16, compile block' operators=true": "the operators that a step spends its time in",
        "suite=acceptance cluster.device=cuda to=acceptance": "is a GPU right, and how fast",
        "suite=features rounds=15 parallelism=fsdp compile=off": "what debugging features cost",
    },
    Settings,
    overrides="Other arguments are those of titan.train, for all cases.",
    uses_torch=True,
)


def _run_command(command_line: CommandLine[Settings]) -> int:
    settings, overrides = command_line.settings, command_line.overrides
    if settings.suite not in SUITES:
        raise ConfigError(f"suite={settings.suite}: choose one of {', '.join(SUITES)}.")
    if settings.to is not None and settings.suite != "acceptance":
        check_output_file(settings.to, (".json",))
    if settings.only == "sync":
        return speed.print_host_sync(overrides)
    if settings.only is not None:
        return speed.measure_side(settings.only, overrides, settings.rounds, settings.steps, settings.autocast)
    base = [*BASES.get(settings.suite, ()), *overrides]
    run = compose.compose_run([*LONG, *base])
    provenance = {
        "machine": asdict(run.machine),
        "code": identity.describe_code(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{run.machine.describe()}; torch {provenance['code']['torch']}; {provenance['date']}")
    return SUITES[settings.suite](settings, base, run, provenance) or 0


def _print_rows(settings: Settings, header: str, rows: Iterable[Any]) -> None:
    """Print a table row by row, and write the rows found so far after each."""
    print(f"\n{header}")
    measured = []
    for row in rows:
        print(row.row(), flush=True)
        measured.append(asdict(row))
        settings.write(measured)


def _measure_modes(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    separate_runs.measure_modes(settings, base, run)


def _measure_saving(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="titan-bench-") as folder:
        settings.write(separate_runs.measure_saving(run, [*base, *QUIET[1:]], settings.rounds, Path(folder)))


def _measure_data(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    from tests.measure import preparing

    settings.write(preparing.suite(settings.rounds))


def _measure_generation(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    from tests.measure import generation

    settings.write(generation.suite(run, settings.rounds))


def _measure_features(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    rows = features.suite(settings.case, [*LONG, *base], settings.rounds, settings.steps)
    _print_rows(settings, features.HEADER, rows)


def _measure_experts(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    rows = experts.suite(settings.case, [*LONG, *base], settings.rounds, settings.steps)
    _print_rows(settings, experts.HEADER, rows)


def _measure_scale(settings: Settings, base: list[str], run: Run, provenance: Any) -> None:
    from tests.measure import scale

    _print_rows(settings, scale.HEADER, scale.suite(settings.case))


BASES = {
    "gpu": ["dataset=synthetic", "training.seq_len=8192", "training.global_batch=8192", "cluster.device=cuda"],
    "tiny": SMALL,
    "checkpoint": separate_runs.SHAPE,
}
"""Settings of all runs of a suite, before those of the command line."""
SUITES: dict[str, Callable[[Settings, list[str], Run, dict[str, Any]], int | None]] = {
    **dict.fromkeys(("cpu", "gpu", "tiny"), training.measure_training),
    "modes": _measure_modes,
    "checkpoint": _measure_saving,
    "acceptance": acceptance.accept_device,
    "data": _measure_data,
    "generate": _measure_generation,
    "features": _measure_features,
    "experts": _measure_experts,
    "scale": _measure_scale,
}


main, cli = COMMAND.bind(_run_command)
