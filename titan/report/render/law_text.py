"""What a table of runs shows, as text for a terminal, and the sentences that the page shows too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from titan.console.numbers import format_count, format_interval, format_plural
from titan.console.text import sanitize_line
from titan.report.law_runs import describe_table
from titan.scaling.fit import ALPHA, LEVEL, REACH, Fit, Law
from titan.scaling.ladders import ComputeFactor, LadderStudy
from titan.scaling.law import BEND, DATA, SHARED, SIZE, Numbers
from titan.scaling.study import Floor, LossPrediction, Optimum, Study
from titan.scaling.table import Table

SHOWN = 30
"""Predictions, and rungs of a variant, in a terminal."""
RUNG_LINES = "as measured at each rung, with the slope of the baseline's law, what"
"""How the line before the speed-ups at rungs begins."""


def format_studies(table: Table, studies: Sequence[Study | LadderStudy]) -> str:
    """Return the text of a command."""
    lines = [*table.notes]
    if len(studies) > 1:
        lines.append(f"{len(studies)} corpora, each with a separate law: their losses have other floors.")
    for study in studies:
        lines += ["", *(format_ladders(study) if isinstance(study, LadderStudy) else format_study(study))]
    return "".join(f"{sanitize_line(line)}\n" for line in lines)


def format_study(study: Study) -> list[str]:
    """Return the lines about a corpus."""
    lines = [*([f"corpus {study.corpus}"] if study.corpus else []), describe_rungs(study), *describe_left_out(study)]
    if sharing := describe_sharing(study.fit):
        lines.append(sharing)
    for names, floor in study.floors.items():
        law = study.fit.laws[names[0]]
        lines += ["", *([] if len(study.floors) == 1 else [name_variant(names[0])]), describe_floor(floor, law)]
        lines += [f"  {line}" for line in list_parameters(law)]
        lines += [describe_noise(law)]
    lines += _format_predictions(study.predictions)
    lines += _format_speedups(study)
    return [*lines, *(describe_optimum(name, optimum) for name, optimum in study.optima.items())]


def format_ladders(study: LadderStudy) -> list[str]:
    """Return the lines about a corpus whose variants are compared by compute."""
    lines = [*([f"corpus {study.corpus}"] if study.corpus else []), describe_table(study.table)]
    lines += [f"left out: {reason}" for reason in study.left_out]
    lines.append(
        "each variant has tokens in another single proportion to parameters, which determines no law of both; they are "
        f"compared by compute: FLOPs of {study.baseline} divided by those of the variant with the same loss."
    )
    for name, factors in study.factors.items():
        lines += [_describe_factor(name, study.baseline, factor, k) for k, factor in enumerate(factors)]
    return lines


def _describe_factor(name: str, baseline: str, factor: ComputeFactor, number: int) -> str:
    reach = "the lowest that both reach" if number == 0 else "the lowest of all, beyond the rungs of one"
    return f"{name} against {baseline}, loss {factor.loss:.3f} ({reach}): {factor.describe()}"


def name_variant(name: str) -> str:
    """Return how a variant is called; the only one has no name."""
    return name or "all runs"


def describe_rungs(study: Study) -> str:
    """Return which runs were fitted, and which were not."""
    held = f"; {format_plural(len(study.held), 'run')} not fitted" if len(study.held) else ""
    return f"{describe_table(study.fit.table)}{held}"


def describe_left_out(study: Study) -> list[str]:
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


def describe_sharing(fit: Fit) -> str:
    """Return whether variants share E and exponents, and by which test; empty with one variant."""
    if len(fit.variants) < 2:
        return ""
    if fit.sharing is None:
        return "variants share E, a and b: assumed, as some have too few rungs to test it."
    test = fit.sharing
    figure = f"F({test.numerator}, {test.denominator}) = {test.f:.2f}, p = {test.p:.2g}"
    if test.shares:
        return f"variants share E, a and b: not rejected at {ALPHA:g} by the likelihood-ratio test ({figure})."
    return f"each variant has a separate law: the likelihood-ratio test rejects shared E, a and b ({figure})."


def describe_floor(floor: Floor, law: Law) -> str:
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


def list_parameters(law: Law) -> list[str]:
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


def describe_noise(law: Law) -> str:
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


def describe_prediction(prediction: LossPrediction) -> str:
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
        yield f"  {describe_prediction(prediction)}"
    if len(predictions) > SHOWN:
        yield f"  and {len(predictions) - SHOWN} more, on the page"
    scored = [p for p in predictions if p.observed is not None]
    if scored:
        inside = sum(bool(p.is_inside) for p in scored)
        yield f"{inside} of {format_plural(len(scored), 'held-out rung')} inside their {LEVEL:.0%} intervals"


def _format_speedups(study: Study) -> Iterator[str]:
    """Yield the speed-up of each variant by the laws, then as measured at each rung."""
    baseline = name_variant(study.fit.variants[0])
    for name, speedup in study.speedups.items():
        yield speedup.describe(name_variant(name), baseline)
        if rungs := study.rung_speedups.get(name):
            yield f"{RUNG_LINES} {name_variant(name)} needs for {baseline}'s loss:"
            yield from (f"  {rung.describe()}" for rung in rungs[:SHOWN])
        if len(rungs or ()) > SHOWN:
            yield f"  and {len(rungs or ()) - SHOWN} more, on the page"


def describe_optimum(name: str, optimum: Optimum) -> str:
    """Return the best size and length for a compute, or that they are not determined."""
    prefix = f"{name}: " if name else ""
    where = f"{prefix}least loss of {optimum.compute:.2g} FLOPs (6 N D)"
    if optimum.n is None or optimum.d is None:
        return f"{where}: N and D not determined by these rungs."
    n, d = ((i, format_interval(i.low, i.high, format_count)) for i in (optimum.n, optimum.d))
    return f"{where}: N {format_count(n[0].value)} {n[1]}, D {format_count(d[0].value)} {d[1]}"
