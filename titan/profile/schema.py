"""The profile axis: which steps and ranks are profiled, and when a rank counts as slow. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan.config.settings import setting
from titan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps of an attempt are profiled, on which ranks, and what is recorded of them."""

    wait: int = setting(10, "steps of the attempt before the first profile", at_least=0)
    warmup: int = setting(1, "steps before the recorded ones in which the profiler runs already", at_least=0)
    active: int = setting(0, "recorded steps of a profile; 0: none but those on demand", at_least=0, cap=1000)
    repeat: int = setting(1, "profiles of an attempt; 0: until its end", at_least=0)
    every: int = setting(0, "steps from one profile to the next; 0: without a pause", at_least=0)
    ranks: tuple[int, ...] = setting((0,), "ranks that are profiled; []: all", at_least=0)
    on_demand: int = setting(
        2, "recorded steps of a profile that the file profile/now in the run's directory asks for; 0: it is ignored",
        at_least=0, cap=1000,
    )  # fmt: skip
    memory: bool = setting(False, "record allocations, and what is alive at their peak")
    shapes: bool = setting(False, "record the shapes of operands")
    stacks: bool = setting(False, "record the Python source lines of operations")

    rank_times: bool = setting(True, "measure how long each rank computes and waits for others, in every step")
    slow_steps: int = setting(
        20, "latest steps whose median decides whether a rank is slow; 0: none is named", at_least=0
    )
    slow_factor: float = setting(1.25, "a rank is slower when its own time is this many times the others'", above=1)

    def check(self, ranks: int) -> None:
        """Raise ConfigError for settings that contradict each other, or name a rank that the run lacks."""
        if 0 < self.every < self.warmup + self.active:
            raise ConfigError(
                f"profile.every={self.every}: shorter than a profile, which takes profile.warmup={self.warmup} and "
                f"profile.active={self.active} steps; give at least {self.warmup + self.active}, or 0."
            )
        if unknown := [rank for rank in self.ranks if rank >= ranks]:
            raise ConfigError(
                f"profile.ranks={list(self.ranks)}: the run has no rank {unknown[0]}; give ranks below {ranks}, "
                "or [] for all."
            )

    def starts(self, number: int) -> bool:
        """Return whether a profile starts, with its warm-up, before a step.

        Args:
            number: of the step in its attempt; 0 is the first.
        """
        if not self.active or number < self.wait:
            return False
        profile, step = divmod(number - self.wait, self.every or self.warmup + self.active)
        return step == 0 and (self.repeat == 0 or profile < self.repeat)

    def includes(self, rank: int) -> bool:
        """Return whether a rank is profiled."""
        return not self.ranks or rank in self.ranks
