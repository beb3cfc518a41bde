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
from titan.scaling.findings import CorpusFindings, Floor, LawFindings, LawOfVariants, Optimum, RungFindings
from titan.scaling.fit import ALPHA, LEVEL, REACH, Fit, QuantileInterval
from titan.scaling.law import Numbers
from titan.scaling.speedup import RungSpeedup, format_share
from titan.scaling.study import draw_band
from titan.sweep import predictions

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


def format_text(findings: LawFindings) -> str:
    """Return the text of a command."""
    lines = [*findings.notes]
    if len(findings.corpora) > 1:
        lines.append(f"{len(findings.corpora)} corpora, each with a separate law: their losses have other floors.")
    for corpus in findings.corpora:
        lines += ["", *_format_corpus(corpus)]
    return "".join(f"{sanitize_line(line)}\n" for line in lines)


def format_record() -> str:
    """Return what the user's record of predictions shows; empty without one."""
    record = predictions.read_record(LEVEL)
    return f"\n{record.describe()}\n" if record.scored else ""


def _format_corpus(corpus: CorpusFindings) -> Iterator[str]:
    """Yield the lines about a corpus."""
    if corpus.corpus:
        yield f"corpus {corpus.corpus}"
    held = f"; {format_plural(corpus.not_fitted, 'run')} not fitted" if corpus.not_fitted else ""
    yield f"{describe_table(corpus.table)}{held}"
    yield from (f"left out: {reason}" for reason in corpus.left_out)
    yield from _describe_sharing(corpus) if corpus.laws else _describe_factors(corpus)
    for law in corpus.laws:
        yield ""
        if not corpus.shares_law:
            yield _name_variant(law.variants[0])
        yield _describe_floor(law)
        yield from (f"  {line}" for line in _list_parameters(law))
        yield _describe_noise(law)
    yield from _format_predictions(corpus.predictions)
    yield from _format_speedups(corpus)
    yield from (_describe_optimum(name, optimum) for name, optimum in corpus.optima.items())


def _describe_factors(corpus: CorpusFindings) -> Iterator[str]:
    """Yield how variants compare by compute."""
    yield (
        "each variant has tokens in another single proportion to parameters, which determines no law of both; they are "
        f"compared by compute: FLOPs of {corpus.baseline} divided by those of the variant with the same loss."
    )
    for name, factors in corpus.factors.items():
        for k, factor in enumerate(factors):
            reach = "the lowest of all, beyond the rungs of one" if k else "the lowest that both reach"
            yield f"{name} against {corpus.baseline}, loss {factor.loss:.3f} ({reach}): {factor.describe()}"


def _name_variant(name: str) -> str:
    """Return how a variant is called; the only one has no name."""
    return name or "all runs"


def _describe_sharing(corpus: CorpusFindings) -> Iterator[str]:
    """Yield rungs far from a law, and whether variants share E and exponents, and by which test."""
    for n, d, variant, residual in (cell for law in corpus.laws for cell in law.unusual):
        where = f"N={format_count(n)}, D={format_count(d)}{f', {variant}' if variant else ''}"
        yield (
            f"unusual: {where} is {residual:+.1f} robust standard deviations from the law; it stays, with a weight "
            f"that falls with the distance (Huber)."
        )
    if (test := corpus.sharing) is not None:
        figure = f"F({test.numerator}, {test.denominator}) = {test.f:.2f}, p = {test.p:.2g}"
        if test.shares:
            yield f"variants share E, a and b: not rejected at {ALPHA:g} by the likelihood-ratio test ({figure})."
        else:
            yield f"each variant has a separate law: the likelihood-ratio test rejects shared E, a and b ({figure})."
    elif sum(len(law.variants) for law in corpus.laws) > 1:
        yield "variants share E, a and b: assumed, as some have too few rungs to test it."


def _describe_floor(law: LawOfVariants) -> str:
    """Return the floor with its interval, or that it is not determined."""
    floor = law.floor
    if floor.is_determined:
        return f"{law.form}: floor E {floor.plain:.3f} {format_interval(floor.low, floor.high, _format_loss)}"
    why = "the profile reaches 0"
    if not floor.reaches_zero:
        why = f"the profile has no upper end below the lowest loss, {floor.least_loss:.3f}"
    bound = f", below {floor.high:.3f}" if floor.high is not None else ""
    return (
        f"{law.form}: floor not determined by these rungs ({why}); the best fit has E {floor.plain:.3f}{bound}. "
        f"Predictions and speed-ups have this uncertainty in them."
    )


def _format_loss(value: float) -> str:
    return f"{value:.3f}"


def _format_estimate(figure: QuantileInterval) -> str:
    """Return a figure with its interval."""
    return f"{figure.value:.3f} {format_interval(figure.low, figure.high, _format_loss)}"


def _list_parameters(law: LawOfVariants) -> Iterator[str]:
    """Yield exponents, A and B with their intervals, one line each."""
    for name, exponent in (("a", law.size_exponent), ("b", law.data_exponent)):
        if exponent is not None:
            yield f"{name} {exponent.plain:.3f}; with the bend {_format_estimate(exponent.with_bend)}"
    for name, terms in law.terms.items():
        b = "" if terms.b is None else f", B {terms.b:.4g}"
        yield f"A {terms.a:.4g}{b}{f'  ({name})' if name else ''}"


def _describe_noise(law: LawOfVariants) -> str:
    """Return the noise of runs: of seeds, and lack of fit."""
    noise, bend = law.noise, law.bend
    words = f"noise of a run {100 * noise.run:.2f} % of its loss"
    if noise.seeds is None:
        words += " (no seeds were repeated: seeds and lack of fit can't be separated)"
    else:
        words += (
            f" (seeds {100 * noise.seeds:.2f} %, from {format_plural(noise.repeats, 'repeat')}; "
            f"cells {100 * (noise.cells or 0.0):.2f} %)"
        )
    if bend is None:
        return f"{words}; all rungs have tokens in one proportion to parameters, so that one term stands for both."
    verdict = "the plain law, 1, is within" if bend.low <= 1 <= bend.high else "the plain law, 1, is not"
    return f"{words}; bend {bend.value:.2f} [{bend.low:.2f}, {bend.high:.2f}]: {verdict}"


def _describe_prediction(rung: RungFindings) -> str:
    """Return a prediction in one sentence."""
    predicted, plain = _get_prediction(rung)
    name = f"{rung.variant}, " if rung.variant else ""
    words = f"{name}N={format_count(rung.n)}, D={format_count(rung.d)}: {_format_estimate(predicted)}"
    words += f" (plain law {plain:.3f})"
    if rung.loss is not None:
        verdict = "inside" if rung.is_inside else "OUTSIDE"
        miss = 100 * (rung.loss / plain - 1)
        words += f"; measured {rung.loss:.3f}, {verdict}; the plain law misses it by {miss:+.1f} %"
    beyond = f"; extrapolated beyond {REACH:g} times the largest rung, where intervals are not known to hold"
    return words + (beyond if rung.is_beyond else "")


def _format_predictions(predictions: Sequence[RungFindings]) -> Iterator[str]:
    if not predictions:
        return
    yield ""
    yield f"loss of a new run, with its {LEVEL:.0%} interval:"
    for prediction in predictions[:SHOWN]:
        yield f"  {_describe_prediction(prediction)}"
    if len(predictions) > SHOWN:
        yield f"  and {len(predictions) - SHOWN} more, on the page"
    scored = [p for p in predictions if p.loss is not None]
    if scored:
        inside = sum(bool(p.is_inside) for p in scored)
        yield f"{inside} of {format_plural(len(scored), 'held-out rung')} inside their {LEVEL:.0%} intervals"


def _format_speedups(corpus: CorpusFindings) -> Iterator[str]:
    """Yield the speed-up of each variant by the laws, then as measured at each rung."""
    baseline = _name_variant(corpus.baseline)
    for name, found in corpus.speedups.items():
        yield found.speedup.describe(_name_variant(name), baseline)
        if rungs := corpus.rung_speedups.get(name):
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
    """Return all findings in full precision; keys are the fields of `titan.scaling.findings`."""
    return format_data(FORMAT, findings)


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


def render_page(findings: LawFindings, footer: str) -> str:
    """Return the page of all corpora; `footer` is its last line. Needs jinja2."""
    sections = [section for k, corpus in enumerate(findings.corpora) for section in _build_sections(corpus, k)]
    lead, notes = " ".join(_summarise(findings.corpora)), Section("", [Bullets(findings.notes)])
    report = Report("Scaling law", lead, [notes, *sections])
    return format_page(sanitize_nested(report), sanitize_line(footer), (*NARROW_STYLES, "law.css"))


def _summarise(corpora: Sequence[CorpusFindings]) -> list[str]:
    """Return what is predicted and scored, which floors are not determined, and whether there are ladders."""
    laws, words = [law for corpus in corpora for law in corpus.laws], []
    if laws:
        scored = [rung for corpus in corpora for rung in corpus.predictions if rung.loss is not None]
        open_floors = sum(not law.floor.is_determined for law in laws)
        parts = [f"{sum(bool(p.is_inside) for p in scored)} of {len(scored)} held-out rungs inside 90% intervals"]
        missing = f"floor not determined in {open_floors} of {len(laws)} laws"
        parts = [*(parts if scored else []), missing if open_floors else "the rungs determine the floor"]
        sentence = "; ".join(parts)
        words.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return (
        words
        if all(corpus.laws for corpus in corpora)
        else [*words, "Variants are compared by compute, without a law."]
    )


def _build_sections(corpus: CorpusFindings, number: int) -> list[Section]:
    """Return what the page has of a corpus: sentences, predictions, speed-ups, charts, and the rungs to unfold."""
    sentences = _list_sentences(corpus)
    rungs = [_format_rung(rung, bool(corpus.laws)) for rung in corpus.rungs if rung.is_fitted]
    folded = Table(rungs, ["variant", "N", "D", "loss", "runs", "law"], summary=f"{len(rungs)} rungs")
    first = Section(corpus.corpus or "All runs", [Bullets(sentences[1:] if corpus.corpus else sentences)])
    if corpus.fit is None:
        return [first, Section("", [folded])]
    speedups = "Compute for the baseline's loss, as measured at each rung (below 1 is better)"
    charts = [
        draw_rungs(corpus.fit, name, [p for p in corpus.predictions if p.variant == name], f"{number}-{k}")
        for k, name in enumerate(corpus.fit.variants[:MOST_CHARTS])
    ]
    charts += [draw_floor(law.floor, law.variants, f"{number}-{k}") for k, law in enumerate(corpus.laws)]
    predictions = ["variant", "verdict", "N", "D", "predicted", "90% interval", "measured", "plain law"]
    shares = ["variant", "N", "D", "FLOPs", "tokens", "device-hours", "loss", "baseline's loss", "pairs of seeds"]
    rows = [_format_speedup(name, found) for name, found_rungs in corpus.rung_speedups.items() for found in found_rungs]
    return [
        first,
        Section(
            "Predictions", [Table(list(map(_format_prediction, corpus.predictions)), predictions, words=2)], level=3
        ),
        Section(speedups, [Table(rows, shares)], level=3),
        Section("", [Figures(charts), folded]),
    ]


def _list_sentences(corpus: CorpusFindings) -> list[str]:
    """Return the lines of the text without those that the page has as tables."""
    tabled = {_describe_prediction(rung) for rung in corpus.predictions}
    tabled |= {found.describe() for rungs in corpus.rung_speedups.values() for found in rungs}
    headings = "loss of a new run", RUNG_LINES, "and "  # those of tables, and the ends of long lists
    lines = [line.strip() for line in _format_corpus(corpus) if line.strip()]
    return [line for line in lines if line not in tabled and not line.startswith(headings)]


def _get_prediction(rung: RungFindings) -> tuple[QuantileInterval, float]:
    """Return what the wide and the plain law predict at a rung that was not fitted."""
    assert rung.predicted is not None and rung.plain is not None
    return rung.predicted, rung.plain


def _format_prediction(rung: RungFindings) -> list[str]:
    verdict = {True: "inside", False: "outside", None: "not measured"}[rung.is_inside]
    predicted, plain = _get_prediction(rung)
    return [
        _name_variant(rung.variant),
        f"{verdict}, extrapolated" if rung.is_beyond else verdict,
        format_count(rung.n),
        format_count(rung.d),
        _format_loss(predicted.value),
        format_interval(predicted.low, predicted.high, _format_loss),
        "" if rung.loss is None else _format_loss(rung.loss),
        _format_loss(plain),
    ]


def _format_speedup(name: str, found: RungSpeedup) -> list[str]:
    flops, tokens, hours = (
        format_share(share) if share else ""
        for share in (found.speedup.flops, found.speedup.tokens, found.speedup.hours)
    )
    place = [format_count(found.n), format_count(found.d)]
    shares = [flops or "not determined", tokens or "not determined", hours]
    return [_name_variant(name), *place, *shares, f"{found.loss:.4f}", f"{found.baseline_loss:.4f}", str(found.pairs)]


def _format_rung(rung: RungFindings, has_law: bool) -> list[str]:
    loss, plain = ("" if value is None else f"{value:.4f}" for value in (rung.loss, rung.plain))
    name = _name_variant(rung.variant) if has_law else rung.variant
    return [name, format_count(rung.n), format_count(rung.d), loss, str(rung.runs), plain]


# ---- charts ----


def draw_rungs(fit: Fit, variant: str, predictions: Sequence[RungFindings], key: str) -> Chart:
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

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        losses = [rung[3] for rung in rungs] + [p.loss for p in predictions if p.loss is not None]
        losses += [end for p in predictions if p.predicted for end in (p.predicted.low, p.predicted.high)]
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
        names = "" if size.is_narrow else svg.draw_labels(frame, labels)
        return top, frame, body + svg.clip_body(frame, clip, shapes) + names

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


def _draw_prediction(frame: Frame, rung: RungFindings, sizes: Sequence[float]) -> str:
    x, (loss, _) = frame.x.at(rung.d), _get_prediction(rung)
    middle, low, high = (frame.y.at(value) for value in (loss.value, loss.low, loss.high))
    whisker = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10"
    words = f"N={format_count(rung.n)}: predicted {loss.value:.3f} [{loss.low:.3f}, {loss.high:.3f}]"
    shape = f'<path class="whisker" d="{whisker}"/><circle class="hollow" cx="{x:.1f}" cy="{middle:.1f}" r="4.5"/>'
    if rung.loss is not None:
        words += f", measured {rung.loss:.3f}"
        y = frame.y.at(rung.loss)
        shape += f'<path class="true" d="M{x - 6:.1f} {y - 6:.1f}l12 12m0 -12l-12 12"/>'
    return f'<g class="{_find_colour(rung.n, sizes)}"><title>{escape(words)}</title>{shape}</g>'


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

    def draw(size: ChartSize) -> tuple[str, Frame, str]:
        frame = size.build_frame((0.0, floor.least_loss), (0.0, top))
        body = frame.draw_axes("floor E", "rise in cost", format_tick, format_tick)
        line = svg.draw_line(frame, floor.grid[shown], floor.rise[shown], 'class="c1"', "profile")
        limit = frame.y.at(floor.limit)
        line += draw_level(frame, floor.limit)
        clip = f"floor-{key}{'-narrow' if size.is_narrow else ''}"
        label = svg.draw_labels(frame, [Label(limit, "90% interval", 'class="c0"')]) if not size.is_narrow else ""
        return "", frame, body + svg.clip_body(frame, clip, line) + label

    return build_chart(title, caption, draw)
