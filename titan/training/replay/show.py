"""The text of a replay for the terminal. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from titan.console.text import sanitize_line
from titan.numerics.differences import GRADIENT, compare_figures, get_layer_name, sort_layers
from titan.training.replay.observation import ReplayedStep, Statistics
from titan.training.replay.questions import Answers, find_largest

LAYER_COLUMNS = {
    "layer_grad_norm": "grad norm",
    "layer_weight_norm": "weight norm",
    "layer_update_ratio": "update/weight",
    "layer_activation_rms": "activation",
    "layer_attention_logit": "max logit",
}
"""Keys of a layer's metrics, and their columns."""
NAMED = 4
"""Modules that are named of those whose outputs were not observed."""
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
    for name, reason in list(replay.unobserved.items())[:NAMED]:
        yield f"  {sanitize_line(name)}: not observed, {sanitize_line(reason)}"
    if len(replay.unobserved) > NAMED:
        yield f"  and {len(replay.unobserved) - NAMED:,} more are not observed"
    yield "tokens with the largest losses:"
    for token in replay.tokens:
        text = f"...{sanitize_line(token.before[-TEXT_CHARACTERS:])}>>>{sanitize_line(token.text)}<<<"
        yield f"  {_format_number(token.loss):>10}  row {token.row}, token {token.position}: {text}"


def _compare_values(value: float, recorded: Any) -> str:
    if recorded is None:
        return "" if value == value else "  (the run recorded no finite value)"
    if value == recorded:
        return "  (as recorded, bitwise)"
    return f"  (recorded {_format_number(recorded)}, relative difference {compare_figures(value, recorded):.1e})"


def _format_number(value: float) -> str:
    return f"{value:.6g}"


def _format_layers(record: Mapping[str, Any]) -> Iterator[str]:
    names = list(dict.fromkeys(key.partition("/")[2] for key in record if key.startswith("layer_")))
    if not names:  # a comparison does not measure them
        return
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
    norms = [compute_layer_norms(step) for step in (a, b)]
    for name in norms[0]:
        if name in norms[1]:
            yield f"  {'grad norm ' + sanitize_line(name):<28}{norms[0][name]:>24.6g}{norms[1][name]:>24.6g}"


def compute_layer_norms(replay: ReplayedStep) -> dict[str, float]:
    """Return the norm of the gradients of each layer, in the order of the forward pass."""
    squares: dict[str, float] = {}
    for (kind, name), replicas in replay.tensors.items():
        if kind == GRADIENT:
            layer = get_layer_name(name)
            squares[layer] = squares.get(layer, 0.0) + replicas[0].fingerprint.squares
    order = sort_layers(name for name in squares if name.startswith("layers."))
    ends = [[n for n in squares if ("emb" in n) == first and n not in order] for first in (True, False)]
    return {name: math.sqrt(squares[name]) for name in (*ends[0], *order, *ends[1])}


def format_modules(answers: Answers) -> Iterator[str]:
    """Yield the relative difference of each module's output and of its gradient, and the largest of other tensors."""
    yield _format_row("relative difference of", ("output", "gradient"))
    backward = {d.name: d.relative for d in answers.activations if d.key[0] == "backward"}
    for difference in (d for d in answers.activations if d.key[0] == "forward"):
        name = difference.name
        yield _format_row(name, (f"{difference.relative:.1e}", f"{backward[name]:.1e}" if name in backward else ""))
    for kind, differences in answers.tensors.items():
        if largest := find_largest(differences):
            size = f"up to {largest.relative:.1e}, {sanitize_line(largest.name)}"
            yield f"  {kind:<28}  {size}"


def format_routes(shares: Mapping[str, float], figures: Mapping[str, float]) -> Iterator[str]:
    """Yield how many tokens have other experts.

    Args:
        shares: of tokens with other experts, by router.
        figures: of the second replay; with `pinned` where its routers used given experts.
    """
    if figures.get("pinned"):
        share = figures["other"] / figures["pinned"]
        yield f"experts pinned to those of the first replay; the second's own would differ for {share:.2%} of choices"
    elif first := next((name for name, share in shares.items() if share), None):
        yield (
            f"experts differ for {shares[first]:.2%} of tokens, first in {sanitize_line(first)}: what follows is of "
            "other experts; pin=routing compares both with the same"
        )


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


def answers_as_json(answers: Answers) -> dict[str, Any]:
    """Return answers as plain containers."""
    tensors = {f"{kind}/{d.name}": d.relative for kind, values in answers.tensors.items() for d in values}
    return {
        "differences": {"/".join(d.key): d.relative for d in answers.activations} | tensors,
        "findings": [asdict(finding) for finding in answers.findings],
        "answers": list(answers.sentences),
        "verdict": answers.verdict,
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
