"""The text of a replay for the terminal. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan.console.text import safe
from titan.training.replay.result import Difference, Seen, Statistics

LAYER = {
    "layer_grad_norm": "grad norm",
    "layer_weight_norm": "weight norm",
    "layer_update_ratio": "update/weight",
    "layer_activation_rms": "activation",
    "layer_attention_logit": "max logit",
}
"""Keys of a layer's metrics, and their columns."""
TEXT = 60
"""Characters of text before a token."""


def seen_lines(seen: Seen, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a replay saw, beside what the run has recorded of the step."""
    record = seen.record
    first, last = record["rows"]
    yield f"step {record['step']}: rows {first} to {last}, learning rate {record['lr']:.3g}"
    for key in ("loss", "grad_norm"):
        yield f"  {key:<9}  {_number(record[key])}{_compared(record[key], recorded.get(key))}"
    if recorded and recorded.get("batch_hash") != record["batch_hash"]:
        yield f"  batch hash {record['batch_hash']}, the run recorded {recorded.get('batch_hash')}: other rows"
    yield ""
    yield from _layers(record)
    yield ""
    yield from _modules(seen)
    yield ""
    yield "tokens with the largest losses:"
    for token in seen.tokens:
        text = f"...{safe(token.before[-TEXT:])}>>>{safe(token.text)}<<<"
        yield f"  {_number(token.loss):>10}  row {token.row}, token {token.position}: {text}"


def _compared(here: float, there: Any) -> str:
    if there is None:
        return "" if here == here else "  (the run recorded no finite value)"
    if here == there:
        return "  (as recorded, bitwise)"
    return f"  (recorded {_number(there)}, relative difference {abs(here - there) / max(abs(there), 1e-30):.1e})"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _layers(record: Mapping[str, Any]) -> Iterator[str]:
    names = list(dict.fromkeys(key.partition("/")[2] for key in record if key.startswith("layer_")))
    yield _row("layer", LAYER.values())
    for name in names:
        values = [record.get(f"{key}/{name}") for key in LAYER]
        yield _row(name, ["" if value is None else f"{value:.4g}" for value in values])


def _modules(seen: Seen) -> Iterator[str]:
    yield _row("output of", ("rms", "mean", "largest", "grad rms", "grad largest"))
    for (direction, name), found in seen.statistics.items():
        if direction == "forward":
            gradient = seen.statistics.get(("backward", name))
            yield _row(name, [*_cells(found), *(_cells(gradient)[::2] if gradient else ("", ""))])


def _cells(found: Statistics) -> tuple[str, str, str]:
    return f"{found.rms:.4g}", f"{found.mean:.2g}", f"{found.largest:.4g}"


def _row(name: str, cells: Any) -> str:
    return f"  {name:<28}" + "".join(f"{cell:>14}" for cell in cells)


def difference_lines(
    labels: tuple[str, str], a: Seen, b: Seen, found: Sequence[Difference], limit: float
) -> Iterator[str]:
    """Yield two replays side by side, and the first module that differs."""
    yield f"{'':<30}{labels[0]:>24}{labels[1]:>24}"
    for key in ("loss", "grad_norm"):
        yield f"  {key:<28}{_number(a.record[key]):>24}{_number(b.record[key]):>24}"
    for key in sorted(a.record.keys() & b.record.keys(), key=list(a.record).index):
        if key.startswith("layer_grad_norm/"):
            yield f"  {'grad norm ' + key.partition('/')[2]:<28}{a.record[key]:>24.6g}{b.record[key]:>24.6g}"
    yield ""
    yield _row("relative difference of", ("output", "gradient"))
    backward = {d.key[1]: d.relative for d in found if d.key[0] == "backward"}
    for difference in (d for d in found if d.key[0] == "forward"):
        name = difference.key[1]
        yield _row(name, (f"{difference.relative:.1e}", f"{backward[name]:.1e}" if name in backward else ""))
    yield ""
    yield verdict(found, limit)


def verdict(found: Sequence[Difference], limit: float) -> str:
    """Return the sentence on the first module that differs."""
    first = next((d for d in found if d.relative > 0), None)
    beyond = next((d for d in found if d.relative > limit), None)
    if first is None:
        return "both are the same, bitwise, in all sampled activations and gradients"
    at_all = f"the first difference at all, {first.relative:.1e}, is in the {_name(first)}"
    if beyond is None:
        return f"no layer differs by more than rounding ({limit:g}); {at_all}"
    return (
        f"the first layer that differs by more than rounding ({limit:g}) is the {_name(beyond)}: {beyond.relative:.1e}"
        + ("" if beyond is first else f"; {at_all}")
    )


def _name(difference: Difference) -> str:
    direction, name = difference.key
    return f"{direction} pass of {name}" if direction == "forward" else f"backward pass, gradient of {name}'s output"


def as_json(seen: Seen, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a replay saw as plain containers."""
    statistics = {f"{direction}/{name}": asdict(found) for (direction, name), found in seen.statistics.items()}
    return {
        "record": dict(seen.record),
        "recorded": dict(recorded),
        "statistics": statistics,
        "tokens": [asdict(token) for token in seen.tokens],
    }


def to_text(content: Mapping[str, Any]) -> str:
    """Return JSON, in which numbers that are not finite are null."""
    return json.dumps(_finite(content), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
