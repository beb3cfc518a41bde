"""The text of a replay for the terminal. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titan.console.text import sanitize_line
from titan.training.replay.result import ModuleDifference, ReplayedStep, Statistics

if TYPE_CHECKING:
    from titan.training.replay.weights import WeightDifference

LAYER_COLUMNS = {
    "layer_grad_norm": "grad norm",
    "layer_weight_norm": "weight norm",
    "layer_update_ratio": "update/weight",
    "layer_activation_rms": "activation",
    "layer_attention_logit": "max logit",
}
"""Keys of a layer's metrics, and their columns."""
NAMED_WEIGHTS = 5
"""Weights that are named where they differ."""
TEXT_CHARACTERS = 60
"""Characters of text before a token."""


def format_replay(replay: ReplayedStep, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a replay saw, beside what the run has recorded of the step."""
    record = replay.record
    first, last = record["rows"]
    yield f"step {record['step']}: rows {first} to {last}, learning rate {record['lr']:.3g}"
    for key in ("loss", "grad_norm"):
        yield f"  {key:<9}  {_format_number(record[key])}{_compare_values(record[key], recorded.get(key))}"
    if recorded and recorded.get("batch_hash") != record["batch_hash"]:
        yield f"  batch hash {record['batch_hash']}, the run recorded {recorded.get('batch_hash')}: other rows"
    yield ""
    yield from _format_layers(record)
    yield ""
    yield from _format_modules(replay)
    yield ""
    yield "tokens with the largest losses:"
    for token in replay.tokens:
        text = f"...{sanitize_line(token.before[-TEXT_CHARACTERS:])}>>>{sanitize_line(token.text)}<<<"
        yield f"  {_format_number(token.loss):>10}  row {token.row}, token {token.position}: {text}"


def _compare_values(value: float, recorded: Any) -> str:
    if recorded is None:
        return "" if value == value else "  (the run recorded no finite value)"
    if value == recorded:
        return "  (as recorded, bitwise)"
    difference = abs(value - recorded) / max(abs(recorded), 1e-30)
    return f"  (recorded {_format_number(recorded)}, relative difference {difference:.1e})"


def _format_number(value: float) -> str:
    return f"{value:.6g}"


def _format_layers(record: Mapping[str, Any]) -> Iterator[str]:
    names = list(dict.fromkeys(key.partition("/")[2] for key in record if key.startswith("layer_")))
    yield _format_row("layer", LAYER_COLUMNS.values())
    for name in names:
        values = [record.get(f"{key}/{name}") for key in LAYER_COLUMNS]
        yield _format_row(name, ["" if value is None else f"{value:.4g}" for value in values])


def _format_modules(replay: ReplayedStep) -> Iterator[str]:
    yield _format_row("output of", ("rms", "mean", "largest", "grad rms", "grad largest"))
    for (direction, name), statistics in replay.statistics.items():
        if direction == "forward":
            gradient = replay.statistics.get(("backward", name))
            yield _format_row(
                name, [*_format_cells(statistics), *(_format_cells(gradient)[::2] if gradient else ("", ""))]
            )


def _format_cells(statistics: Statistics) -> tuple[str, str, str]:
    return f"{statistics.rms:.4g}", f"{statistics.mean:.2g}", f"{statistics.largest:.4g}"


def _format_row(name: str, cells: Any) -> str:
    return f"  {name:<28}" + "".join(f"{cell:>14}" for cell in cells)


def format_figures(labels: tuple[str, str], a: ReplayedStep, b: ReplayedStep) -> Iterator[str]:
    """Yield loss and gradient norms of two replays side by side."""
    yield f"{'':<30}{labels[0]:>24}{labels[1]:>24}"
    for key in ("loss", "grad_norm"):
        yield f"  {key:<28}{_format_number(a.record[key]):>24}{_format_number(b.record[key]):>24}"
    for key in sorted(a.record.keys() & b.record.keys(), key=list(a.record).index):
        if key.startswith("layer_grad_norm/"):
            yield f"  {'grad norm ' + key.partition('/')[2]:<28}{a.record[key]:>24.6g}{b.record[key]:>24.6g}"


def format_weights(step: int, differences: Sequence[WeightDifference], limit: float) -> Iterator[str]:
    """Yield how far the weights before a step are apart, and those that are by more than the limit.

    Args:
        step: the step.
        differences: of each weight, the largest first.
        limit: relative difference that counts as rounding.
    """
    largest = differences[0]
    size = (
        f"differ by up to {largest.relative:.1e} (relative), in {sanitize_line(largest.name)}"
        if largest.relative
        else "are equal"
    )
    yield f"weights before step {step:,}: {size}"
    drifted = [difference for difference in differences if difference.relative > limit]
    for difference in drifted[:NAMED_WEIGHTS]:
        yield f"  {sanitize_line(difference.name):<48}{difference.relative:>10.1e}"
    if len(drifted) > NAMED_WEIGHTS:
        yield f"  and {len(drifted) - NAMED_WEIGHTS:,} more of {len(differences):,} by more than rounding ({limit:g})"


def format_modules(differences: Sequence[ModuleDifference]) -> Iterator[str]:
    """Yield the relative difference of each module's output and of its gradient."""
    yield _format_row("relative difference of", ("output", "gradient"))
    backward = {d.key[1]: d.relative for d in differences if d.key[0] == "backward"}
    for difference in (d for d in differences if d.key[0] == "forward"):
        name = difference.key[1]
        yield _format_row(name, (f"{difference.relative:.1e}", f"{backward[name]:.1e}" if name in backward else ""))


def explain_unequal_start(
    a: ReplayedStep, b: ReplayedStep, weights: Sequence[WeightDifference], limit: float
) -> str | None:
    """Return why the activations of two replays say nothing about the step; None where both begin it alike.

    Args:
        a: one replay.
        b: the other.
        weights: the difference of each weight before the step, the largest first; empty where both have the same.
        limit: relative difference of weights that counts as rounding.
    """
    step = f"step {a.record['step']:,}"
    if a.record["batch_hash"] != b.record["batch_hash"]:
        return f"the batches of {step} differ, so its activations are not compared"
    if weights and weights[0].relative > limit:
        largest = f"{sanitize_line(weights[0].name)} differs by {weights[0].relative:.1e} (relative)"
        return f"weights have drifted before {step}: {largest}, so activations are not compared"
    return None


def format_verdict(differences: Sequence[ModuleDifference], limit: float) -> str:
    """Return the sentence on the first module that differs."""
    first = next((d for d in differences if d.relative > 0), None)
    beyond = next((d for d in differences if d.relative > limit), None)
    if first is None:
        return "both are the same, bitwise, in all sampled activations and gradients"
    at_all = f"the first difference at all, {first.relative:.1e}, is in the {_name_difference(first)}"
    if beyond is None:
        return f"no layer differs by more than rounding ({limit:g}); {at_all}"
    return (
        f"the first layer that differs by more than rounding ({limit:g}) is the {_name_difference(beyond)}: "
        f"{beyond.relative:.1e}" + ("" if beyond is first else f"; {at_all}")
    )


def _name_difference(difference: ModuleDifference) -> str:
    direction, name = difference.key
    return f"{direction} pass of {name}" if direction == "forward" else f"backward pass, gradient of {name}'s output"


def as_json(replay: ReplayedStep, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a replay saw as plain containers."""
    statistics = {
        f"{direction}/{name}": asdict(module_statistics)
        for (direction, name), module_statistics in replay.statistics.items()
    }
    return {
        "record": dict(replay.record),
        "recorded": dict(recorded),
        "statistics": statistics,
        "tokens": [asdict(token) for token in replay.tokens],
    }


def to_text(content: Mapping[str, Any]) -> str:
    """Return JSON, in which numbers that are not finite are null."""
    return json.dumps(_replace_non_finite(content), indent=1)


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
