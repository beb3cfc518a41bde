"""Coordinate check: sizes of activations over width and depth, as a table (arXiv:2203.03466, appendix D.1).

    python -m experiments.mup.coordinates over=width optimizer=adamw seeds=3

trains a model at each size on one device, with transfer and without, and writes how much each activation has changed
since the initial weights. With transfer a change does not depend on the size: the slope of its logarithm over that of
the size is zero. There are few different tokens, fewer than the smallest width: exponents hold where the width is the
largest number.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from titan import api
from titan.errors import ConfigError
from titan.model.init_weights import materialise_model
from titan.optimizer.update_factors import build_optimizer

CONF = Path(__file__).parent / "conf"
MULTIPLES = (1, 2, 4, 8)
"""Of the base's width, or of its blocks."""
ROWS, LENGTH, VOCAB = 8, 64, 16
FLAT = 0.1
"""By how much the largest change may exceed the smallest over all sizes."""
ROLES = ("embedding", "hidden", "router", "residual", "norm", "head")
"""Activations: of the embedding, of the layers inside of branches, what all branches add, behind the norm, logits."""
DEFAULTS = {
    "over": "width", "base": "32", "layers": "4", "model": "llama", "optimizer": "adamw", "seeds": "3", "steps": "12",
}  # fmt: skip
"""The arguments and their defaults, but for lr, which is the optimizer's of `LEARNING_RATES`."""
LEARNING_RATES = {"adamw": "0.0025", "muon": "0.016"}
"""About those with the least loss of the base in `sweep=mup`: a check is of the rates at which models are trained."""


class ModelSize(NamedTuple):
    """Width and depth of a model."""

    dim: int
    layers: int


@dataclass(frozen=True)
class CoordinateRow:
    """A line of the table: one activation after one step, at all sizes.

    Attributes:
        transfer: `model.transfer`.
        step: updates.
        role: of `ROLES`.
        changes: mean over seeds of the mean absolute change since the initial weights, one for each size.
        slope: of the logarithm of the change over that of the size.
        spread: the largest change divided by the smallest, less one.
    """

    transfer: str
    step: int
    role: str
    changes: tuple[float, ...]
    slope: float
    spread: float


def list_sizes(options: dict[str, str]) -> list[ModelSize]:
    """Return the sizes of a check over "width" or "depth"; the base is the smallest."""
    base, layers = int(options["base"]), int(options["layers"])
    if options["over"] == "width":
        return [ModelSize(base * multiple, layers) for multiple in MULTIPLES]
    return [ModelSize(base, layers * multiple) for multiple in MULTIPLES]


def compose(size: ModelSize, transfer: str, options: dict[str, str], seed: int = 0) -> Any:
    """Return the run of a size; heads have 16 elements, feed-forward layers and experts three widths."""
    return api.compose(
        f"hydra.searchpath=[file://{CONF}]", f"model=mup_{options['model']}", f"optimizer={options['optimizer']}",
        f"optimizer.lr={options['lr']}", f"model.dim={size.dim}", f"model.layers={size.layers}", "model.head_dim=16",
        f"model.heads={size.dim // 16}", f"model.kv_heads={size.dim // 32}", f"model.ffn={3 * size.dim}",
        f"model.vocab={VOCAB}", f"model.base_layers={options['layers']}", f"model.transfer={transfer}",
        f"model.base_dim={options['base']}", "precision=fp32",
        f"training.seed={seed}", f"training.seq_len={LENGTH}", f"training.global_batch={ROWS * LENGTH}",
        "dataset=synthetic", f"dataset.vocab={VOCAB}", "dataset.tokens=20000", "cluster=cpu",
        *([f"model.expert_ffn={3 * size.dim // 2}"] if "moe" in options["model"] else []),
    )  # fmt: skip


def sample_batch(seed: int) -> Tensor:
    """Return tokens [ROWS, LENGTH + 1]: each is three times the one before, plus one of four, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((3 * tokens[-1] + torch.randint(4, (ROWS,), generator=generator)) % VOCAB)
    return torch.stack(tokens, 1)


class ActivationRecorder:
    """Records the activations of a forward pass by role."""

    def __init__(self, model: Any) -> None:
        """Register forward hooks on a decoder."""
        self.activations: dict[str, list[Tensor]] = {}
        names = {"embedding": ("tok_embeddings",), "norm": ("norm",), "head": ("head",)}
        inner = {"hidden": ("wq", "wk", "wv", "w1", "w3"), "router": ("router",)}
        for name, module in model.named_modules():
            for role, ends in (names | inner).items():
                if name in ends or (role in inner and name.rpartition(".")[2] in ends):
                    module.register_forward_hook(self._make_hook(role))
        model.norm.register_forward_pre_hook(lambda _, inputs: self._record("stream", inputs[0]))

    def read(self) -> dict[str, Tensor]:
        """Return the activations since the last call, those of each role in one tensor."""
        activations, self.activations = self.activations, {}
        stream = activations.pop("stream")[0]
        activations["residual"] = [stream - activations["embedding"][0]]
        return {role: torch.cat([t.flatten() for t in tensors]) for role, tensors in activations.items()}

    def _make_hook(self, role: str) -> Any:
        return lambda _module, _inputs, output: self._record(role, getattr(output, "logits", output))

    def _record(self, role: str, output: Any) -> None:
        self.activations.setdefault(role, []).append(output.detach().float().clone())


def measure_changes(run: Any, steps: int) -> list[dict[str, float]]:
    """Return the mean absolute change of each activation of one batch after each of some updates on other batches."""
    with torch.device("meta"):
        model: Any = run.model.build()
    materialise_model(model, model.initial(), run.training.seed, "cpu")
    optimizer = build_optimizer(run.optimizer, run.model, model.named_parameters())
    recorder, probe = ActivationRecorder(model), sample_batch(10_000)[:, :-1]

    def probe_model() -> dict[str, Tensor]:
        with torch.no_grad():
            model.head(model(probe))
        return recorder.read()

    initial, changes = probe_model(), []
    for step in range(steps):
        _train_step(model, optimizer, sample_batch(1_000 * run.training.seed + step))
        recorder.activations.clear()
        changes.append({role: (t - initial[role]).abs().mean().item() for role, t in probe_model().items()})
    return changes


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    loss = model.head(model(batch[:, :-1]), batch[:, 1:]) / (ROWS * LENGTH)  # type: ignore[operator]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tabulate(options: dict[str, str]) -> Iterator[CoordinateRow]:
    """Yield the table: with transfer and without, after each step, each role."""
    sizes, seeds = list_sizes(options), range(int(options["seeds"]))
    for transfer in ("both", "none"):
        measured = [
            [measure_changes(compose(size, transfer, options, seed), int(options["steps"])) for seed in seeds]
            for size in sizes
        ]
        for step in range(int(options["steps"])):
            for role in (role for role in ROLES if role in measured[0][0][step]):
                changes = tuple(sum(run[step][role] for run in runs) / len(runs) for runs in measured)
                yield summarise(transfer, step + 1, role, changes, [size[options["over"] == "depth"] for size in sizes])


def summarise(transfer: str, step: int, role: str, changes: tuple[float, ...], sizes: Sequence[int]) -> CoordinateRow:
    """Return a line of the table with its slope and spread."""
    slope = fit_slope([math.log(size) for size in sizes], [math.log(change) for change in changes])
    return CoordinateRow(transfer, step, role, changes, slope, max(changes) / min(changes) - 1)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = ((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return sum(products) / sum((a - mean_x) ** 2 for a in x)


def write_table(rows: Iterable[CoordinateRow], sizes: Sequence[int], out: TextIO) -> None:
    """Write the table as CSV."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["transfer", "step", "role", *sizes, "slope", "spread", "flat"])
    for row in rows:
        changes = [f"{change:.4g}" for change in row.changes]
        flat = "yes" if row.spread <= FLAT else "no"
        writer.writerow([row.transfer, row.step, row.role, *changes, f"{row.slope:+.3f}", f"{row.spread:.1%}", flat])


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line of NAME=VALUE.

    Raises:
        ConfigError: for an unknown name.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for name in given.keys() - DEFAULTS.keys() - {"lr"}:
        raise ConfigError(f"{name}={given[name]}: no such argument; give one of {', '.join(DEFAULTS)}, lr.")
    optimizer = given.get("optimizer", DEFAULTS["optimizer"])
    if optimizer not in LEARNING_RATES:
        raise ConfigError(f"optimizer={optimizer}: the table has no exponents for it; give optimizer=adamw or muon.")
    options = DEFAULTS | {"lr": LEARNING_RATES[optimizer]} | given
    if options["over"] not in ("width", "depth"):
        raise ConfigError(f"over={options['over']}: no such direction; give over=width or over=depth.")
    for name in ("layers", "seeds", "steps", "base"):
        if not options[name].isdecimal() or not int(options[name]):
            raise ConfigError(f"{name}={options[name]}: is no number from 1 on; give {name}={DEFAULTS[name]}.")
    if int(options["base"]) % 32:
        raise ConfigError(f"base={options['base']}: heads of 16 elements need a width that 32 divides; give base=64.")
    return options


def main(arguments: Sequence[str]) -> int:
    """Write the table of a command line to standard output and return the exit code."""
    torch.set_num_threads(1)
    try:
        options = parse_options(arguments)
        sizes = [size[options["over"] == "depth"] for size in list_sizes(options)]
        write_table(tabulate(options), sizes, sys.stdout)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
