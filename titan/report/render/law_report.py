"""Scaling laws: what a table of runs shows, as text for a terminal, as a page with charts, as CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from typing import Any

import numpy as np

from titan.console.numbers import format_count, format_interval, format_plural, format_tick, format_tokens
from titan.console.text import sanitize_line, sanitize_nested
from titan.metrics import svg
from titan.metrics.svg import Frame, Label
from titan.report.law_findings import LawFindings, RungFindings
from titan.report.law_runs import describe_table
from titan.report.render.charts import ChartSize, LegendEntry, build_chart, draw_level, format_legend
from titan.report.render.document import (
    NARROW_STYLES,
    Bullets,
    Chart,
    Figures,
    Report,
    Section,
    Table,
    format_data,
    format_page,
    format_table,
)
from titan.scaling.fit import ALPHA, LEVEL, REACH, Fit, Law
from titan.scaling.ladders import LadderStudy
from titan.scaling.law import BEND, DATA, SHARED, SIZE, Numbers
from titan.scaling.speedup import format_share
from titan.scaling.study import Floor, LossPrediction, Optimum, Study, draw_band
from titan.scaling.table import Table as RunTable

FORMAT = 1
"""Version of the JSON; rises when a key changes its meaning or is removed."""
RUNG_COLUMNS = (
    "corpus", "variant", "baseline", "n", "d", "runs", "loss", "is_fitted", "plain", "predicted", "predicted_low",
    "predicted_high", "is_inside", "is_beyond", "pairs",
)  # fmt: skip
SHARES = ("flops", "tokens", "hours")
COLUMNS = (*RUNG_COLUMNS, *(f"{name}{end}" for name in SHARES for end in ("", "_low", "_high")))
"""Columns of every CSV, in this order; the last nine are shares of the baseline's compute for its loss."""
MOST_CHARTS = 4
"""Variants with a chart each."""
STEPS = 24
"""Lengths at which a band is computed."""
COLOURS = 6
MOST_SIZES = 12
"""Sizes with a line; of more, these are spread over all."""
HIGHEST_RISE = 3.0
"""The profile is shown up to so many times its limit."""
SHOWN = 30
"""Predictions, and rungs of a variant, in a terminal."""
RUNG_LINES = "as measured at each rung, with the slope of the baseline's law, what"
"""How the line before the speed-ups at rungs begins."""


def format_studies(table: RunTable, studies: Sequence[Study | LadderStudy]) -> str:
    """Return the text of a command."""
    lines = [*table.notes]
    if len(studies) > 1:
        lines.append(f"{len(studies)} corpora, each with a separate law: their losses have other floors.")
    for study in studies:
        lines += ["", *(_format_ladders(study) if isinstance(study, LadderStudy) else _format_study(study))]
    return "".join(f"{sanitize_line(line)}\n" for line in lines)


def _format_study(study: Study) -> list[str]:
    """Return the lines about a corpus."""
    held = f"; {format_plural(len(study.held), 'run')} not fitted" if len(study.held) else ""
    lines = [*([f"corpus {study.corpus}"] if study.corpus else []), f"{describe_table(study.fit.table)}{held}"]
    lines += [*_describe_left_out(study), *_describe_sharing(study.fit)]
    for names, floor in study.floors.items():
        law = study.fit.laws[names[0]]
        lines += ["", *([] if len(study.floors) == 1 else [_name_variant(names[0])]), _describe_floor(floor, law)]
        lines += [f"  {line}" for line in _list_parameters(law)]
        lines += [_describe_noise(law)]
    lines += [*_format_predictions(study.predictions), *_format_speedups(study)]
    return [*lines, *(_describe_optimum(name, optimum) for name, optimum in study.optima.items())]


def _format_ladders(study: LadderStudy) -> list[str]:
    """Return the lines about a corpus whose variants are compared by compute."""
    lines = [*([f"corpus {study.corpus}"] if study.corpus else []), describe_table(study.table)]
    lines += [f"left out: {reason}" for reason in study.left_out]
    lines.append(
        "each variant has tokens in another single proportion to parameters, which determines no law of both; they are "
        f"compared by compute: FLOPs of {study.baseline} divided by those of the variant with the same loss."
    )
    for name, factors in study.factors.items():
        for k, factor in enumerate(factors):
            reach = "the lowest of all, beyond the rungs of one" if k else "the lowest that both reach"
            lines.append(f"{name} against {study.baseline}, loss {factor.loss:.3f} ({reach}): {factor.describe()}")
    return lines


def _name_variant(name: str) -> str:
    """Return how a variant is called; the only one has no name."""
    return name or "all runs"


def _describe_left_out(study: Study) -> list[str]:
    """Return what was left out, and rungs far from the law."""
    lines = [f"left out: {reason}" for reason in study.fit.left_out]
    for names in study.floors:
        for n, d, variant, residual in study.fit.laws[names[0]].find_suspects():
            where = f"N={format_count(n)}, D={format_count(d)}{f', {variant}' if variant else ''}"
            lines.append(
                f"unusual: {where} is {residual:+.1f} robust standard deviations from the law; it stays, with a weight "
                f"that falls with the distance (Huber)."
            )
    return lines


def _describe_sharing(fit: Fit) -> list[str]:
    """Return whether variants share E and exponents, and by which test; nothing with one variant."""
    if len(fit.variants) < 2:
        return []
    if fit.sharing is None:
        return ["variants share E, a and b: assumed, as some have too few rungs to test it."]
    test = fit.sharing
    figure = f"F({test.numerator}, {test.denominator}) = {test.f:.2f}, p = {test.p:.2g}"
    if test.shares:
        return [f"variants share E, a and b: not rejected at {ALPHA:g} by the likelihood-ratio test ({figure})."]
    return [f"each variant has a separate law: the likelihood-ratio test rejects shared E, a and b ({figure})."]


def _describe_floor(floor: Floor, law: Law) -> str:
    """Return the floor with its interval, or that it is not determined."""
    form = "L = E + A N^-a" if law.points.is_line else "L = E + A N^-a + B D^-b"
    if floor.is_determined:
        return f"{form}: floor E {floor.value:.3f} {format_interval(floor.low, floor.high, _format_loss)}"
    why = "the profile reaches 0"
    if not floor.reaches_zero:
        why = f"the profile has no upper end below the lowest loss, {floor.least_loss:.3f}"
    bound = f", below {floor.high:.3f}" if floor.high is not None else ""
    return (
        f"{form}: floor not determined by these rungs ({why}); the best fit has E {floor.value:.3f}{bound}. "
        f"Predictions and speed-ups have this uncertainty in them."
    )


def _format_loss(value: float) -> str:
    return f"{value:.3f}"


def _list_parameters(law: Law) -> list[str]:
    """Return exponents, A and B with their intervals, one line each."""
    lines = [_format_parameter("a", law.plain[SIZE], law.replicates[:, SIZE])]
    if not law.points.is_line:
        lines.append(_format_parameter("b", law.plain[DATA], law.replicates[:, DATA]))
    for k, name in enumerate(law.variants):
        a = np.exp(law.plain[SHARED + k] + law.plain[SIZE] * law.points.center[0])
        b = np.exp(law.plain[SHARED + len(law.variants) + k] + law.plain[DATA] * law.points.center[1])
        terms = f"A {a:.4g}" if law.points.is_line else f"A {a:.4g}, B {b:.4g}"
        lines.append(f"{terms}{f'  ({name})' if name else ''}")
    return lines


def _format_parameter(name: str, value: float, draws: Numbers) -> str:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    wide = f"{np.median(draws):.3f} {format_interval(low, high, _format_loss)}"
    return f"{name} {value:.3f}; with the bend {wide}"


def _describe_noise(law: Law) -> str:
    """Return the noise of runs: of seeds, and lack of fit."""
    noise = float(np.median(law.draws.noise))
    words = f"noise of a run {100 * noise:.2f} % of its loss"
    if law.cells.seed_sd is None:
        words += " (no seeds were repeated: seeds and lack of fit can't be separated)"
    else:
        words += (
            f" (seeds {100 * law.cells.seed_sd:.2f} %, from {format_plural(law.cells.seed_freedom, 'repeat')}; "
            f"cells {100 * (law.cell_sd or 0.0):.2f} %)"
        )
    if law.points.is_line:
        return f"{words}; all rungs have tokens in one proportion to parameters, so that one term stands for both."
    low, high = np.exp(np.quantile(law.replicates[:, BEND], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    verdict = "the plain law, 1, is within" if low <= 1 <= high else "the plain law, 1, is not"
    return f"{words}; bend {np.exp(law.wide[BEND]):.2f} [{low:.2f}, {high:.2f}]: {verdict}"


def _describe_prediction(prediction: LossPrediction) -> str:
    """Return a prediction in one sentence."""
    place = f"N={format_count(prediction.n)}, D={format_count(prediction.d)}"
    name = f"{prediction.variant}, " if prediction.variant else ""
    loss = prediction.loss
    words = f"{name}{place}: {loss.value:.3f} {format_interval(loss.low, loss.high, _format_loss)}"
    words += f" (plain law {prediction.plain:.3f})"
    if prediction.observed is not None:
        verdict = "inside" if prediction.is_inside else "OUTSIDE"
        miss = 100 * (prediction.observed / prediction.plain - 1)
        words += f"; measured {prediction.observed:.3f}, {verdict}; the plain law misses it by {miss:+.1f} %"
    beyond = f"; extrapolated beyond {REACH:g} times the largest rung, where intervals are not known to hold"
    return words + (beyond if prediction.is_beyond else "")


def _format_predictions(predictions: Sequence[LossPrediction]) -> Iterator[str]:
    if not predictions:
        return
    yield ""
    yield f"loss of a new run, with its {LEVEL:.0%} interval:"
    for prediction in predictions[:SHOWN]:
        yield f"  {_describe_prediction(prediction)}"
    if len(predictions) > SHOWN:
        yield f"  and {len(predictions) - SHOWN} more, on the page"
    scored = [p for p in predictions if p.observed is not None]
    if scored:
        inside = sum(bool(p.is_inside) for p in scored)
        yield f"{inside} of {format_plural(len(scored), 'held-out rung')} inside their {LEVEL:.0%} intervals"


def _format_speedups(study: Study) -> Iterator[str]:
    """Yield the speed-up of each variant by the laws, then as measured at each rung."""
    baseline = _name_variant(study.fit.variants[0])
    for name, speedup in study.speedups.items():
        yield speedup.describe(_name_variant(name), baseline)
        if rungs := study.rung_speedups.get(name):
            yield f"{RUNG_LINES} {_name_variant(name)} needs for {baseline}'s loss:"
            yield from (f"  {rung.describe()}" for rung in rungs[:SHOWN])
        if len(rungs or ()) > SHOWN:
            yield f"  and {len(rungs or ()) - SHOWN} more, on the page"


def _describe_optimum(name: str, optimum: Optimum) -> str:
    """Return the best size and length for a compute, or that they are not determined."""
    prefix = f"{name}: " if name else ""
    where = f"{prefix}least loss of {optimum.compute:.2g} FLOPs (6 N D)"
    if optimum.n is None or optimum.d is None:
        return f"{where}: N and D not determined by these rungs."
    n, d = ((i, format_interval(i.low, i.high, format_count)) for i in (optimum.n, optimum.d))
    return f"{where}: N {format_count(n[0].value)} {n[1]}, D {format_count(d[0].value)} {d[1]}"


# ---- CSV and JSON ----


def format_json(findings: LawFindings) -> str:
    """Return all findings in full precision; keys are the fields of `titan.report.law_findings`."""
    content = {field.name: getattr(findings, field.name) for field in fields(findings) if field.name != "text"}
    return format_data(FORMAT, content)


def format_csv(findings: LawFindings) -> str:
    """Return a heading and one row per size and length of a variant; unknown values are empty."""
    rungs = ((corpus, rung) for corpus in findings.corpora for rung in corpus.rungs)
    rows = ({"corpus": c.corpus, "baseline": c.baseline, **_build_row(rung)} for c, rung in rungs)
    return format_table(COLUMNS, rows)


def _build_row(rung: RungFindings) -> dict[str, Any]:
    own = {field.name: getattr(rung, field.name) for field in fields(rung) if field.name in RUNG_COLUMNS}
    intervals = {"predicted": rung.predicted}
    if rung.speedup is not None:
        intervals |= {name: getattr(rung.speedup, name) for name in SHARES}
    for name, interval in intervals.items():
        ends = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
        own |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return own


# ---- page ----


def render_page(table: RunTable, studies: Sequence[Study | LadderStudy], footer: str) -> str:
    """Return the page of all corpora; `footer` is its last line. Needs jinja2.

    Args:
        table: all runs.
        studies: one for each corpus.
    """
    sections = [section for k, study in enumerate(studies) for section in _build_sections(study, k)]
    report = Report("Scaling law", " ".join(_summarise(studies)), [Section("", [Bullets(table.notes)]), *sections])
    return format_page(sanitize_nested(report), sanitize_line(footer), (*NARROW_STYLES, "law.css"))


def _summarise(studies: Sequence[Study | LadderStudy]) -> list[str]:
    """Return what is predicted and scored, which floors are not determined, and whether there are ladders."""
    laws, words = [study for study in studies if isinstance(study, Study)], []
    if laws:
        scored = [p for study in laws for p in study.predictions if p.observed is not None]
        floors = [floor for study in laws for floor in study.floors.values()]
        open_floors = sum(not floor.is_determined for floor in floors)
        parts = [f"{sum(bool(p.is_inside) for p in scored)} of {len(scored)} held-out rungs inside 90% intervals"]
        missing = f"floor not determined in {open_floors} of {len(floors)} laws"
        parts = [*(parts if scored else []), missing if open_floors else "the rungs determine the floor"]
        sentence = "; ".join(parts)
        words.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return [*words, "Variants are compared by compute, without a law."] if len(laws) < len(studies) else words


def _build_sections(study: Study | LadderStudy, number: int) -> list[Section]:
    """Return what the page has of a corpus: sentences, predictions, speed-ups, charts, and the rungs to unfold."""
    sentences, rungs, head = _list_sentences(study), _list_rungs(study), ["variant", "N", "D", "loss", "runs", "law"]
    folded = Table(rungs, head, summary=f"{len(rungs)} rungs")
    first = Section(study.corpus or "All runs", [Bullets(sentences[1:] if study.corpus else sentences)])
    if isinstance(study, LadderStudy):
        return [first, Section("", [folded])]
    speedups = "Compute for the baseline's loss, as measured at each rung (below 1 is better)"
    names = study.fit.variants[:MOST_CHARTS]
    charts = [
        draw_rungs(study.fit, name, [p for p in study.predictions if p.variant == name], f"{number}-{k}")
        for k, name in enumerate(names)
    ]
    charts += [draw_floor(floor, variants, f"{number}-{k}") for k, (variants, floor) in enumerate(study.floors.items())]
    predictions = ["variant", "verdict", "N", "D", "predicted", "90% interval", "measured", "plain law"]
    shares = ["variant", "N", "D", "FLOPs", "tokens", "device-hours", "loss", "baseline's loss", "pairs of seeds"]
    return [
        first,
        Section(
            "Predictions", [Table(list(map(_format_prediction, study.predictions)), predictions, words=2)], level=3
        ),
        Section(speedups, [Table(_list_speedups(study), shares)], level=3),
        Section("", [Figures(charts), folded]),
    ]


def _list_sentences(study: Study | LadderStudy) -> list[str]:
    """Return the lines of the text without those that the page has as tables."""
    if isinstance(study, LadderStudy):
        return _format_ladders(study)
    tabled = {_describe_prediction(p) for p in study.predictions}
    tabled |= {found.describe() for rungs in study.rung_speedups.values() for found in rungs}
    headings = "loss of a new run", RUNG_LINES, "and "  # those of tables, and the ends of long lists
    lines = [line.strip() for line in _format_study(study) if line.strip()]
    return [line for line in lines if line not in tabled and not line.startswith(headings)]


def _format_prediction(prediction: LossPrediction) -> list[str]:
    verdict = {True: "inside", False: "outside", None: "not measured"}[prediction.is_inside]
    loss = prediction.loss
    return [
        _name_variant(prediction.variant),
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
            rows.append([_name_variant(name), *place, *cells, hours, *losses, str(found.pairs)])
    return rows


def _list_rungs(study: Study | LadderStudy) -> list[list[str]]:
    rows = []
    for name, n, d, loss, count in (study.table if isinstance(study, LadderStudy) else study.fit.table).list_rungs():
        law = ""
        if isinstance(study, Study):
            law = f"{study.fit.laws[name].compute_plain(n, d, name):.4f}"
        words = name if isinstance(study, LadderStudy) else _name_variant(name)
        rows.append([words, format_count(n), format_count(d), f"{loss:.4f}", str(count), law])
    return rows


# ---- charts ----


def draw_rungs(fit: Fit, variant: str, predictions: Sequence[LossPrediction], key: str) -> Chart:
    """Return losses over tokens, with the law and its 90% band for each size, and predictions.

    Args:
        predictions: of the variant.
        key: names the chart in the page.
    """
    rungs = [rung for rung in fit.table.list_rungs() if rung[0] == variant]
    sizes = sorted({rung[1] for rung in rungs} | {p.n for p in predictions})
    if len(sizes) > MOST_SIZES:
        sizes = [sizes[k] for k in np.linspace(0, len(sizes) - 1, MOST_SIZES).round().astype(int)]
    all_lengths = [rung[2] for rung in rungs] + [p.d for p in predictions]
    ends = min(all_lengths) / 1.2, max(all_lengths) * 1.2
    lengths = np.geomspace(*ends, STEPS)
    lines = sizes[:1] if fit.laws[variant].points.is_line else sizes
    bands = [draw_band(fit, variant, n, lengths) for n in lines]
    words = ["law"] if len(lines) < len(sizes) else [f"N={format_count(n)}" for n in sizes]
    title = f"Loss over tokens{f': {variant}' if variant else ''}"
    caption = (
        "Dots are rungs (means over seeds), one colour a size; lines are the law's median, bands hold 90% of new runs. "
        "Hollow dots with whiskers are predictions; crosses are true losses, which were not fitted."
    )

    def draw(size: ChartSize) -> str:
        losses = [rung[3] for rung in rungs] + [p.loss.low for p in predictions] + [p.loss.high for p in predictions]
        losses += [p.observed for p in predictions if p.observed is not None]
        pad = 0.06 * (max(losses) - min(losses)) or 0.1
        frame = size.build_frame(ends, (min(losses) - pad, max(losses) + pad), log="x")
        body = frame.draw_axes("tokens (log scale)", "loss", format_tokens, format_tick)
        shapes = "".join(_draw_band(frame, lengths, band, k) for k, band in enumerate(bands))
        shapes += "".join(_draw_rung(frame, rung, sizes) for rung in rungs)
        shapes += "".join(_draw_prediction(frame, prediction, sizes) for prediction in predictions)
        heights = [float(np.clip(frame.y.at(float(b[1][-1])), frame.y.end, frame.y.start)) for b in bands]
        labels = [Label(y, words[k], f'class="c{1 + k % COLOURS}"') for k, y in enumerate(heights)]
        clip = f"law-{key}{'-narrow' if size.is_narrow else ''}"
        legend = [LegendEntry(f"N={format_count(n)}", (_find_colour(n, sizes),)) for n in sizes]
        top = format_legend(legend) if size.is_narrow or len(bands) < len(sizes) else ""
        return top + svg.draw_picture(
            frame,
            title,
            body + svg.clip_body(frame, clip, shapes) + ("" if size.is_narrow else svg.draw_labels(frame, labels)),
        )

    return build_chart(title, caption, draw)


def _find_colour(n: float, sizes: Sequence[float]) -> str:
    """Return the colour of the nearest size with a line."""
    return f"c{1 + int(np.abs(np.log(np.array(sizes) / n)).argmin()) % COLOURS}"


def _draw_band(frame: Frame, lengths: Numbers, band: tuple[Numbers, Numbers, Numbers], k: int) -> str:
    low, middle, high = band
    x = frame.x(lengths)
    outline = [*zip(x, frame.y(low), strict=True), *zip(x[::-1], frame.y(high)[::-1], strict=True)]
    path = "L".join(f"{a:.1f} {b:.1f}" for a, b in outline)
    colour = f"c{1 + k % COLOURS}"
    line = svg.draw_line(frame, lengths, middle, f'class="{colour}"', "the law's median")
    return f'<path class="band {colour}" d="M{path}z"/>{line}'


def _draw_rung(frame: Frame, rung: tuple[str, float, float, float, int], sizes: Sequence[float]) -> str:
    _, n, d, loss, count = rung
    words = f"N={format_count(n)}, D={format_count(d)}: {loss:.4f}{f', mean of {count} runs' if count > 1 else ''}"
    at = f'cx="{frame.x.at(d):.1f}" cy="{frame.y.at(loss):.1f}"'
    return f'<g class="{_find_colour(n, sizes)}"><title>{escape(words)}</title><circle class="dot" {at} r="4"/></g>'


def _draw_prediction(frame: Frame, prediction: LossPrediction, sizes: Sequence[float]) -> str:
    x, loss = frame.x.at(prediction.d), prediction.loss
    middle, low, high = (frame.y.at(value) for value in (loss.value, loss.low, loss.high))
    whisker = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10"
    words = f"N={format_count(prediction.n)}: predicted {loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]"
    shape = f'<path class="whisker" d="{whisker}"/><circle class="hollow" cx="{x:.1f}" cy="{middle:.1f}" r="4.5"/>'
    if prediction.observed is not None:
        words += f", measured {prediction.observed:.3f}"
        y = frame.y.at(prediction.observed)
        shape += f'<path class="true" d="M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12"/>'
    return f'<g class="{_find_colour(prediction.n, sizes)}"><title>{escape(words)}</title>{shape}</g>'


def draw_floor(floor: Floor, variants: Sequence[str], key: str) -> Chart:
    """Return the profile of E: how much worse the best law with each E is.

    Args:
        variants: those of the law.
        key: names the chart in the page.
    """
    names = ", ".join(filter(None, variants))
    title = f"Profile of the floor E{f': {names}' if names and len(variants) < 4 else ''}"
    caption = (
        "How much worse the law with each floor fits, in mean squares of its residuals; E below the dashed line is not "
        "rejected at 90%. "
    )
    caption += (
        "The floor is determined."
        if floor.is_determined
        else "These rungs do not determine the floor: no floor, or one up to the lowest loss, fits as well."
    )
    top = HIGHEST_RISE * floor.limit
    shown = floor.rise <= 1.5 * top

    def draw(size: ChartSize) -> str:
        frame = size.build_frame((0.0, floor.least_loss), (0.0, top))
        body = frame.draw_axes("floor E", "rise in cost", format_tick, format_tick)
        line = svg.draw_line(frame, floor.grid[shown], floor.rise[shown], 'class="c1"', "profile")
        limit = frame.y.at(floor.limit)
        line += draw_level(frame, floor.limit)
        clip = f"floor-{key}{'-narrow' if size.is_narrow else ''}"
        label = svg.draw_labels(frame, [Label(limit, "90% interval", 'class="c0"')]) if not size.is_narrow else ""
        return svg.draw_picture(frame, title, body + svg.clip_body(frame, clip, line) + label)

    return build_chart(title, caption, draw)
