"""Ladders: recipes at several sizes and lengths, from which a law predicts the largest. Free of torch and numpy.

Each size has one trunk of constant learning rate, and for each length a branch of it that decays (Hu et al. 2024,
arXiv:2404.06395; Haegele et al. 2024, arXiv:2405.18392). All trunks of a seed read the same rows in the same global
batches, and all variants have the lengths of the first one, so that their losses are paired.

A size is a width. By the rule of public model families the head's width stays, and the number of blocks, the query
heads and the feed-forward width grow in proportion to the width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan.config.settings import format_value
from titan.console.numbers import format_count, format_rounded
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.run import budget, identity
from titan.run.budget import count_steps
from titan.run.command_line import quote_value
from titan.run.run import Run
from titan.schedule.schema import WSD
from titan.sweep.labels import format_label
from titan.sweep.schema import Sweep

SHOWN = ("model.dim", "training.seed", "checkpoint.decay_steps")
"""The settings that name a trial of a ladder, beside those of its variant; the others follow from them."""
LENGTH_SETTINGS = ("training.steps", "training.tokens", "training.hours", "checkpoint.resume", "checkpoint.decay_steps")
"""Settings that a ladder decides."""
LEAST_SIZES = 4  # sizes of a ladder, the largest included
SHAPE = ("dim", "layers", "heads", "kv_heads", "ffn")  # settings of the model that follow from a size
AUTO = "optimizer.lr=auto"
"""The override that has each size take the rate of `titan.optimizer.step_law`."""
DIGITS = 6  # significant digits of a rate by rule


@dataclass(frozen=True)
class Variant:
    """What a ladder compares at all its sizes and lengths."""

    overrides: tuple[str, ...]  # those that distinguish it; none of a ladder with a single variant
    base: Run  # its recipe, whose shape gives the proportions

    @property
    def label(self) -> str:
        """Its name in messages; empty where there is one only."""
        return format_label(self.overrides)


@dataclass(frozen=True)
class Rung:
    """A length of a size."""

    length: float  # tokens per parameter of the first variant, as asked for
    steps: int  # of trunk and branch together
    decay_steps: int  # of the branch
    tokens: int  # of all steps

    @property
    def branch_step(self) -> int:
        """The step of the trunk after which the branch begins."""
        return self.steps - self.decay_steps


@dataclass(frozen=True)
class Trunk:
    """A size of a variant with a seed: the run of constant rate, and the rungs that branch from it, shortest first."""

    variant: Variant
    model: Decoder
    lr: float
    seed: int
    warmup: int
    rungs: tuple[Rung, ...]

    @property
    def parameters(self) -> int:
        """Parameters without embeddings; see `count_body`."""
        return count_body(self.model)

    @property
    def steps(self) -> int:
        """Steps up to the last branch."""
        return self.rungs[-1].branch_step

    def describe(self, rung: Rung) -> str:
        """Return the name of a rung in messages."""
        where = f"dim {self.model.dim}, {format_rounded(rung.length)} tokens/parameter"
        return ", ".join(filter(None, (self.variant.label, where)))

    def list_overrides(self) -> list[str]:
        """Return the overrides of the trunk."""
        at = ",".join(str(rung.branch_step) for rung in self.rungs)
        return [
            *self.list_shared(), f"training.steps={self.steps}", "schedule.decay=0", f"checkpoint.at=[{at}]",
        ]  # fmt: skip

    def list_branch_overrides(self, rung: Rung, directory: Path) -> list[str]:
        """Return the overrides of a branch, once the trunk has trained in its directory."""
        checkpoint = directory / "checkpoints" / f"step-{rung.branch_step}"
        return [
            *self.list_shared(), f"checkpoint.resume={quote_value(str(checkpoint))}",
            f"checkpoint.decay_steps={rung.decay_steps}",
        ]  # fmt: skip

    def list_planned_overrides(self, rung: Rung) -> list[str]:
        """Return the overrides of a run that costs as much as a branch, before there is a checkpoint."""
        common = [override for override in self.list_shared() if not override.startswith("schedule.warmup=")]
        return [*common, f"training.steps={rung.decay_steps}", "schedule.warmup=0", "schedule.decay=1"]

    def list_shared(self) -> list[str]:
        """Return the overrides that the trunk and its branches share."""
        shape = [f"model.{name}={getattr(self.model, name)}" for name in SHAPE]
        rate = f"optimizer.lr={format_value(self.lr)}"
        return [*self.variant.overrides, *shape, rate, f"training.seed={self.seed}", f"schedule.warmup={self.warmup}"]


@dataclass(frozen=True)
class Ladder:
    """All trunks, by rising size, each size with all variants."""

    trunks: tuple[Trunk, ...]  # the trunks
    rule: str = ""  # what gives the learning rates, in words

    @property
    def fitted(self) -> tuple[Trunk, ...]:
        """The trunks of all sizes but the largest."""
        return tuple(trunk for trunk in self.trunks if trunk.model.dim != self._most)

    @property
    def largest(self) -> tuple[Trunk, ...]:
        """The trunk of the largest size of each variant."""
        return tuple(trunk for trunk in self.trunks if trunk.model.dim == self._most)

    @property
    def variants(self) -> list[Variant]:
        """The variants, the baseline first."""
        return [trunk.variant for trunk in self.largest]

    @property
    def _most(self) -> int:
        return self.trunks[-1].model.dim


@dataclass(frozen=True)
class Rates:
    """What gives the learning rate of a trunk."""

    description: str  # in words
    # from the variant, the model at the size and the steps of its longest length to the rate
    compute: Callable[[Variant, Decoder, int], float]


def build_ladder(variants: Sequence[Variant], sweep: Sweep, rates: Rates | None = None) -> Ladder:
    """Return the ladder of one or more variants; the first one's parameters give the lengths of all.

    Args:
        variants: of one data set and one sequence length.
        sweep: `sizes`, `lengths`, `seeds` and `lr_rule`.
        rates: gives the learning rates; None: by `sweep.lr_rule`.

    Raises:
        ConfigError: for sizes and lengths that can't be a ladder.
    """
    rates = rates or choose_rates(variants, sweep)
    for variant in variants:
        _check_recipe(variant.base)
    _check_rows(variants)
    widths = sorted(set(sweep.sizes or ()))
    trunks: list[Trunk] = []
    for width in widths:
        parameters = count_body(scale_model(variants[0].base.model, width))
        seeds = sweep.seeds if width == widths[0] else 1
        for variant in variants:
            trunks += [_build_trunk(variant, width, parameters, k, sweep, rates) for k in range(seeds)]
    return Ladder(tuple(trunks), rates.description)


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
    if sweep.lr_rule == "tuned" and (sweep.tuned_sizes >= len(widths) or len(set(sweep.tuned_factors)) < 2):
        raise ConfigError(
            f"sweep.tuned_sizes={sweep.tuned_sizes} sweep.tuned_factors={format_value(list(sweep.tuned_factors))}: "
            f"tuning takes two or more factors, and fewer sizes than sweep.sizes has, {len(widths)}; correct them."
        )
    if sweep.budget != "steps":
        raise ConfigError(f"sweep.budget={sweep.budget}: a ladder decides the steps by sweep.lengths; leave it out.")


def _check_recipe(base: Run) -> None:
    """Raise ConfigError for settings that a ladder can't do with."""
    if not isinstance(base.schedule, WSD):
        raise ConfigError(
            f"schedule={base.choices.get('schedule', type(base.schedule).__name__)}: a ladder's lengths are decayed "
            "branches of one run with a constant learning rate; give schedule=wsd."
        )
    if base.checkpoint.mode == "off":
        raise ConfigError("checkpoint.mode=off: a ladder's branches begin at checkpoints; give checkpoint=sync.")
    if not base.schedule.decay:
        raise ConfigError("schedule.decay=0: the branches of a ladder decay over this share of their steps; give 0.2.")
    if base.evaluation.tokens == 0:
        raise ConfigError("evaluation.tokens=0: a ladder's law is one of the validation loss; give some tokens.")


def _check_rows(variants: Sequence[Variant]) -> None:
    """Raise ConfigError for variants that read other rows, or learn the same."""
    first = variants[0].base
    seen: dict[str, str] = {}
    for variant in variants:
        run = variant.base
        for name in ("dataset", "evaluation", "training.seq_len", "training.seed"):
            if attrgetter(name)(first) != attrgetter(name)(run):
                raise ConfigError(
                    f"{variant.label}: has another {name} than {variants[0].label}, and all variants of a ladder read "
                    "the same rows; start a ladder for each."
                )
        twin = seen.setdefault(identity.compute_variant_id(run), variant.label)
        if twin != variant.label:
            raise ConfigError(f"{variant.label}: learns the same as {twin}; leave one of them out.")


def _build_trunk(variant: Variant, width: int, parameters: int, number: int, sweep: Sweep, rates: Rates) -> Trunk:
    base = variant.base
    model = scale_model(base.model, width)
    decay, rungs = getattr(base.schedule, "decay", 0.0), list[Rung]()
    for length in sorted(set(sweep.lengths)):
        steps = count_steps(base.training, length * parameters)
        tokens = base.training.count_rows_before(steps + 1) * base.training.seq_len
        rungs.append(Rung(length, steps, round(decay * steps), tokens))
    warmup = base.schedule.warmup_steps(rungs[0].steps)  # one for all lengths, short enough for the shortest
    for rung in rungs:
        if rung.branch_step <= warmup or rung.decay_steps < 1:
            raise ConfigError(
                f"sweep.lengths: {format_rounded(rung.length)} tokens per parameter are {rung.steps} steps of "
                f"{base.training.global_batch:,} tokens for width {width}, too few for a warm-up of {warmup} and a "
                "decay; give longer ones, schedule.warmup=auto, or a smaller training.global_batch."
            )
    if len({rung.decay_steps for rung in rungs}) < len(rungs):
        raise ConfigError(
            f"sweep.lengths={format_value(list(sweep.lengths))}: two of them decay over as many steps at width "
            f"{width}; give longer ones, or lengths further apart."
        )
    lr = rates.compute(variant, model, rungs[-1].steps)
    return Trunk(variant, model, lr, base.training.seed + number, warmup, tuple(rungs))


def count_body(model: Decoder) -> int:
    """Return a model's parameters without embeddings: neither those of the tokens nor the head's."""
    return model.parameters() - model.embedding_parameters() * (1 if model.tied else 2)


def scale_model(base: Decoder, width: int) -> Decoder:
    """Return a shape of another width: heads as wide as before, the rest in proportion.

    Blocks are rounded to the nearest number, the feed-forward width to the nearest multiple of 8; query heads share a
    key head in groups as large as before, or as large as divide them. Settings that a family names in `SIZE_FREE` stay.

    Raises:
        ConfigError: where there is no such shape.
    """
    known = {field.name for field in dataclasses.fields(Decoder)} | set(base.SIZE_FREE)
    own = {field.name for field in dataclasses.fields(base)} - known
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


def choose_rates(variants: Sequence[Variant], sweep: Sweep, is_auto: bool = False) -> Rates:
    """Return the rates by `sweep.lr_rule`, or by `optimizer.lr=auto`.

    Args:
        is_auto: whether the command line has `optimizer.lr=auto`.

    Raises:
        ConfigError: for two rules at once.
    """
    # models that have factors for their learning rates, as where these transfer over sizes
    scaled = [variant.base.model for variant in variants if variant.base.model.update_factors(variant.base.optimizer)]
    if is_auto:
        if sweep.lr_rule is not None:
            raise ConfigError(f"{AUTO}: is a rule, and so is sweep.lr_rule={sweep.lr_rule}; give one of them.")
        if scaled:
            raise ConfigError(
                f"{AUTO}: is a rule of the model's size, and {type(scaled[0]).__name__} scales its learning rates by "
                "its size too; give the number that is best at its base."
            )
        return Rates("by Step Law for the longest length of each size (optimizer.lr=auto)", _compute_by_step_law)
    if sweep.lr_rule == "tuned":
        tried = f"{sweep.tuned_sizes} of the sizes with {len(set(sweep.tuned_factors))} rates each"
        return Rates(f"in proportion to 1 / width, before it is tuned at {tried}", compute_by_width)
    if sweep.lr_rule == "fixed" or (sweep.lr_rule is None and scaled):
        note = "; the model scales it by size" if scaled else ""
        return Rates(f"fixed{note}", lambda variant, model, steps: variant.base.optimizer.peak_lr)
    return Rates("in proportion to 1 / width", compute_by_width)


def compute_by_width(variant: Variant, model: Decoder, steps: int) -> float:
    """Return the recipe's rate times its width over that of the model."""
    return round_rate(variant.base.optimizer.peak_lr * variant.base.model.dim / model.dim)


def round_rate(rate: float) -> float:
    """Return a rate with the digits that a command line gets."""
    return float(f"{rate:.{DIGITS}g}")


def _compute_by_step_law(variant: Variant, model: Decoder, steps: int) -> float:
    """Return Step Law's rate for a size at its longest length; warn or raise ConfigError outside its range."""
    parts: dict[str, Any] = {"model": model, "training": dataclasses.replace(variant.base.training, steps=steps)}
    return budget.compute_learning_rate(dataclasses.replace(variant.base, **parts))


def format_ladder(ladder: Ladder, hours: Sequence[float | None]) -> str:
    """Return a table: sizes, runs and their cost. Steps of a trunk count once, and branches by their decay.

    Args:
        hours: predicted device-hours of each run, trunk by trunk, each followed by its branches; None: not known.
    """
    costs = iter(hours)
    header = ("size", "blocks", "parameters", "vocabulary", "lr", "runs", "tokens", "FLOPs", "device-hours")
    sizes: dict[tuple[str, ...], list[Cost]] = {}
    for trunk in ladder.trunks:
        body, total = trunk.parameters, trunk.model.parameters()
        name = f", {trunk.variant.label}" if len(ladder.variants) > 1 else ""
        name = f"dim {trunk.model.dim}{name}{' (predicted)' if trunk in ladder.largest else ''}"
        vocabulary, rate = f"+{(total - body) / body:.0%}", format_rounded(trunk.lr)
        rows = sizes.setdefault((name, str(trunk.model.layers), format_count(body), vocabulary, rate), [])
        rows += [(*cost, next(costs)) for cost in list_costs(trunk)]
    sizes["all", "", "", "", ""] = [row for rows in sizes.values() for row in rows]
    table = [header, *((*cells, *_sum_costs(rows)) for cells, rows in sizes.items())]
    widths = [max(len(line[k]) for line in table) for k in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    rule = f"rule of sizes: width; blocks, heads and feed-forward width in proportion; learning rate: {ladder.rule}"
    return "\n".join([*text, rule]) + "\n"


Cost = tuple[int, float, float | None]  # tokens, FLOPs and device-hours


def list_costs(trunk: Trunk) -> Iterator[tuple[int, float]]:
    """Yield the tokens and the FLOPs of a trunk, and of each of its branches."""
    training = trunk.variant.base.training
    per_token = trunk.model.flops_per_token(training.seq_len)
    tokens = training.count_rows_before(trunk.steps + 1) * training.seq_len
    yield tokens, tokens * per_token
    for rung in trunk.rungs:
        decayed = rung.tokens - training.count_rows_before(rung.branch_step + 1) * training.seq_len
        yield decayed, decayed * per_token


def _sum_costs(rows: Sequence[Cost]) -> tuple[str, ...]:
    tokens, flops = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return str(len(rows)), format_count(tokens), f"{flops:.3g}", format_hours([row[2] for row in rows])


def format_hours(hours: Sequence[float | None]) -> str:
    """Return the sum of predicted device-hours; "unknown" where one of them is."""
    known = [hour for hour in hours if hour is not None]
    return format_rounded(sum(known)) if len(known) == len(hours) else "unknown"
