"""What runs of two variants can be compared by: nats on the same tokens, or bits per byte on the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan.config.settings import format_value
from titan.report.findings import Numbers
from titan.report.runs import Member

READING_SETTINGS = ("tokenizer", "weights", "stages", "mask_documents", "skip", "block", "window", "epochs", "sources")
"""Dataset settings that decide how text is read, not which text is the evaluation set."""
HOUSEKEEPING = ("cache", "prefetch", "workers", "stream", "keep_gib")
MeasureFunction = Callable[[Member], float | None]
"""Returns the compared value of a run; None where it has none."""


@dataclass(frozen=True)
class Measure:
    """A quantity by which two variants are compared.

    Attributes:
        name: "validation loss", "bits per byte" or "tokens to the target".
        unit: of a difference; empty: values are logarithms, whose difference is shown as a ratio.
        final_value: returns a run's final value; infinite where it never has one.
        curve: returns its values at its validations.
        infinite_text: words for a run whose value is infinite.
    """

    name: str
    unit: str
    final_value: MeasureFunction
    curve: Callable[[Member], Numbers]
    infinite_text: str = "diverged"


def choose_measure(variant: Member, baseline: Member) -> Measure | None:
    """Return nats on the same tokens or bits per byte on the same text; None where neither is comparable."""
    if _identify_evaluation_set(variant) == _identify_evaluation_set(baseline):
        return Measure("validation loss", "nats", lambda m: m.run.validation, lambda m: m.run.curves.validation)
    if has_same_text(variant, baseline):
        return Measure("bits per byte", "bits", lambda m: m.run.bits, lambda m: m.run.curves.bits_per_byte)
    return None


def _identify_evaluation_set(member: Member) -> tuple[Any, ...]:
    """Return the settings that decide the evaluation set and its rows."""
    config = member.raw.config
    rows = config["training"]["seq_len"], config["dataset"].get("mask_documents")
    return (_read_digest(member), config.get("evaluation", {}).get("tokens"), *rows)


def _read_digest(member: Member) -> Any:
    return member.raw.last_document["science"].get("data")


def has_same_text(variant: Member, baseline: Member) -> bool:
    """Return whether two runs have the same text as evaluation set, whatever their tokens and rows are."""
    count = [m.raw.config.get("evaluation", {}).get("tokens") for m in (variant, baseline)]
    if count[0] != count[1]:
        return False
    if _read_digest(variant) == _read_digest(baseline):
        return True
    return bool(
        _identify_text(variant) == _identify_text(baseline)
        and _list_reading_settings(variant) != _list_reading_settings(baseline)
    )


def _identify_text(member: Member) -> Any:
    """Return the settings that decide the text of the evaluation set."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    kinds = member.raw.last_document["science"].get("dataset")
    return kinds, {
        name: {k: format_value(v) for k, v in part.items() if k not in _IGNORED_SETTINGS}
        for name, part in parts.items()
    }


def _list_reading_settings(member: Member) -> Any:
    """Return the settings that change the digest of the same text."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    return {name: [format_value(part.get(k)) for k in ("tokenizer", "block", "window")] for name, part in parts.items()}


_IGNORED_SETTINGS = (*READING_SETTINGS, *HOUSEKEEPING)
