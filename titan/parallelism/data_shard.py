"""The rows of a step that a data-parallel rank computes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

KEY_BITS = 31
"""Bits of each of the two numbers that the key of a row is stored as."""


@dataclass(frozen=True)
class DataShard:
    """Shard `rank` of the `ranks` equal shards that the rows of a step are divided into."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise ValueError when the rank is not in [0, ranks)."""
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")

    def count_slots(self, rows: int) -> int:
        """Return the number of rows that each rank computes in a step of `slice_rows` rows, padding included."""
        return -(-rows // self.ranks)

    def slice_rows(self, rows: int) -> range:
        """Return this rank's range of a step's `slice_rows` rows."""
        slots = self.count_slots(rows)
        return range(min(rows, self.rank * slots), min(rows, (self.rank + 1) * slots))
