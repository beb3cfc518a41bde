"""Checks of the cluster's settings that no job can have, and Slurm's time limits. Free of torch."""

from __future__ import annotations

import math
import re

from titan.cluster.schema import Cluster
from titan.config.settings import format_value
from titan.config.units import read_number
from titan.errors import ConfigError

RESERVED_OPTIONS = {
    "array",
    "dependency",
    "job-name",
    "output",
    "open-mode",
    "signal",
    "requeue",
    "no-requeue",
    "parsable",
}
"""Options of sbatch that titan sets itself, or that change output it reads."""
MOST_MINUTES = 3599
"""The longest time limit that is accepted as a number of minutes: YAML reads 1:00:00 without quotes as 3600."""
LONGEST_DAYS = 3650  # the longest accepted time limit; a longer one is a typing error


def check_cluster(cluster: Cluster) -> None:
    """Raise ConfigError for settings that no job can have."""
    if cluster.step_seconds > cluster.timeout:
        raise ConfigError(
            f"cluster.step_timeout={cluster.step_timeout:g}: longer than cluster.timeout={cluster.timeout:g}, the "
            "timeout outside of steps; give a smaller value, or a larger cluster.timeout."
        )
    limit = parse_minutes(cluster.time)
    if limit is not None and 60 * limit <= cluster.signal_seconds:
        raise ConfigError(
            f"cluster.time={cluster.time}: no longer than cluster.signal_seconds={cluster.signal_seconds}, so a "
            "run would get the signal to stop at its start; give more time, or a smaller cluster.signal_seconds."
        )
    if invalid := [name for name in cluster.environment or {} if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
        raise ConfigError(
            f"cluster.environment={format_value(cluster.environment)}: {invalid[0]} is not a valid name of a "
            "variable; correct it."
        )
    if reserved := sorted(set(cluster.sbatch or {}) & RESERVED_OPTIONS):
        raise ConfigError(f"cluster.sbatch={format_value(cluster.sbatch)}: titan sets {reserved[0]} itself; remove it.")
    if cluster.container != "none" and cluster.image is None:
        raise ConfigError(f"cluster.container={cluster.container}: needs an image; give cluster.image=IMAGE.")
    if cluster.container == "none" and (cluster.image or cluster.mounts):
        raise ConfigError(
            f"cluster.image={cluster.image}: no container is chosen; give cluster.container=pyxis or apptainer."
        )


def parse_minutes(time: str | None) -> int | None:
    """Return a time limit in minutes, rounded up; None for None.

    The formats are 12h, 90min, 2d and sbatch's: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS (its manual).

    Raises:
        ConfigError: for other formats, zero, more than `LONGEST_DAYS` and a number of more than `MOST_MINUTES`.
    """
    if time is None:
        return None
    if (seconds := read_number(time, "seconds")) is not None:
        return _round_minutes(seconds, time)
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise ConfigError(f"cluster.time={time}: not understood; give minutes, HH:MM:SS, D-HH:MM:SS or 12h.")
    if time.isdecimal() and int(time) > MOST_MINUTES:
        raise ConfigError(
            f"cluster.time={time}: a number of minutes must be at most {MOST_MINUTES} (YAML reads 2:00:00 "
            'without quotes as 7200); give HH:MM:SS or D-HH:MM:SS, in YAML between quotes: time: "24:00:00".'
        )
    days, *rest = (None if g is None else int(g) for g in match.groups())
    numbers = [part for part in rest if part is not None]
    if any(part > 59 for part in numbers[1:]) or (days is not None and numbers[0] > 23):
        raise ConfigError(f"cluster.time={time}: hours end at 23 after days, minutes and seconds at 59; correct it.")
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return _round_minutes((days or 0) * 86400 + sum(n * u for n, u in zip(numbers, units, strict=False)), time)


def _round_minutes(seconds: float, time: str) -> int:
    """Return a time limit in minutes, rounded up; raise ConfigError for zero and for more than `LONGEST_DAYS`."""
    if seconds > LONGEST_DAYS * 86400:
        raise ConfigError(
            f"cluster.time={time}: must be at most {LONGEST_DAYS} days; give minutes, HH:MM:SS or D-HH:MM:SS."
        )
    if seconds <= 0:
        raise ConfigError(f"cluster.time={time}: must be above zero; give minutes, HH:MM:SS or D-HH:MM:SS.")
    return math.ceil(seconds / 60)
