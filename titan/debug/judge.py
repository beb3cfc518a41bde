"""What the rank that reports says about ranks that make no progress, and when it decides that the run ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from titan.cluster.rank_info import RankInfo
from titan.debug import diagnosis, verdict
from titan.debug.activity import IN_STEP
from titan.debug.clock import STOP_SECONDS, Clock
from titan.debug.diagnosis import Diagnosis, World
from titan.debug.verdict import Verdict

log = logging.getLogger("titan")


class Judge:
    """Says what the run waits for.

    Attributes:
        setting: returns the name of the setting that a timeout in seconds comes from.
        said: the ranks that were named last, and after how many seconds without progress; None: nothing is said.
    """

    def __init__(self, directory: Path, rank_info: RankInfo, attempt: int, clock: Clock) -> None:
        """Take whose progress it is; nothing is said yet.

        Args:
            directory: the run's.
            rank_info, attempt: who this is.
            clock: knows what is late.
        """
        self.directory, self.rank_info, self.attempt, self.clock = directory, rank_info, attempt, clock
        self.setting: Callable[[float], str] = lambda seconds: "cluster.timeout"
        self.said: tuple[tuple[int, ...], float] | None = None

    def judge(self, world: World) -> Verdict | None:
        """Say what the run waits for; None where it waits for nothing that hangs.

        The verdict has an exit code where the run ends now.
        """
        found, subject, age, limit = self._diagnosis(world)
        code = self._exit_code(world, found, age, limit)
        if code is None and self._is_healthy(world, found, age, limit):
            return None
        sentence = f"{subject}: {found.what}"
        if code == 1:
            name = self.setting(limit)
            sentence += f"; ended after {name}={limit:g}, see {self.directory}/{verdict.ANALYSIS} and the stacks there"
        if code == 1 and self.rank_info.supervised:
            log.error(sentence)  # the launcher shows it as the error that ended the run
        elif code is not None or self._is_news(found, age):
            self.say(sentence)
            self.said = (found.ranks, age)
        result = Verdict(self.attempt, sentence, found.ranks, found.node, code)
        verdict.write(self.directory, result)
        return result

    def _is_healthy(self, world: World, found: Diagnosis, age: float, limit: float) -> bool:
        """Whether the run is slow, but does not hang: all ranks do the same, or those that are late make progress."""
        if found.usual and age < limit / 2 and self.clock.asked is None:
            return True
        return _make_progress(world, found.ranks)

    def _diagnosis(self, world: World) -> tuple[Diagnosis, str, float, float]:
        """Return what is late, the step or a save, the sentence's beginning, the seconds that it takes, and its limit
        in seconds."""
        what = self.clock.activity
        usual = what.usual()
        words = f" (usually {usual:.2g} s)" if usual else ""
        found = diagnosis.diagnose(world)
        saves = any(state.saving is not None for state in world.states.values())
        if saves and not (found.ranks and what.age() >= self.clock.patience()):
            age = max(what.save_age(), what.age())
            return diagnosis.diagnose_save(world), f"no progress of a save for {age:.0f} s", age, what.save_timeout
        return found, f"no {_missing(what.phase)} for {what.age():.0f} s{words}", what.age(), what.timeout

    def _exit_code(self, world: World, found: Diagnosis, age: float, limit: float) -> int | None:
        """Return the code with which the run ends now; None when it goes on waiting."""
        if not (found.ranks or found.together) or self.rank_info.world_size == 1:
            return None
        asked, progress = self.clock.asked, _make_progress(world, found.ranks)
        if asked is not None and not self.rank_info.scheduled:
            return 130 if self.clock.now() - asked >= min(STOP_SECONDS, limit / 2) and not progress else None
        if progress and found.saves and not any(state.hung for state in world.states.values()):
            return None  # training goes on beside the save
        return 1 if age >= limit - self.clock.lead(limit) or any(s.hung for s in world.states.values()) else None

    def _is_news(self, found: Diagnosis, age: float) -> bool:
        """Whether to say it: at first, for other ranks, and when twice the time has passed."""
        return self.said is None or found.ranks != self.said[0] or age >= 2 * self.said[1]

    def withdraw(self, step: int) -> None:
        """Say that the run continues."""
        self.said = None
        verdict.clear(self.directory)
        self.say(f"the run continues with step {step}")

    def say(self, line: str) -> None:
        """Write a message into this rank's log and the run's, and on the terminal where no launcher does so."""
        log.warning(line)
        verdict.say(self.directory, line)
        if not self.rank_info.supervised:
            print(f"titan: {line}", file=sys.stderr, flush=True)


def _make_progress(world: World, ranks: Sequence[int]) -> bool:
    """Whether the ranks that the others wait for make progress."""
    late = [world.states[rank].late if rank in world.states else 1.0 for rank in ranks]
    return bool(late) and max(late) < 0.5 and not world.silent & set(ranks)


def _missing(phase: str) -> str:
    """Return what did not come in a phase."""
    return "step" if phase in IN_STEP else "progress"
