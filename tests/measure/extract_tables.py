"""Extract the figures of published studies from clones of their repositories: `python -m tests.measure.extract_tables`.

    python -m tests.measure.extract_tables gadre=CLONE steplaw=CLONE regmix=CLONE track3=CLONE

Writes the CSVs of tests/tables, which tests/tables/README.md describes: figures only, no code or text. A clone needs no
work tree. marin.csv is written by hand: it has eight rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.measure.published_tables import FOLDER

Row = Sequence[object]

LOSS_LINE = re.compile(rb"step:(\d+)/(\d+)\s+val_loss:(\d+\.\d+)")
TRACK3 = "records/track_3_optimization/results"
STEPS = 125
"""The distance in steps of the losses that all logs of track 3 have."""
GADRE_LOSSES = {
    "openlm": "openlm",
    "c4_val": "c4",
    "paloma_c4_en": "paloma_c4",
    "paloma_redpajama": "paloma_redpajama",
    "paloma_falcon": "paloma_refinedweb",
    "paloma_dolma": "paloma_code",
    "paloma_ptb": "paloma_ptb",
    "de-en": "c4_german",
}
"""The evaluation sets of Gadre et al. by a part of their path."""


def read(clone: str, *command: str) -> bytes:
    """Return what a command of git prints of a clone."""
    return subprocess.run(["git", "-C", clone, *command], capture_output=True, check=True).stdout


def read_csv(clone: str, path: str) -> list[dict[str, str]]:
    """Return the rows of a CSV of a clone."""
    return list(csv.DictReader(io.StringIO(read(clone, "show", f"HEAD:{path}").decode())))


def list_files(clone: str, folder: str, *suffixes: str) -> list[str]:
    """Return the files below a folder of a clone whose names end so."""
    names = read(clone, "ls-tree", "-r", "--name-only", "HEAD", folder).decode().split("\n")
    return [name for name in names if name.endswith(suffixes)]


def write(name: str, header: Sequence[str], rows: Iterable[Row]) -> None:
    """Write a CSV of tests/tables."""
    with open(FOLDER / name, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    print(f"{FOLDER / name}: {(FOLDER / name).stat().st_size / 1000:.0f} kB")


def extract_gadre(clone: str) -> None:
    """Write gadre.csv: parameters, tokens and losses on eight evaluation sets of 104 models."""
    rows = []
    for path in list_files(clone, "exp_data/models", ".json"):
        model = json.loads(read(clone, "show", f"HEAD:{path}"))
        settings, losses = model["hyperparameters"], {}
        for result in model["results"]:
            key = next(key for part, key in GADRE_LOSSES.items() if part in result["val_data"][0])
            losses[key] = f"{result['loss']:.5f}"
        sizes = settings["params"], settings["params_no_embed"], settings["tokens"]
        rows.append(
            [model["dataset_name"].removesuffix("_original"), *sizes, *(losses[k] for k in GADRE_LOSSES.values())]
        )
    write("gadre.csv", ["corpus", "N", "N_without_embeddings", "D", *GADRE_LOSSES.values()], rows)


def extract_steplaw(clone: str) -> None:
    """Write steplaw.csv: learning rate, batch and smoothed loss of 1,911 dense and 708 MoE runs."""
    rows: list[Row] = []
    for kind in ("dense", "moe"):
        for run in read_csv(clone, f"data/{kind}_lr_bs_loss.csv"):
            figures = int(run["N"]), run.get("Na", ""), int(float(run["D"]))
            loss = f"{float(run['smooth loss']):.5f}"
            rows.append([kind, *figures, f"{float(run['lr']):.4g}", int(run["bs"]), loss])
    write("steplaw.csv", ["kind", "N", "N_active", "D", "lr", "batch_rows", "loss"], rows)


def extract_regmix(clone: str) -> None:
    """Write regmix.csv, the mixtures, and regmix_losses.csv, the losses of models of 1M, 60M and 1B on them."""
    tables = {"train": "train_mixture_1m", "test": "test_mixture_1m", "test_1B": "test_mixture_1B"}
    losses = {
        ("train", "1M"): "train_pile_loss_1m",
        ("test", "1M"): "test_pile_loss_1m",
        ("test", "60M"): "test_pile_loss_60m",
        ("test_1B", "1B"): "test_pile_loss_1B",
    }
    if read(clone, "show", "HEAD:data/test_mixture_1m.csv") != read(clone, "show", "HEAD:data/test_mixture_60m.csv"):
        raise ValueError("models of 1M and 60M have different mixtures")
    mixtures: list[Row] = []
    for name, table in tables.items():
        rows = read_csv(clone, f"data/{table}.csv")
        sources = [key for key in rows[0] if key != "index"]
        mixtures += [[name, row["index"], *(f"{float(row[key]):g}" for key in sources)] for row in rows]
    write("regmix.csv", ["set", "mixture", *(s.removeprefix("train_the_pile_") for s in sources)], mixtures)
    results: list[Row] = []
    for (name, size), table in losses.items():
        rows = read_csv(clone, f"data/{table}.csv")
        keys = [key for key in rows[0] if key != "index"]
        results += [[name, size, row["index"], *(f"{float(row[key]):.4f}" for key in keys)] for row in rows]
    domains = [key.removeprefix("metric/the_pile_").removesuffix("_val_loss") for key in keys]
    write("regmix_losses.csv", ["set", "size", "mixture", *domains], results)


def list_curves(clone: str) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    """Yield the folder of each run of track 3, below its results, and the losses by step; logs hold one run or more."""
    for path in list_files(clone, TRACK3, ".txt", ".stdout", ".out", ".log"):
        curve: list[tuple[int, float]] = []
        for step, _, loss in LOSS_LINE.findall(read(clone, "show", f"HEAD:{path}")):
            if curve and int(step) < curve[-1][0]:
                yield name_recipe(path), tuple(curve)
                curve = []
            curve.append((int(step), float(loss)))
        yield name_recipe(path), tuple(curve)


def name_recipe(path: str) -> str:
    """Return the folder of a log, or the name of a log without a folder; copies of one run have one name."""
    parts = path.removeprefix(f"{TRACK3}/").split("/")
    name = "/".join(parts[:-1]) or parts[0].removesuffix(".txt")
    copies = ("20260506_trustlight", "20260518_soda_fade_3000_n9")
    return next((copy for copy in copies if name.startswith(copy)), name)[:50]


def extract_track3(clone: str) -> None:
    """Write track3_ends.csv, the final loss of each run, and track3_curves.csv, mean losses of recipes by step."""
    unique = {curve: name for name, curve in list_curves(clone) if len(curve) >= 5}
    ends = sorted((name, curve[-1][0], curve[-1][1]) for curve, name in unique.items())
    write("track3_ends.csv", ["recipe", "steps", "loss"], ends)
    recipes: dict[str, dict[int, list[dict[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for curve, name in unique.items():
        recipes[name][curve[-1][0]].append(dict(curve))
    rows: list[Row] = []
    for name, lengths in sorted(recipes.items()):
        length = max(lengths, key=lambda steps: len(lengths[steps]))
        rows += list(average(name, length, lengths[length]))
    write("track3_curves.csv", ["recipe", "steps", "runs", "step", "loss"], rows)


def average(name: str, length: int, curves: list[dict[int, float]]) -> Iterator[Row]:
    """Yield the rows of a recipe: mean losses at the steps that all its runs have, and at the end."""
    for step in [*range(STEPS, length, STEPS), length]:
        losses = [curve[step] for curve in curves if step in curve]
        if len(losses) == len(curves):
            yield [name, length, len(curves), step, f"{sum(losses) / len(losses):.5f}"]


STUDIES: dict[str, Callable[[str], None]] = {
    "gadre": extract_gadre,
    "steplaw": extract_steplaw,
    "regmix": extract_regmix,
    "track3": extract_track3,
}


if __name__ == "__main__":
    if any(argument.partition("=")[0] not in STUDIES for argument in sys.argv[1:]) or len(sys.argv) == 1:
        sys.exit(f"give clones as STUDY=CLONE; studies are {', '.join(STUDIES)}.")
    for argument in sys.argv[1:]:
        study, _, folder = argument.partition("=")
        STUDIES[study](str(Path(folder)))
