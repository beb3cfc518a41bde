"""Which figures of files and tasks are compared: those of one name that were measured on the same content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titan.report.estimate import Member
from titan.run import evaluated

NAMED_RUNS = 4
"""Runs that a note names."""
Content = tuple[str, str]
"""The name of a file and the digest of its content, which is empty where a run did not record it."""


def drop_incomparable(members: Sequence[Sequence[Member]]) -> tuple[list[list[Member]], list[str]]:
    """Return the runs of each variant without figures whose content differs between runs, and notes on these.

    What a run did not record is taken to be the same as in other runs, if the name of the file is.
    """
    runs, dropped, notes = [m for variant in members for m in variant], set[str](), list[str]()
    for name in dict.fromkeys(evaluated.find_name(key) for m in runs for key in m.run.figures):
        contents = _group_by_content(runs, name)
        files, digests = {file for file, _ in contents}, {digest for _, digest in contents}
        unknown = [run for (_, digest), names in contents.items() if not digest for run in names]
        if len(digests - {""}) > 1 or (unknown and len(files) > 1):
            dropped.add(name)
            parts = (f"{d or 'not recorded'} in {_list_runs(names)}" for (_, d), names in contents.items())
            verb = "differ" if len(files) > 1 else "differs"
            what = f"{', '.join(sorted(files))} {verb}, or how it is read"
            notes.append(f"not compared: {what}: evaluation/{name} is of {'; '.join(parts)}")
        elif unknown and len(digests) > 1:
            what = f"evaluation/{name}: the content of {min(files)} is not recorded in {_list_runs(unknown)}"
            notes.append(f"{what}, and taken to be that of the other runs")
    return [[_drop_figures(m, dropped) for m in variant] for variant in members], notes


def _group_by_content(runs: Sequence[Member], name: str) -> dict[Content, list[str]]:
    """Return the directories of the runs that have figures of a set or task, by its content."""
    names: dict[Content, list[str]] = {}
    for m in runs:
        if name in map(evaluated.find_name, m.run.figures):
            attempt = m.history.final_validation.get("attempt")  # others may have measured other content
            document = next((d for d in m.raw.documents if d["attempt"] == attempt), m.raw.last_document)
            content = Path(evaluated.find_file(document, name)).name, document.get(evaluated.KEY, {}).get(name, "")
            names.setdefault(content, []).append(m.raw.directory.name)
    return names


def _list_runs(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - NAMED_RUNS} more" if len(names) > NAMED_RUNS else ""
    return ", ".join(names[:NAMED_RUNS]) + remainder


def _drop_figures(member: Member, names: set[str]) -> Member:
    kept = {key: value for key, value in member.run.figures.items() if evaluated.find_name(key) not in names}
    return replace(member, run=replace(member.run, figures=kept))
