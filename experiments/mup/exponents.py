"""The table of exponents, `exponents.csv`: how initial values and updates of a parameter scale with width and depth.

A figure of a parameter is multiplied by (dim / base_dim) ** width * (layers / base_layers) ** depth. The table is muP
(arXiv:2203.03466, table 3) with CompleteP's depth multiplier 1 / L (arXiv:2505.01618, table 1) and, for matrices that
Muon updates, the spectral condition (arXiv:2310.17813): an update of norm sqrt(outputs / inputs). It has no multipliers
in the forward pass: a multiplier c of a matrix W is moved into the matrix, whose standard deviation, learning rate and
eps are then c, c and 1 / c times as large, and whose weight decay is 1 / c times as large, which trains the same.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from titan.errors import ConfigError

TABLE = Path(__file__).with_name("exponents.csv")
ROLES = {
    "embedding": ("tok_embeddings.weight",),
    "head": ("head.weight",),
    "norm": ("norm.weight",),
    "qk_norm": ("layers.*.attention.[qk]_norm.weight",),
    "block_norm": ("layers.*norm.weight",),
    "router": ("layers.*.feed_forward.router.weight",),
    "residual": ("layers.*.attention.wo.weight", "layers.*.feed_forward.*w2.weight"),
    "hidden": ("layers.*.attention.w[qkv].weight", "layers.*.feed_forward.*w[13].weight"),
}
"""Patterns of the parameters of each role; a residual matrix writes to the residual stream."""
FIGURES = ("std", "lr", "weight_decay", "eps")


class ModelScale(NamedTuple):
    """How much wider and deeper than the base a model is."""

    width: float
    depth: float


@dataclass(frozen=True)
class Exponents:
    """Exponents of width and depth of one figure."""

    width: float
    depth: float

    def compute_factor(self, scale: ModelScale) -> float:
        """Return the figure at this scale relative to that of the base."""
        return float(scale.width**self.width * scale.depth**self.depth)


def find_role(name: str) -> str:
    """Return the role of a parameter, from its name in the whole model.

    Raises:
        ConfigError: for a parameter of no role.
    """
    for role, patterns in ROLES.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return role
    raise ConfigError(
        f"model.transfer: the parameter {name} has no role in experiments.mup.exponents.ROLES, so it can't be scaled; "
        "add its pattern there, or give model.transfer=none."
    )


@cache
def read_table() -> dict[tuple[str, str, str], Exponents]:
    """Return the exponents by role, optimizer and figure."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["role"], row["optimizer"], figure): Exponents(float(row[f"{figure}_width"]), float(row[f"{figure}_depth"]))
        for row in rows
        for figure in FIGURES
    }


def compute_factor(name: str, optimizer: str, figure: str, scale: ModelScale) -> float:
    """Return by what a figure of a parameter is multiplied.

    Args:
        name: of the parameter in the whole model.
        optimizer: as in the table; initial values are the same for all.
        figure: of `FIGURES`.
        scale: of the model.
    """
    return read_table()[find_role(name), optimizer, figure].compute_factor(scale)
