"""Which rows of a step a data-parallel rank computes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataShard:
    """Rank `rank` of the `ranks` among which the rows of a step are divided."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        """Refuse a rank outside [0, ranks)."""
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")

    def slots(self, rows: int) -> int:
        """How many places each rank has for a step of `rows` rows."""
        return -(-rows // self.ranks)

    def rows(self, rows: int) -> range:
        """Which of a step's `rows` rows are this rank's."""
        slots = self.slots(rows)
        return range(min(rows, self.rank * slots), min(rows, (self.rank + 1) * slots))
