"""What an attempt evaluates: the content that figures `evaluation/NAME/...` are of. Free of torch.

The digests stand in run.yaml and are part of no id: they belong to the figures. Figures of one name and of different
digests are never averaged, compared or shown as one curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titan.evaluation.schema import Evaluation
from titan.metrics.reader import Record
from titan.run.run import flatten_config

KEY = "evaluated"
"""The key of the digests, by the names of sets and tasks, in a document of run.yaml."""
Documents = Sequence[Mapping[str, Any]]


def compute_digests(evaluation: Evaluation) -> dict[str, str]:
    """Return the digest of each set and task."""
    groups: dict[str, Mapping[str, Any]] = {"sets": evaluation.sets or {}, "tasks": evaluation.tasks or {}}
    return {
        name: part.compute_digest(f"evaluation.{group}.{name}")
        for group, parts in groups.items()
        for name, part in parts.items()
    }


def note_changes(current: Mapping[str, str], documents: Documents) -> tuple[str, ...]:
    """Return a note where what is evaluated has changed since the attempt that evaluated it last."""
    last = {name: (digest, document) for document in documents for name, digest in document.get(KEY, {}).items()}
    changed = [
        f"evaluation/{name} ({find_file(last[name][1], name)}: {last[name][0]} -> {digest})"
        for name, digest in current.items()
        if name in last and last[name][0] != digest
    ]
    sentence = "what is evaluated has changed, so figures from before are not comparable with those from now on: "
    return (sentence + ", ".join(changed),) if changed else ()


def find_name(key: str) -> str:
    """Return the name of the set or task that a figure in metrics.jsonl is of; empty for other figures."""
    parts = key.removeprefix("ema/").split("/")
    return parts[1] if parts[0] == "evaluation" and len(parts) == 3 else ""


def find_file(document: Mapping[str, Any], name: str) -> str:
    """Return the file of a set or task in the settings of an attempt; empty where they have none."""
    settings = flatten_config(document["config"].get("evaluation") or {})
    return str(settings.get(f"sets.{name}.path") or settings.get(f"tasks.{name}.path") or "")


def separate_figures(records: list[Record], documents: Documents) -> list[Record]:
    """Return the lines of metrics.jsonl with figures of content that changed later under `evaluation/NAME@DIGEST/...`.

    Attempts that recorded no digest count as of the last content.
    """
    digests = {document["attempt"]: document.get(KEY, {}) for document in documents}
    last = {name: digest for of_attempt in digests.values() for name, digest in of_attempt.items()}
    changed = {
        attempt: {name: digest for name, digest in of_attempt.items() if digest != last[name]}
        for attempt, of_attempt in digests.items()
    }
    return [rename_figures(record, changed.get(record.get("attempt", 1), {})) for record in records]


def find_changed(current: Mapping[str, str], documents: Documents) -> dict[str, str]:
    """Return the digests that differ from the first that an attempt recorded under their names.

    Trackers already have figures under those names.
    """
    first = {name: digest for document in reversed(documents) for name, digest in document.get(KEY, {}).items()}
    return {name: digest for name, digest in current.items() if first.get(name, digest) != digest}


def rename_figures(record: Record, changed: Mapping[str, str]) -> Record:
    """Return a record with the figures of some sets and tasks under `evaluation/NAME@DIGEST/...`."""

    def rename(key: str) -> str:
        digest = changed.get(name := find_name(key))
        return key if digest is None else key.replace(f"evaluation/{name}/", f"evaluation/{name}@{digest}/")

    return {rename(key): value for key, value in record.items()} if changed else record
