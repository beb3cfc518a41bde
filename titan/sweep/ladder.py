"""Ladders: one recipe at several sizes and lengths, from which a law predicts the largest. Free of torch and numpy.

A size is a width. By the rule of public model families the head's width stays, and the number of blocks, the query
heads and the feed-forward width grow in proportion to the width. Each size has one trunk of constant learning rate, and
for each length a branch of it that decays (Hu et al. 2024, arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392).
All trunks of a seed read the same rows in the same global batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan.config.settings import format_value
from titan.console.numbers import format_count, format_rounded
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.run.budget import count_steps
from titan.run.command_line import quote_value
from titan.run.run import Run
from titan.schedule.schema import WSD
from titan.sweep.schema import Sweep

SHOWN = ("model.dim", "training.seed", "checkpoint.decay_steps")
"""The settings that name a trial of a ladder; the others follow from them."""
LENGTH_SETTINGS = ("training.steps", "training.tokens", "training.hours", "checkpoint.resume", "checkpoint.decay_steps")
"""Settings that a ladder decides."""
LEAST_SIZES = 4
"""Sizes of a ladder, the largest included."""
LR_DIGITS = 6
"""Significant digits of a learning rate by rule."""


@dataclass(frozen=True)
class Size:
    """A size of the ladder.

    Attributes:
        model: its shape.
        lr: its learning rate.
    """

    model: Decoder
    lr: float

    @property
    def parameters(self) -> int:
        """Parameters without embeddings: neither those of the tokens nor the head."""
        return count_body(self.model)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"dim {self.model.dim}"

    def list_overrides(self) -> list[str]:
        """Return the overrides that make a recipe of this size."""
        names = ("dim", "layers", "heads", "kv_heads", "ffn")
        shape = [f"model.{name}={getattr(self.model, name)}" for name in names]
        return [*shape, f"optimizer.lr={format_value(self.lr)}"]


@dataclass(frozen=True)
class Rung:
    """A size at a length.

    Attributes:
        size: the size.
        length: tokens per parameter, as asked for.
        steps: of trunk and branch together.
        decay_steps: of the branch.
        tokens: of all steps.
    """

    size: Size
    length: float
    steps: int
    decay_steps: int
    tokens: int

    @property
    def branch_step(self) -> int:
        """The step of the trunk after which the branch begins."""
        return self.steps - self.decay_steps

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.size.label}, {format_rounded(self.length)} tokens/parameter"


@dataclass(frozen=True)
class Trunk:
    """A size with a seed: the run of constant learning rate, and the rungs that branch from it, shortest first."""

    size: Size
    seed: int
    warmup: int
    rungs: tuple[Rung, ...]

    @property
    def steps(self) -> int:
        """Steps up to the last branch."""
        return self.rungs[-1].branch_step

    def list_overrides(self) -> list[str]:
        """Return the overrides of the trunk."""
        at = ",".join(str(rung.branch_step) for rung in self.rungs)
        return [
            *self._list_common(), f"training.steps={self.steps}", "schedule.decay=0", f"checkpoint.at=[{at}]",
        ]  # fmt: skip

    def list_branch_overrides(self, rung: Rung, directory: Path) -> list[str]:
        """Return the overrides of a branch, once the trunk has trained in its directory."""
        checkpoint = directory / "checkpoints" / f"step-{rung.branch_step}"
        return [
            *self._list_common(), f"checkpoint.resume={quote_value(str(checkpoint))}",
            f"checkpoint.decay_steps={rung.decay_steps}",
        ]  # fmt: skip

    def list_planned_overrides(self, rung: Rung) -> list[str]:
        """Return the overrides of a run that costs as much as a branch, before there is a checkpoint."""
        common = [override for override in self._list_common() if not override.startswith("schedule.warmup=")]
        return [*common, f"training.steps={rung.decay_steps}", "schedule.warmup=0", "schedule.decay=1"]

    def _list_common(self) -> list[str]:
        return [*self.size.list_overrides(), f"training.seed={self.seed}", f"schedule.warmup={self.warmup}"]


@dataclass(frozen=True)
class Ladder:
    """All trunks, by rising size; the last one is that of the largest size."""

    trunks: tuple[Trunk, ...]

    @property
    def fitted(self) -> tuple[Trunk, ...]:
        """The trunks of all sizes but the largest."""
        return self.trunks[:-1]

    @property
    def largest(self) -> Trunk:
        """The trunk of the largest size."""
        return self.trunks[-1]

    @property
    def sizes(self) -> list[Size]:
        """The sizes, smallest first."""
        return list({trunk.size.model.dim: trunk.size for trunk in self.trunks}.values())


def count_body(model: Decoder) -> int:
    """Return a model's parameters without embeddings: neither those of the tokens nor the head's."""
    return model.parameters() - model.embedding_parameters() * (1 if model.tied else 2)


def build_ladder(base: Run, overrides: Sequence[str], sweep: Sweep) -> Ladder:
    """Return the ladder of a recipe.

    Args:
        base: the recipe as the command line composes it; its shape gives the proportions.
        overrides: of the command line.
        sweep: `sizes`, `lengths`, `seeds` and `lr_rule`.

    Raises:
        ConfigError: for sizes and lengths that can't be a ladder.
    """
    _check_settings(base, overrides, sweep)
    widths = sorted(set(sweep.sizes or ()))
    trunks: list[Trunk] = []
    for width in widths:
        size = Size(scale_model(base.model, width), _scale_lr(base, width, sweep))
        seeds = sweep.seeds if width == widths[0] else 1
        trunks += [_build_trunk(base, size, base.training.seed + k, sweep) for k in range(seeds)]
    return Ladder(tuple(trunks))


def check_sweep(sweep: Sweep) -> None:
    """Raise ConfigError for settings of a sweep that can't be those of a ladder.

    Two sizes can't separate the exponent of the law from its floor: another size could have any loss.
    """
    widths = sorted(set(sweep.sizes or ()))
    if len(widths) < LEAST_SIZES:
        raise ConfigError(
            f"sweep.sizes={format_value(widths)}: a law with a floor needs {LEAST_SIZES - 1} sizes below the largest, "
            "which it predicts; give four or more widths, such as [256,384,512,768]."
        )
    if sweep.budget != "steps":
        raise ConfigError(f"sweep.budget={sweep.budget}: a ladder decides the steps by sweep.lengths; leave it out.")


def _check_settings(base: Run, overrides: Sequence[str], sweep: Sweep) -> None:
    """Raise ConfigError for settings that a ladder decides, or can't do with."""
    if not isinstance(base.schedule, WSD):
        raise ConfigError(
            f"schedule={base.choices.get('schedule', type(base.schedule).__name__)}: a ladder's lengths are decayed "
            "branches of one run with a constant learning rate; give schedule=wsd."
        )
    if base.checkpoint.mode == "off":
        raise ConfigError("checkpoint.mode=off: a ladder's branches begin at checkpoints; give checkpoint=sync.")
    for override in overrides:
        if override.partition("=")[0].lstrip("+") in LENGTH_SETTINGS:
            raise ConfigError(f"{override}: a ladder decides it by sweep.lengths; leave it out.")
        if override == "optimizer.lr=auto":
            raise ConfigError(
                f"{override}: a ladder scales the recipe's learning rate by sweep.lr_rule={sweep.lr_rule}; give the "
                "number for the recipe's width."
            )
    if not base.schedule.decay:
        raise ConfigError("schedule.decay=0: the branches of a ladder decay over this share of their steps; give 0.2.")
    if base.evaluation.tokens == 0:
        raise ConfigError("evaluation.tokens=0: a ladder's law is one of the validation loss; give some tokens.")


def scale_model(base: Decoder, width: int) -> Decoder:
    """Return a shape of another width: heads as wide as before, the rest in proportion.

    Blocks are rounded to the nearest number, the feed-forward width to the nearest multiple of 8; query heads share a
    key head in groups as large as before, or as large as divide them.

    Raises:
        ConfigError: where there is no such shape.
    """
    own = {field.name for field in dataclasses.fields(base)} - {field.name for field in dataclasses.fields(Decoder)}
    if own:
        raise ConfigError(
            f"sweep.sizes: there is no rule for model.{min(own)} of {type(base).__name__}; choose a dense model, such "
            "as model=qwen3_debug, or a grid of your own shapes."
        )
    heads, remainder = divmod(base.heads * width, base.dim)
    if remainder or not heads:
        step = base.dim // math.gcd(base.dim, base.heads)
        raise ConfigError(
            f"sweep.sizes: {width} has no whole number of heads as those of the recipe, model.heads={base.heads} for "
            f"model.dim={base.dim}; give multiples of {step}, or smaller heads."
        )
    layers = max(1, math.floor(base.layers * width / base.dim + 0.5))
    ffn = 8 * max(1, round(base.ffn * width / base.dim / 8))
    group = math.gcd(heads, base.heads // base.kv_heads)
    return dataclasses.replace(base, dim=width, layers=layers, heads=heads, kv_heads=heads // group, ffn=ffn)


def _scale_lr(base: Run, width: int, sweep: Sweep) -> float:
    """Return the learning rate of a width by `sweep.lr_rule`."""
    factor = base.model.dim / width if sweep.lr_rule == "width" else 1.0
    return float(f"{base.optimizer.peak_lr * factor:.{LR_DIGITS}g}")


def _build_trunk(base: Run, size: Size, seed: int, sweep: Sweep) -> Trunk:
    rungs = tuple(_build_rung(base, size, length) for length in sorted(set(sweep.lengths)))
    warmup = base.schedule.warmup_steps(rungs[0].steps)  # one for all lengths, short enough for the shortest
    for rung in rungs:
        if rung.branch_step <= warmup or rung.decay_steps < 1:
            raise ConfigError(
                f"sweep.lengths: {format_rounded(rung.length)} tokens per parameter are {rung.steps} steps of "
                f"{base.training.global_batch:,} tokens for width {size.model.dim}, too few for a warm-up of "
                f"{warmup} and a decay; give longer ones, schedule.warmup=auto, or a smaller training.global_batch."
            )
    if len({rung.decay_steps for rung in rungs}) < len(rungs):
        raise ConfigError(
            f"sweep.lengths={format_value(list(sweep.lengths))}: two of them decay over as many steps at width "
            f"{size.model.dim}; give longer ones, or lengths further apart."
        )
    return Trunk(size, seed, warmup, rungs)


def _build_rung(base: Run, size: Size, length: float) -> Rung:
    steps = count_steps(base.training, length * size.parameters)
    decay = getattr(base.schedule, "decay", 0.0)
    tokens = base.training.count_rows_before(steps + 1) * base.training.seq_len
    return Rung(size, length, steps, round(decay * steps), tokens)


def format_ladder(ladder: Ladder, base: Run, hours: Sequence[float | None]) -> str:
    """Return a table: sizes, runs and their cost. Steps of a trunk count once, and branches by their decay.

    Args:
        ladder: what is planned.
        base: the recipe.
        hours: predicted device-hours of each run in the order of `list_costs`; None where not known.
    """
    rows = [(*row, hour) for row, hour in zip(list_costs(ladder, base), hours, strict=True)]
    lines = [
        _format_row(size, [row for row in rows if row[0].size == size], size == ladder.largest.size)
        for size in ladder.sizes
    ]
    header = ("size", "blocks", "parameters", "vocabulary", "lr", "runs", "tokens", "FLOPs", "device-hours")
    total = ("all", "", "", "", "", *_sum_costs(rows))
    table = [header, *lines, total]
    widths = [max(len(line[k]) for line in table) for k in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    rule = (
        f"rule of sizes: width; blocks, heads and feed-forward width in proportion; learning rate: {_name_rule(ladder)}"
    )
    return "\n".join([*text, rule]) + "\n"


def _name_rule(ladder: Ladder) -> str:
    return "fixed" if len({size.lr for size in ladder.sizes}) == 1 else "in proportion to 1 / width"


def list_costs(ladder: Ladder, base: Run) -> Iterator[tuple[Trunk, int, float]]:
    """Yield the trunk, the tokens and the FLOPs of each run: trunk by trunk, each followed by its branches."""
    training = base.training
    for trunk in ladder.trunks:
        per_token = trunk.size.model.flops_per_token(training.seq_len)
        tokens = training.count_rows_before(trunk.steps + 1) * training.seq_len
        yield trunk, tokens, tokens * per_token
        for rung in trunk.rungs:
            decayed = rung.tokens - training.count_rows_before(rung.branch_step + 1) * training.seq_len
            yield trunk, decayed, decayed * per_token


def _format_row(
    size: Size, rows: Sequence[tuple[Trunk, int, float, float | None]], is_largest: bool
) -> tuple[str, ...]:
    share = 1 - size.parameters / size.model.parameters()
    return (
        f"{size.label}{' (predicted)' if is_largest else ''}",
        str(size.model.layers),
        format_count(size.parameters),
        f"+{share / (1 - share):.0%}",
        format_rounded(size.lr),
        *_sum_costs(rows),
    )


def _sum_costs(rows: Sequence[tuple[Trunk, int, float, float | None]]) -> tuple[str, ...]:
    hours = [row[3] for row in rows]
    known = [hour for hour in hours if hour is not None]
    total = format_rounded(sum(known)) if len(known) == len(hours) else "unknown"
    return str(len(rows)), format_count(sum(row[1] for row in rows)), f"{sum(row[2] for row in rows):.3g}", total
