"""What runs of two variants can be compared by: nats on the same tokens, or bits per byte on the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from titan.config.settings import show
from titan.report.findings import Numbers
from titan.report.runs import Member

READ_AS = ("tokenizer", "weights", "stages", "mask_documents", "skip", "block", "window", "epochs", "sources")
"""Settings of a dataset that say how its text is read, not which text is held out."""
HOUSEKEEPING = ("cache", "prefetch", "workers", "stream", "keep_gib")
Measured = Callable[[Member], float | None]
"""What is compared of a run; None where it has none."""


@dataclass(frozen=True)
class Measure:
    """What two variants can be compared by.

    Attributes:
        name: "validation loss", "bits per byte" or "tokens to the target".
        unit: of a difference; empty: values are logarithms, whose difference is told as a ratio.
        of: a run's final value; infinite where it never came to one.
        curve: its values at its validations.
        lost: what is said of a run whose value is infinite.
    """

    name: str
    unit: str
    of: Measured
    curve: Callable[[Member], Numbers]
    lost: str = "diverged"


def measure_of(one: Member, two: Member) -> Measure | None:
    """By what runs can be compared: nats on the same tokens, bits a byte on the same text; None: by neither."""
    if _held(one) == _held(two):
        return Measure("validation loss", "nats", lambda m: m.run.validation, lambda m: m.run.curves.validation)
    if same_text(one, two):
        return Measure("bits per byte", "bits", lambda m: m.run.bits, lambda m: m.run.curves.bits_per_byte)
    return None


def _held(member: Member) -> tuple[Any, ...]:
    """What decides the tokens that are held out and how they lie in rows."""
    config = member.raw.config
    rows = config["training"]["seq_len"], config["dataset"].get("mask_documents")
    return (_digest(member), config["metrics"].get("validation_tokens"), *rows)


def _digest(member: Member) -> Any:
    return member.raw.last["science"].get("data")


def same_text(one: Member, two: Member) -> bool:
    """Whether two runs hold out the same text, cut into tokens and rows by each in its way."""
    count = [m.raw.config["metrics"].get("validation_tokens") for m in (one, two)]
    if count[0] != count[1]:
        return False
    if _digest(one) == _digest(two):
        return True
    return bool(_text(one) == _text(two) and _read_as(one) != _read_as(two))


def _text(member: Member) -> Any:
    """The settings that decide which text is held out."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    kinds = member.raw.last["science"].get("dataset")
    return kinds, {name: {k: show(v) for k, v in part.items() if k not in _READ} for name, part in parts.items()}


def _read_as(member: Member) -> Any:
    """The settings by which the digest of the same text is another one."""
    dataset = member.raw.config["dataset"]
    parts = {"": dataset, **(dataset.get("sources") or {})}
    return {name: [show(part.get(k)) for k in ("tokenizer", "block", "window")] for name, part in parts.items()}


_READ = (*READ_AS, *HOUSEKEEPING)
