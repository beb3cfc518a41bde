"""The charts of a comparison, each a `Chart` with its SVG; without curves or figures for one there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from titan.metrics.plot import SHARE, short
from titan.report import svg
from titan.report.figures import answer, few, memory, step_ms
from titan.report.findings import Arm, Comparison, Numbers, RunFound
from titan.report.svg import Frame, Label, Scale

COLOURS = 6
"""Arms in a colour of their own beside the baseline: as many as the colour-blind tell apart."""
POINTS = 400
"""The most points that a curve is drawn with."""
POINTS_IN_ALL = 40_000
"""Of one chart: with very many runs each curve gets fewer."""
WIDTH, HEIGHT = 880.0, 400.0
FLOOR = 1e-9
"""The smallest difference of losses that is drawn: below it float64 metrics have no digits left."""

Points = tuple[Numbers, Numbers]


@dataclass(frozen=True)
class Chart:
    """A picture with its heading and what has to be known to read it; `html` is safe to be put into a page."""

    title: str
    caption: str
    html: str
    wide: bool = True


def coloured(comparison: Comparison) -> list[int]:
    """Indices of the arms that have a colour: the baseline, then the best by loss, or by speed in one science."""
    others = [i for i, arm in enumerate(comparison.arms) if not arm.baseline]
    by_loss = any(arm.quality for arm in comparison.arms)
    others.sort(key=lambda i: _rank(comparison.arms[i], by_loss)) if len(others) > COLOURS else None
    return [i for i, arm in enumerate(comparison.arms) if arm.baseline][:1] + others[:COLOURS]


def _rank(arm: Arm, by_loss: bool) -> float:
    if by_loss:
        return np.inf if arm.validation is None else arm.validation.estimate
    return np.inf if arm.speed is None else -arm.speed.estimate


def marks(comparison: Comparison, index: int) -> str:
    """Attributes that give an element the arm's colour and let it be found when another one is pointed at."""
    chosen = coloured(comparison)
    colour = f"c{chosen.index(index)}" if index in chosen else "rest"
    return f'class="{colour}" data-arm="{index}"'


def charts(comparison: Comparison) -> list[Chart]:
    """All charts that there is something to draw for."""
    made = (
        training(comparison),
        validation(comparison),
        differences(comparison),
        throughput(comparison),
        memory_bars(comparison),
        pareto(comparison),
    )
    return [chart for chart in made if chart is not None]


def training(comparison: Comparison) -> Chart | None:
    """Training loss over tokens, smoothed."""
    curves = {
        (i, run.label): thinned(run.curves.tokens, run.curves.losses, _points(comparison))
        for i, run in _runs(comparison)
    }
    caption = f"Mean over {SHARE:.0%} of the run around each point. "
    return _losses(comparison, curves, "Training loss", "loss, nats a token", caption, "training")


def validation(comparison: Comparison) -> Chart | None:
    """Validation loss over tokens; in bits a byte where the comparison is made in those."""
    bits = any(quality.measure == "bits a byte" for arm in comparison.arms for quality in arm.quality)
    curves = {
        (i, run.label): thinned(
            run.curves.validation_tokens,
            run.curves.bits_per_byte if bits else run.curves.validation,
            _points(comparison),
            share=0,
        )
        for i, run in _runs(comparison)
    }
    name, unit = ("Validation, bits a byte", "bits a byte") if bits else ("Validation loss", "loss, nats a token")
    return _losses(comparison, curves, name, unit, "On the fixed rows that no run trains on. ", "validation")


def differences(comparison: Comparison) -> Chart | None:
    """Size of the difference in training loss to the baseline's run of the same seed, for arms of its science."""
    base = next((arm for arm in comparison.arms if arm.baseline), None)
    arms = [(i, arm) for i, arm in enumerate(comparison.arms) if arm.same_science and not arm.baseline]
    if base is None or not arms:
        return None
    points = min(200, _points(comparison))
    curves = {
        (i, run.label): gap(run, twin, points)
        for i, arm in arms
        for run in arm.runs
        for twin in base.runs
        if twin.seed == run.seed
    }
    noise = [gap(one, other, points) for one, other in pairwise(base.runs) if one.seed != other.seed]
    return _differences(comparison, curves, noise)


def gap(run: RunFound, base: RunFound, points: int) -> Points:
    """Tokens and the median size of the difference of losses, in windows of steps that both did; [points] each."""
    steps, mine, theirs = np.intersect1d(run.curves.steps, base.curves.steps, return_indices=True)
    sizes = np.abs(run.curves.losses[mine] - base.curves.losses[theirs])
    kept = np.isfinite(sizes)
    tokens, sizes = run.curves.tokens[mine][kept], sizes[kept]
    windows = [w for w in np.array_split(np.arange(sizes.size), min(points, max(1, sizes.size))) if w.size]
    return (
        np.array([tokens[window].mean() for window in windows]),
        np.array([np.median(sizes[window]) for window in windows]),
    )


def thinned(x: Numbers, y: Numbers, points: int = POINTS, share: float = SHARE) -> Points:
    """At most `points` of a curve, each the mean over `share` of it, centred; what is not finite is left out.

    Args:
        x, y: [steps] each.
        points: the most to be kept; the first and the last always are.
        share: of the curve that a mean is taken over; towards the ends over less, so that it stays centred.
    """
    kept = np.isfinite(y) & np.isfinite(x)
    x, y = x[kept], y[kept]
    at = np.unique(np.linspace(0, max(0, y.size - 1), min(points, y.size)).round().astype(int)) if y.size else []
    index = np.asarray(at, dtype=int)
    half = np.minimum(round(share * y.size) // 2, np.minimum(index, y.size - 1 - index))
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return x[index], (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)


def throughput(comparison: Comparison) -> Chart | None:
    """Bars of tokens a second a device, with whiskers from p10 to p90 of the steps."""
    bars = []
    for i, arm in enumerate(comparison.arms):
        times = step_ms(arm)
        if arm.speed is not None and times is not None:
            value, (middle, fast, slow) = arm.speed.estimate, times
            ratio = "" if arm.speed_ratio is None or arm.baseline else f"{arm.speed_ratio.estimate:.2f} of baseline"
            whisker = (value * middle / slow, value * middle / fast)
            bars.append(Bar(i, value, few(value), ratio, whisker))
    caption = "Tokens a second a device at the median step; the line spans the middle 80% of the steps."
    return _bars(comparison, bars, "Throughput", caption)


def memory_bars(comparison: Comparison) -> Chart | None:
    """Bars of the most memory that rank 0 held."""
    most = [(i, memory(arm)) for i, arm in enumerate(comparison.arms)]
    bars = [Bar(i, value, f"{value:.2f} GiB") for i, value in most if value is not None]
    return _bars(comparison, bars, "Memory", "The most that rank 0 held in any run of the arm, in GiB.", rising=True)


def pareto(comparison: Comparison) -> Chart | None:
    """Speed against memory, with the front of arms that no other one beats in both."""
    spots = [
        Spot(i, arm.speed.estimate, most, answer(arm).main == "not the same")
        for i, arm in enumerate(comparison.arms)
        if arm.speed is not None and (most := memory(arm)) is not None
    ]
    if len(spots) < 2:
        return None
    frame = Frame(
        _wider([spot.x for spot in spots], 78, WIDTH - 30), _wider([spot.y for spot in spots], 340, 40), WIDTH, HEIGHT
    )
    best = front(spots)
    axes = frame.axes("tokens a second a device: further right is faster", "memory, GiB: lower is less", few, few)
    body = axes + _front(frame, best) + "".join(_spot(comparison, frame, spot) for spot in _beneath(comparison, spots))
    named = [*best, *(spot for spot in spots if len(spots) <= 12 or spot.index in coloured(comparison))]
    body += _names(comparison, frame, spots, list(dict.fromkeys(named)))
    outside = " Hollow: does not learn the same, so it is not on the front." if any(s.out for s in spots) else ""
    caption = f"The line joins the arms that no other beats in both speed and memory.{outside}"
    return Chart("Speed and memory", caption, svg.picture(frame, "Speed and memory", body))


@dataclass(frozen=True)
class Spot:
    """An arm in the picture of speed and memory; `out` keeps it off the front."""

    index: int
    x: float
    y: float
    out: bool = False


def front(spots: Iterable[Spot]) -> list[Spot]:
    """Those that none beats: from the fastest down, each that takes less memory than all faster ones."""
    best: list[Spot] = []
    for spot in sorted((spot for spot in spots if not spot.out), key=lambda spot: (-spot.x, spot.y)):
        if not best or spot.y < best[-1].y:
            best.append(spot)
    return best


@dataclass(frozen=True)
class Bar:
    """One bar: of which arm, how long, and what is written beside it."""

    index: int
    value: float
    words: str
    more: str = ""
    whisker: tuple[float, float] | None = None


def _runs(comparison: Comparison) -> list[tuple[int, RunFound]]:
    return [(i, run) for i, arm in enumerate(comparison.arms) for run in arm.runs]


def _points(comparison: Comparison) -> int:
    return max(50, min(POINTS, POINTS_IN_ALL // max(1, len(_runs(comparison)))))


def _losses(
    comparison: Comparison, curves: dict[tuple[int, str], Points], title: str, unit: str, caption: str, name: str
) -> Chart | None:
    curves = {key: points for key, points in curves.items() if points[0].size}
    if not curves:
        return None
    low, high, cut = loss_range(list(curves.values()))
    end = max(float(x[-1]) for x, _ in curves.values())
    frame = Frame(Scale(0, end or 1.0, 60, WIDTH - 210), Scale(low, high, 340, 40), WIDTH, HEIGHT)
    axes = frame.axes("tokens", unit, short, few)
    drawn = _drawn(comparison, frame, curves, name)
    told = caption + _told(comparison) + ("Higher losses at the beginning are cut off. " if cut else "")
    return Chart(title, told, svg.picture(frame, title, axes + drawn))


def _drawn(comparison: Comparison, frame: Frame, curves: dict[tuple[int, str], Points], name: str) -> str:
    """The lines, grey ones below, and the labels at their ends."""
    lines = {key: svg.line(frame, *curves[key], marks(comparison, key[0]), key[1]) for key in curves}
    above = coloured(comparison)[::-1]
    order = sorted(lines, key=lambda key: above.index(key[0]) if key[0] in above else -1)
    ends: dict[int, list[float]] = {}
    for (i, _), (_, ys) in curves.items():
        ends.setdefault(i, []).append(frame.y.at(float(np.clip(ys[-1], *sorted((frame.y.low, frame.y.high))))))
    wanted = [
        Label(float(np.mean(ends[i])), comparison.arms[i].label, marks(comparison, i)) for i in above if i in ends
    ]
    body = "".join(lines[key] for key in order)
    return svg.clip(frame, name, f'<g class="lines{_thin(comparison)}">{body}</g>') + svg.labels(frame, wanted)


def _thin(comparison: Comparison) -> str:
    """Several seeds of an arm share its colour and are thin."""
    return " thin" if len(_runs(comparison)) > len(comparison.arms) else ""


def _told(comparison: Comparison) -> str:
    rest = len(comparison.arms) - len(coloured(comparison))
    by = "lowest loss" if any(arm.quality for arm in comparison.arms) else "most speed"
    seeds = "Seeds of an arm share its colour. " if _thin(comparison) else ""
    return seeds + (f"The baseline and the {COLOURS} arms of {by} are coloured, {rest} are grey. " if rest > 0 else "")


def loss_range(curves: Sequence[Points]) -> tuple[float, float, bool]:
    """Lowest and highest loss to be shown, and whether the beginning's are cut off.

    The fall of the first tenth would take up all the room; what there is to tell apart comes after it.
    """
    end = max(float(x[-1]) for x, _ in curves)
    later = [y[x >= 0.1 * end] if (x >= 0.1 * end).any() else y for x, y in curves]
    low = min(float(y.min()) for y in later)
    usual = max(float(np.quantile(y, 0.995)) for y in later)
    pad = 0.06 * (usual - low) or max(0.01 * abs(low), 1e-3)
    highest = max(float(y.max()) for _, y in curves)
    return low - pad, min(usual, highest) + pad, highest > usual + pad


def _differences(comparison: Comparison, curves: dict[tuple[int, str], Points], noise: list[Points]) -> Chart | None:
    drawn = {key: _positive(points) for key, points in curves.items()}
    drawn = {key: points for key, points in drawn.items() if points[0].size}
    told = [
        "Size of the difference in training loss to the baseline's run of the same seed: the median of a window of "
        "steps, each with the same batch; rounding grows from step to step."
    ]
    equal = sorted({comparison.arms[i].label for (i, _), (x, y) in curves.items() if x.size and not y.any()})
    told += [f"Equal at every step, so not drawn: {' | '.join(equal)}."] if equal else []
    if not drawn:
        return Chart("Difference to the baseline", " ".join(told), "") if equal else None
    grey = [points for points in map(_positive, noise) if points[0].size]
    told += ["Dashed: one seed of the baseline against the next; with the dotted margin, a measure."] if grey else []
    frame = _difference_frame([*drawn.values(), *grey], comparison.margin)
    axes = frame.axes("tokens", "difference, nats", short, lambda value: f"{value:.0e}".replace("e-0", "e-"))
    lines = "".join(svg.line(frame, *points, 'class="noise"', "seeds of the baseline") for points in grey)
    body = axes + _margin(frame, comparison.margin) + svg.clip(frame, "noise", lines)
    body += _drawn(comparison, frame, drawn, "differences")
    return Chart("Difference to the baseline", " ".join(told), svg.picture(frame, "Difference to the baseline", body))


def _positive(points: Points) -> Points:
    """Without windows in which there is no difference: a logarithm has no zero."""
    kept = points[1] > FLOOR
    return points[0][kept], points[1][kept]


def _difference_frame(curves: Sequence[Points], margin: float) -> Frame:
    low = min(float(y.min()) for _, y in curves)
    high = max(margin, *(float(y.max()) for _, y in curves))
    y = Scale(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(1.2 * high)), 340, 40, log=True)
    end = max(float(x[-1]) for x, _ in curves)
    return Frame(Scale(0, end or 1.0, 60, WIDTH - 210), y, WIDTH, HEIGHT)


def _margin(frame: Frame, margin: float) -> str:
    if not frame.y.low <= margin <= frame.y.high:
        return ""
    at = frame.y.at(margin)
    rule = f'<path class="margin" d="M{frame.x.start:.1f} {at:.1f}H{frame.x.end:.1f}"/>'
    return rule + svg.text(frame.x.start + 6, at - 5, f"margin {margin:g}", kind="faint")


def _bars(comparison: Comparison, bars: list[Bar], title: str, caption: str, rising: bool = False) -> Chart | None:
    """A table of bars, the best first: labels wrap, and many arms scroll."""
    if not bars:
        return None
    bars.sort(key=lambda bar: bar.value if rising else -bar.value)
    most = max(max(bar.value, bar.whisker[1] if bar.whisker else 0.0) for bar in bars) or 1.0
    rows = "".join(_bar(comparison, bar, most) for bar in bars)
    return Chart(title, caption, f'<div class="bars"><table>{rows}</table></div>', wide=False)


def _bar(comparison: Comparison, bar: Bar, most: float) -> str:
    label = escape(comparison.arms[bar.index].label)
    more = f" <small>{escape(bar.more)}</small>" if bar.more else ""
    shape = f'<rect x="0" y="2" width="{100 * bar.value / most:.2f}" height="12"/>'
    if bar.whisker:
        low, high = (100 * end / most for end in bar.whisker)
        shape += f'<path d="M{low:.2f} 8H{high:.2f}M{low:.2f} 5v6M{high:.2f} 5v6"/>'
    drawn = f'<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">{shape}</svg>'
    head = f'<th scope="row">{label}</th>'
    return f"<tr {marks(comparison, bar.index)}>{head}<td>{drawn}</td><td>{escape(bar.words)}{more}</td></tr>"


def _wider(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale with some room around the values."""
    low, high = min(values), max(values)
    pad = 0.1 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(max(0.0, low - pad), high + pad, start, end)


def _front(frame: Frame, best: Sequence[Spot]) -> str:
    if len(best) < 2:
        return ""
    xs, ys = frame.x([spot.x for spot in best]), frame.y([spot.y for spot in best])
    steps = "".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(xs[1:], ys[1:], strict=True))
    return f'<path class="front" d="M{xs[0]:.1f} {ys[0]:.1f}{steps}"/>'


def _beneath(comparison: Comparison, spots: Sequence[Spot]) -> list[Spot]:
    """Grey ones first, so that they lie beneath."""
    chosen = coloured(comparison)
    return sorted(spots, key=lambda spot: spot.index in chosen)


def _spot(comparison: Comparison, frame: Frame, spot: Spot) -> str:
    arm = comparison.arms[spot.index]
    title = escape(f"{arm.label}: {few(spot.x)} tokens/s, {spot.y:.2f} GiB")
    place = f'cx="{frame.x.at(spot.x):.1f}" cy="{frame.y.at(spot.y):.1f}" r="6"'
    hollow = "hollow" if spot.out else "dot"
    return f"<g {marks(comparison, spot.index)}><circle class=\"{hollow}\" {place}><title>{title}</title></circle></g>"


Box = tuple[float, float, float, float]


def _names(comparison: Comparison, frame: Frame, spots: Sequence[Spot], named: Sequence[Spot]) -> str:
    """Labels beside the spots, where there is room for them; the others show theirs when pointed at."""
    taken: list[Box] = [_around(frame, spot) for spot in spots]
    out = []
    for spot in named:
        words = comparison.arms[spot.index].label
        words = words if len(words) <= 34 else words[:33] + "\u2026"
        for anchor, box in _places(frame, spot, len(words)):
            if _inside(frame, box) and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                x = {"start": box[0], "end": box[2], "middle": (box[0] + box[2]) / 2}[anchor]
                label = svg.text(x, box[3] - 4, words, anchor, "label")
                out.append(f"<g {marks(comparison, spot.index)}>{label}</g>")
                break
    return "".join(out)


def _around(frame: Frame, spot: Spot) -> Box:
    x, y = frame.x.at(spot.x), frame.y.at(spot.y)
    return x - 7, y - 7, x + 7, y + 7


def _places(frame: Frame, spot: Spot, letters: int) -> list[tuple[str, Box]]:
    """Where its label may stand: to the right, to the left, above, below."""
    x, y, wide = frame.x.at(spot.x), frame.y.at(spot.y), svg.LETTER * letters
    return [
        ("start", (x + 10, y - 8, x + 10 + wide, y + 8)),
        ("end", (x - 10 - wide, y - 8, x - 10, y + 8)),
        ("middle", (x - wide / 2, y - 25, x + wide / 2, y - 9)),
        ("middle", (x - wide / 2, y + 9, x + wide / 2, y + 25)),
    ]


def _inside(frame: Frame, box: Box) -> bool:
    return box[0] >= frame.x.start and box[2] <= frame.width and box[1] >= 0 and box[3] <= frame.y.start


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
