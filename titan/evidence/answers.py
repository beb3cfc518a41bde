"""What a campaign answers: plain data for a line of JSON, and a sentence for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from titan.evidence.campaign import Campaign, Idea, SeedPair, find_size, find_threshold


def describe_idea(campaign: Campaign, idea: Idea, from_book: bool = False) -> dict[str, Any]:
    """Return an idea with its evidence.

    Args:
        from_book: whether nothing was trained for this answer.
    """
    pairs = idea.stages["confirm"] or idea.stages["screen"]
    logs = {name: campaign.compute_evidence(stage) if stage else [0.0] for name, stage in idea.stages.items()}
    stages = {
        name: {
            "pairs": len(idea.stages[name]),
            "e_value": round_figures(math.exp(own[-1])),
            "highest": round_figures(math.exp(max(own))),
        }
        for name, own in logs.items()
    }
    return {
        "idea": idea.id,
        **{name: getattr(idea, name) for name in ("changes", "hypothesis", "baseline", "state", "kept_as")},
        "from_book": from_book,
        **stages,
        "confirmation": idea.confirmation,
        "needed": round(campaign.find_threshold(idea), 1),
        "budget_spent": round_figures(compute_spent(campaign, idea)),
        **describe_size(campaign, pairs),
        "seeds": [pair.seed for stage in idea.stages.values() for pair in stage],
        "next_seed": campaign.take_seeds(1)[0],
        "text": format_idea(campaign, idea),
    }


def compute_spent(campaign: Campaign, idea: Idea) -> float:
    """Return the part of the campaign's budget that an idea has spent: nothing before its confirmation."""
    return 0.0 if idea.confirmation is None else 1 / find_threshold(campaign.rules.budget, idea.confirmation)


def describe_size(campaign: Campaign, pairs: Sequence[SeedPair]) -> dict[str, Any]:
    """Return by how much the second of two recipes is better on some pairs: mean, interval, diverged runs, speed-up."""
    mean, interval = find_size(tuple(pairs))
    slope = campaign.rules.slope
    return {
        "better_by": None if mean is None else round_figures(mean),
        "interval": None if interval is None else [round_figures(end) for end in interval],
        "diverged": sum(pair.loss is None for pair in pairs),
        "baseline_diverged": sum(pair.baseline_loss is None for pair in pairs),
        "speed_up": None if slope is None or mean is None else round_figures(math.exp(min(mean / slope, 50.0))),
    }


def round_figures(value: float) -> float:
    """Return a number with five significant figures."""
    return float(f"{value:.5g}")


def format_idea(campaign: Campaign, idea: Idea) -> str:
    """Return the sentence about an idea."""
    size = format_size(idea.stages["confirm"] or idea.stages["screen"])
    counts = f"{len(idea.stages['screen'])} pairs of the screen, {len(idea.stages['confirm'])} of the confirmation"
    spent = compute_spent(campaign, idea)
    why = f" ({idea.reason})" if idea.reason else ""
    budget = f"{spent:.2g} of the budget stays spent" if spent else "no budget was spent"
    outcome = {
        "kept": f"kept, as baseline {idea.kept_as}: ",
        "rejected": "rejected, not shown to be better: ",
        "withdrawn": f"withdrawn before it was judged{why}; {budget}. ",
        "older baseline": f"not decided: baseline {idea.baseline} is no longer the baseline; try it again. ",
    }.get(idea.state, f"not decided yet ({idea.state}): ")
    return f"{outcome}{size}; {counts}"


def format_size(pairs: Sequence[SeedPair]) -> str:
    """Return by how much an idea is better, with the 95% interval or why there is none."""
    mean, interval = find_size(tuple(pairs))
    diverged = sum(pair.loss is None for pair in pairs)
    note = f", {diverged} diverged" if diverged else ""
    if mean is None:
        return f"no pair of finite losses{note}"
    ends = f"95% interval {interval[0]:.4g} to {interval[1]:.4g}" if interval else "too few pairs for an interval"
    return f"better by {mean:.4g} ({ends}){note}"


def describe_noise(campaign: Campaign) -> dict[str, Any]:
    """Return the noise floor: the standard deviations of a pair's difference and of a seed, with 95% intervals."""
    pairs = campaign.noise_pairs
    if pairs == 0:
        return {"pairs": 0, "pair_deviation": None, "seed_deviation": None, "interval": None}
    deviation = math.sqrt(campaign.noise_squares / pairs)
    ends = [deviation * math.sqrt(factor / 2) for factor in find_variance_factors(pairs)]
    return {
        "pairs": pairs,
        "pair_deviation": round_figures(deviation),
        "seed_deviation": round_figures(deviation / math.sqrt(2)),
        "interval": [round_figures(end) for end in ends] or None,
    }


def find_variance_factors(pairs: int) -> tuple[float, ...]:
    """Return what a variance from so many squares of known mean is multiplied by for its 95% interval.

    Chi-square quantiles by the approximation of Wilson and Hilferty 1931 (https://doi.org/10.1073/pnas.17.12.684): of
    three squares the upper end of the deviation is 9% too high, of four 4%. Fewer have no interval here.
    """
    if pairs < 3:
        return ()
    spread = math.sqrt(2 / (9 * pairs))
    return tuple((1 - spread**2 + NormalDist().inv_cdf(p) * spread) ** -3 for p in (0.975, 0.025))


def describe_campaign(campaign: Campaign) -> dict[str, Any]:
    """Return the rules and the state of a campaign, without its ideas."""
    rules = campaign.rules
    states = [idea.state for idea in campaign.ideas.values()]
    return {
        "baseline": len(campaign.kept),
        "first_baseline": rules.baseline,
        **{name: getattr(rules, name) for name in ("metric", "budget", "margin", "pairs", "slope")},
        "ideas": {state: states.count(state) for state in dict.fromkeys(states)},
        "kept": list(campaign.kept),
        "confirmations": campaign.confirmations,
        "noise": describe_noise(campaign),
        "chain": describe_chain(campaign),
        "damaged_lines": campaign.damaged_lines,
    }


def describe_chain(campaign: Campaign) -> dict[str, Any]:
    """Return what the present baseline is worth against the first one, on seeds that nothing else has used."""
    pairs = campaign.chain.get(len(campaign.kept), [])
    return {"pairs": len(pairs), **describe_size(campaign, pairs)}
