"""A campaign as a page. Needs jinja2 (the extra `compare`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan.console.numbers import format_plural
from titan.console.text import sanitize_line
from titan.evidence import answers
from titan.evidence.campaign import Campaign, Changes, Idea, SeedPair, find_size
from titan.report.render.charts import Bar, draw_bar_chart
from titan.report.render.document import Bullets, Chart, Figures, Report, Section, Table, Words, format_page

GROUPS = (
    ("confirming", "Being confirmed", "They passed the screen; seeds that nothing has used decide."),
    ("screening", "Being screened", "Nothing is decided about these."),
    ("rejected", "Rejected",
     "Not shown to be better with the pairs that were allowed, which does not show that they are useless."),
    ("older baseline", "Not decided, of an older baseline",
     "Their baseline is no longer the baseline; try them again."),
    ("withdrawn", "Withdrawn",
     "Taken back before they were judged. Their pairs stay, and so does the budget of confirmations that had begun."),
)  # fmt: skip
"""States of ideas that were not kept, with a heading and a note."""
UNKNOWN = "not known"
KEPT_HEAD = ("baseline", "change", "hypothesis", "better by", "95% interval", "effective speed-up", "e-value", "needed",
             "pairs (screen + confirmation)")  # fmt: skip
OTHER_HEAD = ("change", "hypothesis", "of baseline", "better by", "95% interval", "e-value of the screen",
              "of the confirmation", "needed", "pairs (screen + confirmation)")  # fmt: skip


def render_page(campaign: Campaign, name: str, made: str) -> str:
    """Return the whole page.

    Args:
        made: date and command, for the last line.
    """
    kept = [campaign.ideas[id] for id in campaign.kept]
    chart = _draw_sizes(campaign, kept)
    groups = []
    for state, heading, note in GROUPS:
        rows = [_tabulate(campaign, idea) for idea in campaign.ideas.values() if idea.state == state]
        groups += [Section(heading, [Words(note, "faint"), Table(rows, OTHER_HEAD, words=2)])] if rows else []
    sections = [
        Section("", [Bullets([*_list_sentences(campaign)])]),
        Section("Accepted changes", [Table([_tabulate(campaign, idea) for idea in kept], KEPT_HEAD, words=3)]),
        Section("Sizes", [Figures([chart] if chart else [])]),
        *groups,
        Section("First baseline", [Words(_format_changes(campaign.rules.baseline), "code")]),
    ]
    report = Report(sanitize_line(f"Campaign {name}"), _format_lead(campaign), sections)
    return format_page(report, sanitize_line(made))


def _format_lead(campaign: Campaign) -> str:
    """Return the first sentence: how many ideas were kept, and what they are worth together."""
    counts = f"{len(campaign.kept)} of {format_plural(len(campaign.ideas), 'idea')} became the baseline"
    if not campaign.kept:
        return f"{counts}."
    pairs = campaign.chain.get(len(campaign.kept), [])
    if not pairs:
        return f"{counts}. What they are worth together was not measured; the verb chain does it, on fresh seeds."
    size = answers.format_size(pairs)
    seeds = format_plural(len(pairs), "fresh seed")
    speed_up = answers.describe_chain(campaign)["speed_up"]
    worth = "" if speed_up is None else f"; an effective speed-up of {speed_up:.3g}"
    return f"{counts}. On {seeds} baseline {len(campaign.kept)} is, against the first, {size}{worth}."


def _list_sentences(campaign: Campaign) -> Iterator[str]:
    """Yield the rules in words: metric, budget, noise floor, speed-up, damage."""
    rules, noise = campaign.rules, answers.describe_noise(campaign)
    floor = "not measured; the verb noise does it."
    if noise["pairs"]:
        ends = noise["interval"]
        interval = "too few for an interval" if ends is None else f"95% interval {ends[0]:.3g} to {ends[1]:.3g}"
        floor = (
            f"one seed has a standard deviation of {noise['seed_deviation']:.3g} ({interval}), from "
            f"{format_plural(noise['pairs'], 'pair')} of the baseline against itself."
        )
    yield f"Metric: {sanitize_line(rules.metric)}, lower is better; an idea must be better by over {rules.margin:g}."
    yield f"The chance that any useless idea is ever kept is at most {rules.budget:.3g}, however often anybody looks."
    yield f"Noise floor: {floor}"
    if rules.slope is None:
        yield "Effective speed-ups are not known: the campaign was opened without slope=."
    else:
        yield f"Effective speed-up: exp(better by / {rules.slope:g}), a factor of compute; the slope was given."
    if campaign.damaged_lines:
        yield f"{format_plural(campaign.damaged_lines, 'line')} of the book is damaged or torn and left out."


def _tabulate(campaign: Campaign, idea: Idea) -> list[str]:
    """Return the row of an idea under `KEPT_HEAD` or `OTHER_HEAD`."""
    answer, screen, confirm = answers.describe_idea(campaign, idea), idea.stages["screen"], idea.stages["confirm"]
    what = [_format_changes(idea.changes), sanitize_line(idea.hypothesis or "")]
    size, confirmed = _format_size(confirm or screen), f"{answer['confirm']['highest']:.3g}"
    end = [f"{answer['needed']:g}", f"{len(screen)} + {len(confirm)}"]
    if idea.state == "kept":
        speed_up = UNKNOWN if answer["speed_up"] is None else f"{answer['speed_up']:.3g}"
        return [f"{idea.kept_as}", *what, *size, speed_up, confirmed, *end]
    screened = f"{answer['screen']['highest']:.3g}"
    return [*what, f"{idea.baseline}", *size, screened, confirmed if confirm else "", *end]


def _format_changes(changes: Changes) -> str:
    """Return changes as one line."""
    return sanitize_line(changes if isinstance(changes, str) else " ".join(changes))


def _format_size(pairs: Sequence[SeedPair]) -> tuple[str, str]:
    mean, interval = find_size(tuple(pairs))
    diverged = sum(pair.loss is None for pair in pairs)
    note = f", {diverged} diverged" if diverged else ""
    return (
        f"{UNKNOWN if mean is None else f'{mean:.4g}'}{note}",
        "too few pairs" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}",
    )


def _draw_sizes(campaign: Campaign, kept: Sequence[Idea]) -> Chart | None:
    """Return bars of the sizes of the kept changes, and of all together; None where nothing was kept."""
    rows = [(f"{idea.kept_as}: {_format_changes(idea.changes)}", idea.stages["confirm"]) for idea in kept]
    if chain := campaign.chain.get(len(campaign.kept), []):
        rows.append(("all together", chain))
    bars = []
    for label, pairs in rows:
        mean, interval = find_size(tuple(pairs))
        if mean is not None and mean >= 0:  # the text states one that is below 0, or without finite losses
            whisker = None if interval is None else (max(interval[0], 0.0), interval[1])
            bars.append(Bar(label, 'class="c1"', mean, f"{mean:.4g}", whisker=whisker))
    caption = (
        "Mean difference of paired runs on seeds that the idea had not used, with its 95% interval where there is one. "
        "A confirmation ends when the evidence suffices, so its mean is a little large; that of all together is not."
    )
    return draw_bar_chart(bars, "Size of accepted changes", caption) if kept else None
