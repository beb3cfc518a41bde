"""A/A comparisons of trained tiny models: `python -m tests.measure.aa_report [FOLDER]` takes some minutes.

Two variants whose recipes differ in a setting without an effect are trained from different seeds. Of 20 comparisons,
four seeds against four, at most one may find a difference. Then 0.05 nats are added to the validation loss of one
variant. A comparison must find them with the number of seeds that the other variant's comparison reported before.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.support.made_runs import INJECTED, NEUTRAL, find_end_quality, read_lines, write_lines
from tests.support.runs import compose_tiny_run, train_run
from titan.report.comparison import compare

RECIPE = (
    "training.steps=120", "schedule.warmup=10", "optimizer.lr=1e-2", "evaluation.tokens=4096", "checkpoint=off",
    "evaluation.every=0", "metrics.sample_tokens=0", "dataset.tokens=400000", "dataset.validation=0.1",
)  # fmt: skip
SEEDS, COMPARISONS, POOL = 4, 20, 40


def main(folder: Path) -> bool:
    """Train, compare, print; whether all came out as it should."""
    variants = {letter: [_train_variant(folder, letter, seed) for seed in range(POOL)] for letter in ("a", "b")}
    flagged = [_finds_difference(variants, number) for number in range(COMPARISONS)]
    print(f"A/A: {sum(flagged)} of {COMPARISONS} comparisons of {SEEDS} against {SEEDS} seeds found a difference")
    return bool(_finds_injected_loss(folder, variants)) and sum(flagged) <= 1


def _train_variant(folder: Path, letter: str, seed: int) -> Path:
    """A run of one of the variants; the second variant's seeds are others than the first's."""
    number, directory = seed + (POOL if letter == "b" else 0), folder / f"{letter}{seed}"
    if not (directory / "result.json").is_file():
        overrides = [*RECIPE, f"training.seed={number}"] + [NEUTRAL] * (letter == "b")
        codes = [result.code for result in train_run(compose_tiny_run(directory, *overrides))]
        if codes != [0]:
            raise RuntimeError(f"{directory} could not be trained: {codes}")
    return directory


def _finds_difference(variants: dict[str, list[Path]], number: int) -> bool:
    """Whether a comparison of equals finds a difference; every `POOL / SEEDS` comparisons seeds are drawn anew."""
    draw, part = divmod(number, POOL // SEEDS)
    seed_groups = [np.random.default_rng([draw, i]).permutation(POOL)[part * SEEDS :][:SEEDS] for i in range(2)]
    comparison = compare(
        [variants[letter][seed] for letter, seeds in zip("ab", seed_groups, strict=True) for seed in seeds]
    )
    return find_end_quality(comparison).answer == "yes"


def _finds_injected_loss(folder: Path, variants: dict[str, list[Path]]) -> bool:
    """Whether the injected difference is found with the seeds that are told beforehand."""
    beforehand = compare(variants["a"][:12], margin=INJECTED)
    seeds_note = next(note for note in beforehand.notes if "seeds per variant" in note)
    needed = max(2, int(re.findall(r"takes ([\d,]+) seeds", seeds_note)[0].replace(",", "")))
    print(f"beforehand, of one variant's 12 seeds: {seeds_note}")
    worse = [
        copy_with_worse_loss(directory, folder / f"worse{i}") for i, directory in enumerate(variants["b"][:needed])
    ]
    quality = find_end_quality(compare([*variants["a"][:needed], *worse]))
    print(f"with {INJECTED} nats added: {quality.text}")
    return quality.answer == "yes"


def copy_with_worse_loss(directory: Path, copy: Path) -> Path:
    """A copy of a run whose validation loss is worse."""
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    lines = read_lines(copy)
    for line in lines:
        if "validation_loss" in line:
            line["validation_loss"] += INJECTED
    write_lines(copy, lines)
    return copy


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(not main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as temporary_folder:
        sys.exit(not main(Path(temporary_folder)))
