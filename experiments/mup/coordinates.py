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
from typing import Any, Literal, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from titan import api
from titan.config.command import Command, CommandLine
from titan.config.settings import setting
from titan.errors import ConfigError
from titan.model.init_weights import materialise_model
from titan.optimizer.update_factors import build_optimizer

CONF = Path(__file__).parent / "conf"
MULTIPLES = (1, 2, 4, 8)
"""Of the base's width, or of its blocks."""
ROWS, LENGTH, VOCAB = 8, 64, 16
FLAT = 0.1
"""By how much the largest change may exceed the smallest over all sizes."""
ROLES = ("embedding", "hidden", "router", "residual", "norm", "logits")
"""Activations: of the embedding, of the layers inside of branches, what all branches add, behind the norm, logits."""
LEARNING_RATES = {"adamw": 0.0025, "muon": 0.016}
"""About those with the least loss of the base in `sweep=mup`: a check is of the rates at which models are trained."""


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m experiments.mup.coordinates`."""

    over: Literal["width", "depth"] = setting(
        "width", "the models are 1, 2, 4 and 8 times as wide or as deep as the base"
    )
    base: int = setting(32, "width of the base, a multiple of 32: heads have 16 elements", at_least=32, cap=65_536)
    layers: int = setting(4, "blocks of the base", at_least=1, cap=10_000)
    model: Literal["llama", "qwen3", "qwen3_moe"] = setting("llama", "the family")
    optimizer: Literal["adamw", "muon"] = setting("adamw", "the optimizer")
    lr: float | None = setting(None, "learning rate of the base; null: 0.0025 of adamw, 0.016 of muon", above=0)
    seeds: int = setting(3, "seeds of which the changes are averaged", at_least=1, cap=1_000)
    steps: int = setting(12, "updates", at_least=1, cap=10_000)

    @property
    def rate(self) -> float:
        """The learning rate of the base."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    def check(self) -> None:
        """Raise ConfigError for a width that heads do not divide."""
        if self.base % 32:
            raise ConfigError(f"base={self.base}: heads of 16 elements need a width that 32 divides; give base=64.")


COMMAND = Command(
    "experiments.mup.coordinates",
    "Show how much activations change in some updates over width or depth, with transfer and without, as CSV.",
    {"over=width optimizer=adamw": "width 32 to 256", "over=depth optimizer=muon layers=8": "8 to 64 blocks"},
    Settings,
    keep_going=False,
)


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


def list_sizes(settings: Settings) -> list[ModelSize]:
    """Return the sizes of a check; the base is the smallest."""
    base, layers = settings.base, settings.layers
    if settings.over == "width":
        return [ModelSize(base * multiple, layers) for multiple in MULTIPLES]
    return [ModelSize(base, layers * multiple) for multiple in MULTIPLES]


def compose(size: ModelSize, transfer: str, settings: Settings, seed: int = 0) -> Any:
    """Return the run of a size; heads have 16 elements, feed-forward layers and experts three widths."""
    return api.compose(
        f"hydra.searchpath=[file://{CONF}]", f"model=mup_{settings.model}", f"optimizer={settings.optimizer}",
        f"optimizer.lr={settings.rate}", f"model.dim={size.dim}", f"model.layers={size.layers}", "model.head_dim=16",
        f"model.heads={size.dim // 16}", f"model.kv_heads={size.dim // 32}", f"model.ffn={3 * size.dim}",
        f"model.vocab={VOCAB}", f"model.base_layers={settings.layers}", f"model.transfer={transfer}",
        f"model.base_dim={settings.base}", "precision=fp32",
        f"training.seed={seed}", f"training.seq_len={LENGTH}", f"training.global_batch={ROWS * LENGTH}",
        "dataset=synthetic", f"dataset.vocab={VOCAB}", "dataset.tokens=20000", "cluster=cpu",
        *([f"model.expert_ffn={3 * size.dim // 2}"] if "moe" in settings.model else []),
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
        names = {"embedding": ("tok_embeddings",), "norm": ("norm",), "logits": ("head",)}
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


def tabulate(settings: Settings) -> Iterator[CoordinateRow]:
    """Yield the table: with transfer and without, after each step, each role."""
    sizes = list_sizes(settings)
    for transfer in ("both", "none"):
        measured = [
            [measure_changes(compose(size, transfer, settings, s), settings.steps) for s in range(settings.seeds)]
            for size in sizes
        ]
        for step in range(settings.steps):
            for role in (role for role in ROLES if role in measured[0][0][step]):
                changes = tuple(sum(run[step][role] for run in runs) / len(runs) for runs in measured)
                yield summarise(transfer, step + 1, role, changes, list_lengths(settings))


def list_lengths(settings: Settings) -> list[int]:
    """Return what the check is over: the widths, or the numbers of blocks."""
    return [size[settings.over == "depth"] for size in list_sizes(settings)]


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


def _show(command_line: CommandLine[Settings]) -> int:
    torch.set_num_threads(1)
    settings = command_line.settings
    settings.check()
    write_table(tabulate(settings), list_lengths(settings), sys.stdout)
    return 0


main, cli = COMMAND.bind(_show)

if __name__ == "__main__":
    cli()
