"""Scaling laws as one HTML file that loads nothing. Needs jinja2 (the extra `compare`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from titan.console.numbers import format_count, format_interval
from titan.console.text import sanitize_nested
from titan.report.render import law_text
from titan.report.render.law_charts import draw_floor, draw_rungs
from titan.report.render.template import POLICY, content, load_template
from titan.scaling.ladders import LadderStudy
from titan.scaling.speedup import format_share
from titan.scaling.study import LossPrediction, Study
from titan.scaling.table import Table

MOST_CHARTS = 4
"""Variants with a chart each."""
CSS = """
.band { fill: var(--c); opacity: .14; stroke: none; }
.whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.true { stroke: var(--bad); stroke-width: 2.4; fill: none; }
.outside { fill: var(--rule); opacity: .6; }
"""


def render_page(table: Table, studies: Sequence[Study | LadderStudy], made: str) -> str:
    """Return the page.

    Args:
        table: all runs.
        studies: one for each corpus.
        made: date and command, for the last line.
    """
    return load_template("law.html.jinja").render(
        policy=Markup(POLICY),
        css=Markup(content("page.css") + content("plan.css") + CSS),
        title="Scaling law",
        lead=sanitize_nested(" ".join(_summarise_each(studies))),
        notes=sanitize_nested(list(table.notes)),
        sections=[
            _build_ladder_section(study) if isinstance(study, LadderStudy) else _build_section(study, k)
            for k, study in enumerate(studies)
        ],
        made=sanitize_nested(made),
    )


def _summarise_each(studies: Sequence[Study | LadderStudy]) -> list[str]:
    """Return a sentence on laws, and one on ladders, where there are any."""
    laws = [study for study in studies if isinstance(study, Study)]
    words = [summarise_studies(laws)] if laws else []
    return [*words, "Variants are compared by compute, without a law."] if len(laws) < len(studies) else words


def summarise_studies(studies: Sequence[Study]) -> str:
    """Return the first sentence: what is predicted and scored, and which floors are not determined."""
    scored = [p for study in studies for p in study.predictions if p.observed is not None]
    floors = [floor for study in studies for floor in study.floors.values()]
    open_floors = sum(not floor.is_determined for floor in floors)
    words = []
    if scored:
        words.append(f"{sum(bool(p.is_inside) for p in scored)} of {len(scored)} held-out rungs inside 90% intervals")
    words.append(
        f"floor not determined in {open_floors} of {len(floors)} laws"
        if open_floors
        else "the rungs determine the floor"
    )
    sentence = "; ".join(words)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _build_section(study: Study, number: int) -> dict[str, Any]:
    predictions = {p.variant: [q for q in study.predictions if q.variant == p.variant] for p in study.predictions}
    lines = [line.strip() for line in law_text.format_study(study) if line.strip()]
    tabled = {law_text.describe_prediction(p) for p in study.predictions}
    tabled |= {found.describe() for rungs in study.rung_speedups.values() for found in rungs}
    headings = "loss of a new run", law_text.RUNG_LINES, "and "  # those of tables, and the ends of long lists
    sentences = [line for line in lines if line not in tabled and not line.startswith(headings)]
    names = study.fit.variants[:MOST_CHARTS]
    charts = [draw_rungs(study.fit, name, predictions.get(name, []), f"{number}-{k}") for k, name in enumerate(names)]
    charts += [draw_floor(floor, variants, f"{number}-{k}") for k, (variants, floor) in enumerate(study.floors.items())]
    return {
        "heading": sanitize_nested(study.corpus or "All runs"),
        "sentences": sanitize_nested(sentences[1:] if study.corpus else sentences),
        "predictions": sanitize_nested([_format_prediction(p) for p in study.predictions]),
        "speedups": sanitize_nested(_list_speedups(study)),
        "charts": charts,
        "rungs": sanitize_nested(_list_rungs(study)),
    }


def _build_ladder_section(study: LadderStudy) -> dict[str, Any]:
    sentences = law_text.format_ladders(study)
    rungs = [
        [name, format_count(n), format_count(d), f"{loss:.4f}", str(count), ""]
        for name, n, d, loss, count in study.table.list_rungs()
    ]
    return {
        "heading": sanitize_nested(study.corpus or "All runs"),
        "sentences": sanitize_nested(sentences[1:] if study.corpus else sentences),
        "predictions": [],
        "speedups": [],
        "charts": [],
        "rungs": sanitize_nested(rungs),
    }


def _format_prediction(prediction: LossPrediction) -> list[str]:
    verdict = {True: "inside", False: "outside", None: "not measured"}[prediction.is_inside]
    loss = prediction.loss
    return [
        law_text.name_variant(prediction.variant),
        f"{verdict}, extrapolated" if prediction.is_beyond else verdict,
        format_count(prediction.n),
        format_count(prediction.d),
        f"{loss.value:.3f}",
        format_interval(loss.low, loss.high, lambda value: f"{value:.3f}"),
        "" if prediction.observed is None else f"{prediction.observed:.3f}",
        f"{prediction.plain:.3f}",
    ]


def _list_speedups(study: Study) -> list[list[str]]:
    rows = []
    for name, rungs in study.rung_speedups.items():
        for found in rungs:
            shares = (found.speedup.flops, found.speedup.tokens, found.speedup.hours)
            cells = [format_share(share) if share else "not determined" for share in shares[:2]]
            hours = format_share(shares[2]) if shares[2] else ""
            losses = [f"{found.loss:.4f}", f"{found.baseline_loss:.4f}"]
            place = [format_count(found.n), format_count(found.d)]
            rows.append([law_text.name_variant(name), *place, *cells, hours, *losses, str(found.pairs)])
    return rows


def _list_rungs(study: Study) -> list[list[str]]:
    rows = []
    for name, n, d, loss, count in study.fit.table.list_rungs():
        law = study.fit.laws[name].compute_plain(n, d, name)
        rows.append(
            [law_text.name_variant(name), format_count(n), format_count(d), f"{loss:.4f}", str(count), f"{law:.4f}"]
        )
    return rows
