"""The state of a campaign: what follows from the events of its book, and from nothing else.

Events, by kind:

    opened     the first baseline and the rules; the first such event counts
    idea       changes to the baseline with the number `baseline`; `idea` is the hypothesis' id
    extended   an idea may use more pairs
    withdrawn  an idea was submitted by mistake; it is not kept, and its pairs and its confirmation's number stay
    resumed    a withdrawn idea goes on where it was
    seeds      seeds taken for a stage of an idea, before they are trained, so that no other process takes them
    pair       the losses of the baseline and the idea on one seed; a loss of null: that run diverged

The stages of an idea are "screen" and "confirm". The pairs of the baseline against itself are those of the idea `NOISE`
and the pairs of the first baseline with the present one those of the idea `CHAIN`. Whether an idea is kept is never
recorded: it follows from its pairs in the order of the file, so two processes that write at once can't disagree. The
confirmation of an idea gets its number with its first pair.

The error budget is how much evidence an idea needs, so that hardly any useless one is ever kept. An idea is screened
first, then confirmed on seeds that nothing in the campaign has used. The j-th confirmation is passed at an e-value of j
(j + 1) / a, where a is the budget. Whatever was known and chosen before it, a useless idea passes it with a probability
of at most a / (j (j + 1)) (`titan.evidence.paired`), and these add up to a over any number of confirmations, since 1 /
(j (j + 1)) = 1 / j - 1 / (j + 1). So ideas may be chosen in the light of all results, and the screen needs no
correction: it decides only which ideas get a confirmation, and a useless one gets one with a probability of at most 1 /
`SCREEN`. Spending an error probability over a sequence of tests: Foster and Stine 2008,
https://doi.org/10.1111/j.1467-9868.2007.00643.x.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

from titan.evidence.paired import compute_log_e_values, find_interval

Changes = str | tuple[str, ...]
"""Overrides of titan.train, or a text of a program that trains by itself."""
NOISE, CHAIN = "noise", "chain"
State = Literal["screening", "confirming", "kept", "rejected", "older baseline", "withdrawn"]
SCREEN = 10.0
"""The e-value at which an idea has passed the screen."""
CONFIRM_FACTOR = 2
"""A confirmation may use so many times the pairs of a screen."""


def find_threshold(budget: float, number: int) -> float:
    """Return the e-value at which a confirmation is passed.

    Args:
        budget: the chance that any useless idea is ever kept.
        number: of the confirmation in the campaign, from 1.
    """
    return number * (number + 1) / budget


def is_futile(log_e_value: float, remaining_pairs: int, threshold: float) -> bool:
    """Return whether no further pairs can reach a threshold: a pair at most doubles an e-value."""
    return log_e_value + remaining_pairs * math.log(2) < math.log(threshold) - 1e-9


@dataclass(frozen=True)
class Rules:
    """The rules of a campaign, fixed when it is opened.

    Attributes:
        baseline: overrides of titan.train, or the name of a recipe that another program trains.
        baseline_id: identifies what it learns.
        metric: number of result.json that is compared; lower is better.
        budget: the chance that any useless idea is ever kept.
        margin: an idea is useless unless it is better by more; in units of the metric.
        pairs: the most pairs of a screen.
        slope: by how much the metric falls where the compute is multiplied by e; None: not known.
    """

    baseline: Changes
    baseline_id: str
    metric: str = "validation_loss"
    budget: float = 0.05
    margin: float = 0.0
    pairs: int = 12
    slope: float | None = None


@dataclass(frozen=True)
class SeedPair:
    """Two runs on one seed, and the noise that was known before them.

    Attributes:
        seed: of both.
        baseline_loss: nats; None where the run diverged.
        loss: likewise, of the idea.
        noise_squares: see `titan.evidence.paired.compute_log_e_values`.
        noise_pairs: likewise.
    """

    seed: int
    baseline_loss: float | None
    loss: float | None
    noise_squares: float = 0.0
    noise_pairs: int = 0

    @property
    def difference(self) -> float:
        """Loss of the baseline minus that of the idea; infinite where one of them diverged, 0 where both did."""
        if self.baseline_loss is not None and self.loss is not None:
            return self.baseline_loss - self.loss
        return 0.0 if self.baseline_loss is self.loss else math.inf if self.loss is not None else -math.inf


@dataclass
class Idea:
    """An idea, and its evidence.

    Attributes:
        id: of the hypothesis: this change of this baseline.
        changes: see `Changes`.
        hypothesis: why it should help, in the user's words.
        baseline: number of the baseline that it changes, 0 for the first.
        result_id: identifies what the changed recipe learns.
        pairs: the most pairs of its screen.
        stages: its pairs by stage, in the order of the file.
        taken: the seeds taken by stage.
        confirmation: the number of its confirmation; None before it.
        state: see `State`.
        kept_as: the number of the baseline that it became.
        is_withdrawn: whether it was withdrawn and not resumed.
        reason: why it was withdrawn, in the user's words.
    """

    id: str
    changes: Changes
    hypothesis: str | None
    baseline: int
    result_id: str
    pairs: int
    stages: dict[str, list[SeedPair]] = field(default_factory=lambda: {"screen": [], "confirm": []})
    taken: dict[str, list[int]] = field(default_factory=lambda: {"screen": [], "confirm": []})
    confirmation: int | None = None
    state: State = "screening"
    kept_as: int | None = None
    is_withdrawn: bool = False
    reason: str | None = None

    @property
    def stage(self) -> str:
        """The stage that its next pair belongs to, or its last one did."""
        return "confirm" if self.state == "confirming" or self.confirmation is not None else "screen"

    @property
    def most_pairs(self) -> int:
        """The most pairs of the present stage."""
        return self.pairs * (CONFIRM_FACTOR if self.stage == "confirm" else 1)

    @property
    def untrained(self) -> list[int]:
        """The seeds taken for its stage that have no result."""
        done = {pair.seed for pair in self.stages[self.stage]}
        return [seed for seed in self.taken[self.stage] if seed not in done]


@dataclass
class Campaign:
    """The state of a campaign.

    Attributes:
        rules: see `Rules`.
        ideas: by id, in the order in which they came.
        kept: the ids of those that became the baseline, in order.
        noise: pairs of the baseline against itself.
        chain: pairs of the first baseline and the present one, by the present one's number.
        seeds: what each seed that was ever taken or used was for.
        taken: the seeds taken for the noise and the chain, by name and number of the baseline.
        confirmations: how many have begun.
        damaged_lines: of the book.
    """

    rules: Rules
    ideas: dict[str, Idea] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    noise: list[SeedPair] = field(default_factory=list)
    chain: dict[int, list[SeedPair]] = field(default_factory=dict)
    seeds: dict[int, set[str]] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    confirmations: int = 0
    damaged_lines: int = 0

    @property
    def baseline_id(self) -> str:
        """Identifies what the present baseline learns."""
        return self.ideas[self.kept[-1]].result_id if self.kept else self.rules.baseline_id

    @property
    def noise_squares(self) -> float:
        """The sum of the squared differences of the baseline against itself."""
        return sum(pair.difference**2 for pair in self.noise if math.isfinite(pair.difference))

    @property
    def noise_pairs(self) -> int:
        """Their number."""
        return sum(math.isfinite(pair.difference) for pair in self.noise)

    def find_threshold(self, idea: Idea) -> float:
        """Return the e-value that an idea's present stage needs."""
        if idea.stage == "screen":
            return SCREEN
        return find_threshold(self.rules.budget, idea.confirmation or self.confirmations + 1)

    def compute_evidence(self, pairs: Sequence[SeedPair]) -> list[float]:
        """Return the logarithm of the e-value after each pair."""
        logs: list[float] = compute_log_e_values(
            [pair.difference - self.rules.margin for pair in pairs],
            [pair.noise_squares for pair in pairs],
            [pair.noise_pairs for pair in pairs],
        ).tolist()
        return logs

    def take_seeds(self, count: int) -> list[int]:
        """Return the lowest seeds from 1 that nothing has used."""
        return list(itertools.islice((seed for seed in itertools.count(1) if seed not in self.seeds), count))


@cache
def find_size(pairs: tuple[SeedPair, ...]) -> tuple[float | None, tuple[float, float] | None]:
    """Return the mean difference of pairs, without diverged runs, and its 95% interval; None where there is none."""
    d = [pair.difference for pair in pairs if math.isfinite(pair.difference)]
    if not d:
        return None, None
    noise_squares, noise_pairs = pairs[0].noise_squares, pairs[0].noise_pairs
    return sum(d) / len(d), find_interval(d, noise_squares, noise_pairs) if len(d) == len(pairs) else None


def read_campaign(events: Iterable[Mapping[str, Any]], damaged_lines: int = 0) -> Campaign | None:
    """Return the state after all events; None where no campaign was opened."""
    campaign: Campaign | None = None
    for event in events:
        if campaign is not None:
            _apply(campaign, event)
        elif event["event"] == "opened":
            rules = {each.name: event[each.name] for each in fields(Rules)}
            campaign = Campaign(Rules(**{**rules, "baseline": _read_changes(event["baseline"])}))
    if campaign is not None:
        campaign.damaged_lines = damaged_lines
        for idea in campaign.ideas.values():
            idea.state = idea.state if idea.state == "kept" else _judge(campaign, idea)
    return campaign


def _read_changes(value: str | list[str]) -> Changes:
    return value if isinstance(value, str) else tuple(value)


def _apply(campaign: Campaign, event: Mapping[str, Any]) -> None:
    """Let an event change the state; what nothing is known of, such as an event of a later titan, changes nothing."""
    kind, idea = event["event"], campaign.ideas.get(str(event.get("idea")))
    if kind == "idea" and idea is None:
        values = {name: event[name] for name in ("hypothesis", "baseline", "result_id", "pairs")}
        campaign.ideas[event["idea"]] = Idea(event["idea"], _read_changes(event["changes"]), **values)
    elif kind == "seeds":
        _take_seeds(campaign, event)
    elif kind == "pair":
        _add_pair(campaign, event)
    elif kind == "extended" and idea is not None:
        idea.pairs = max(idea.pairs, event["pairs"])
    elif kind == "withdrawn" and idea is not None and idea.state != "kept":
        idea.is_withdrawn, idea.reason = True, event["reason"]
    elif kind == "resumed" and idea is not None:
        idea.is_withdrawn = False
        if idea.stages["confirm"]:
            _keep_proven(campaign, idea)


def _take_seeds(campaign: Campaign, event: Mapping[str, Any]) -> None:
    for seed in event["seeds"]:
        campaign.seeds.setdefault(seed, set()).add(event["idea"])
    idea = campaign.ideas.get(event["idea"])
    if idea is not None and event["stage"] in idea.taken:
        idea.taken[event["stage"]] += event["seeds"]
    if event["idea"] in (NOISE, CHAIN):
        campaign.taken.setdefault(f"{event['idea']} {event['baseline']}", []).extend(event["seeds"])


def _add_pair(campaign: Campaign, event: Mapping[str, Any]) -> None:
    """Add a pair; the same seed of an idea a second time, by two processes at once, does not count.

    A confirmation that begins gets its number, also of a withdrawn idea.
    """
    pair = SeedPair(event["seed"], event["baseline_loss"], event["loss"], campaign.noise_squares, campaign.noise_pairs)
    name, stage, idea = event["idea"], event["stage"], campaign.ideas.get(event["idea"])
    campaign.seeds.setdefault(pair.seed, set()).add(name)
    if name == NOISE:
        campaign.noise.append(pair)
    elif name == CHAIN:
        campaign.chain.setdefault(event["baseline"], []).append(pair)
    elif idea is not None and stage in idea.stages:
        if any(pair.seed == other.seed for pairs in idea.stages.values() for other in pairs):
            return
        idea.stages[stage].append(pair)
        if stage == "confirm":
            if idea.confirmation is None:
                campaign.confirmations += 1
                idea.confirmation = campaign.confirmations
            _keep_proven(campaign, idea)


def _keep_proven(campaign: Campaign, idea: Idea) -> None:
    """Make an idea the baseline where its evidence suffices."""
    if idea.state != "kept" and _judge(campaign, idea) == "kept":
        idea.state = "kept"
        campaign.kept.append(idea.id)
        idea.kept_as = len(campaign.kept)


def _judge(campaign: Campaign, idea: Idea) -> State:
    """Return the state of an idea by its evidence: the best e-value so far counts, as Ville's inequality allows."""
    if idea.is_withdrawn:
        return "withdrawn"
    screen, confirm = (campaign.compute_evidence(idea.stages[stage]) for stage in ("screen", "confirm"))
    is_screened = bool(screen) and max(screen) >= math.log(SCREEN)
    is_current = idea.baseline == len(campaign.kept)
    threshold = find_threshold(campaign.rules.budget, idea.confirmation or campaign.confirmations + 1)
    if confirm and is_screened and is_current and max(confirm) >= math.log(threshold):
        return "kept"
    stage, needed, factor = (confirm, threshold, CONFIRM_FACTOR) if is_screened else (screen, SCREEN, 1)
    if is_futile(stage[-1] if stage else 0.0, factor * idea.pairs - len(stage), needed):
        return "rejected"
    if not is_current:
        return "older baseline"
    return "confirming" if is_screened else "screening"
