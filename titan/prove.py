"""Prove a layout before it is launched: `python -m titan.prove [AXIS=CHOICE ...]`; see `--help`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.command import plan_command
from titan.cluster import devices
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import setting
from titan.console.numbers import format_plural
from titan.errors import ConfigError, RunError
from titan.run import certificate, identity
from titan.run.shrink import Shrunk, describe_changes, shrink_run

if TYPE_CHECKING:
    from titan.cluster.rank_info import RankInfo
    from titan.numerics.checks import Check
    from titan.run.run import Run
    from titan.training.proof import ProofJob

RANK_SECONDS = 600.0
"""How long one training of three steps may take."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.prove`."""

    to: str | None = setting(None, "a JSON file to write, with the certificate; null: none")


COMMAND = Command(
    "titan.prove",
    "Prove on this machine that a layout computes what one device computes.",
    {
        "recipe=train_8b": "the layout of a recipe, shrunk to a few CPU ranks",
        "model=llama405b cluster=h100 cluster.nodes=64 parallelism=3d parallelism.shard=-1": "any layout",
        "recipe=train_8b to=certificate.json": "with all figures in a file",
    },
    Settings,
    overrides="Other arguments are those of titan.train.",
    notes="Needs no GPU. The certificate is kept for titan.train, which records it; with cluster.certificate=required "
    "nothing starts without one. Exit code 1: a check failed.",
    uses_torch=True,
    keep_going=False,
)


def _run_proof(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    file = None if settings.to is None else check_output_file(settings.to, (".json",))
    return plan_command(command_line.overrides, partial(_prove_run, file=file), _reject_sweep)


def _reject_sweep(trials: Any) -> list[int]:
    raise ConfigError("-m: titan.prove proves one layout; leave it out, and prove the sweep's layouts one by one.")


def _prove_run(target: Run, file: Path | None) -> int:
    from launchers.supervisor import make_scratch_folder

    start = time.monotonic()
    with make_scratch_folder() as folder:
        shrunk = shrink_run(target, devices.detect_machine("cpu"), str(folder))
        print(f"proving {target.layout}: {describe_changes(shrunk)}", flush=True)
        checks, ties = _run_checks(shrunk, folder)
    content = _build_content(shrunk, checks, ties, time.monotonic() - start)
    for line in format_checks(checks):
        print(line)
    for text in shrunk.uncovered:
        print(f"not covered: {text}")
    for text in ties:
        print(f"another choice of experts, or a fault that only some seeds show: {text}")
    print(_format_verdict(checks, content["seconds"]))
    saved = _save_certificate(content, certificate.compute_key(target))
    if file is not None:
        write_output_file(file, saved.read_text())
    return 0 if content["passed"] else 1


def _save_certificate(content: dict[str, Any], key: str) -> Path:
    """Write the certificate, and print its file; raises ConfigError when it can't be written."""
    try:
        saved = certificate.write(content, key)
    except OSError as error:
        raise ConfigError(
            f"{certificate.find_folder()}: the certificate can't be written ({error.strerror or error}); make the "
            "folder writable, or set XDG_STATE_HOME."
        ) from None
    print(f"certificate: {saved}")
    return saved


def _run_checks(shrunk: Shrunk, folder: Path) -> tuple[list[Check], list[str]]:
    """Return the checks of a shrunk run, and what may be ties between experts."""
    import torch

    from titan.training.proof import check_collectives, prove, work

    torch.set_num_threads(1)  # threads would not survive the fork of ranks
    if shrunk.run.compile.scope != "off":
        import torch._inductor.compile_fx  # so that ranks need not import it, each for itself
    show: Callable[[str], object] = lambda text: print(f"  {text}", file=sys.stderr)  # noqa: E731
    checks, ties = prove(shrunk.run, folder / "proof", lambda job: fork(job, partial(work, job)), show)
    show(f"collectives: traced, of {shrunk.target.layout}")
    return [*checks, check_collectives(shrunk)], ties


def fork(job: ProofJob, body: Callable[[RankInfo], int]) -> None:
    """Call `body` on a job's ranks.

    Raises:
        RunError: when one fails.
    """
    from launchers.forks import fork_ranks

    error = fork_ranks(body, job.run.layout.devices, job.folder / "ranks", RANK_SECONDS)
    if error is not None:
        raise RunError(f"a rank of the shrunk run failed: {error.format_report()}")


def _build_content(shrunk: Shrunk, checks: Sequence[Check], ties: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the certificate as plain data."""
    target, run = shrunk.target, shrunk.run
    changes = {name: [str(value) for value in values] for name, values in shrunk.changes.items()}
    return {
        "passed": all(check.passed for check in checks),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "model": target.choices.get("model"),
        "layout": str(target.layout),
        "overrides": list(target.overrides),
        "shrunk": {"layout": str(run.layout), "changes": changes},
        "checks": [vars(check) | {"passed": check.passed} for check in checks],
        "other_seeds": list(ties),
        "not_covered": list(shrunk.uncovered),
        "code": identity.describe_code(target),
    }


def format_checks(checks: Sequence[Check]) -> list[str]:
    """Return a line for each check: what was compared, the largest difference, its bound, and where it is."""
    width = max(len(check.name) for check in checks)
    return [
        f"{'ok' if check.passed else 'FAILED':<7} {check.name:<{width}}  {_format_size(check)}"
        f"{f'  {check.where}' if check.where and not (check.passed and check.bound == 0) else ''}"
        for check in checks
    ]


def _format_size(check: Check) -> str:
    if check.bound:
        return f"{check.worst:.1e} of at most {check.bound:g}"
    differing = f"{check.worst:.0f} differ" if math.isfinite(check.worst) else "different"
    return f"{'the same' if check.passed else differing} of {check.count}"


def _format_verdict(checks: Sequence[Check], seconds: float) -> str:
    failed = [check for check in checks if not check.passed]
    if not failed:
        return f"proven: {format_plural(len(checks), 'check')} in {seconds:.0f} s"
    first = failed[0]
    return (
        f"NOT proven: {len(failed)} of {format_plural(len(checks), 'check')} failed, first {first.name}: {first.where}"
    )


main, cli = COMMAND.bind(_run_proof)

if __name__ == "__main__":
    cli()
