"""What a campaign does when it is asked: open, train pairs, take results, answer. A `CampaignTrainer` trains the runs.

Between reading a book and appending to it the book is locked; it is not locked while runs are trained. A process takes
its seeds in the book first, so that no other trains them; those that it leaves behind when it is killed are trained by
the next one with the same idea. Only one process at a time trains an idea.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from titan.errors import ConfigError
from titan.evidence import answers
from titan.evidence.book import Append, Book
from titan.evidence.campaign import (
    CHAIN,
    NOISE,
    SCREEN,
    Campaign,
    Changes,
    Idea,
    Rules,
    is_futile,
    read_campaign,
)
from titan.files import locks

Loss = float | None
"""The final metric of a run; None where it diverged."""
MAX_SEED = 2**63


class CampaignTrainer(Protocol):
    """Trains runs of titan."""

    def identify(self, overrides: Sequence[str], recorded: Sequence[str], metric: str) -> str:
        """Return the id of what a recipe learns, whatever its seed.

        Args:
            overrides: what was typed for this request.
            recorded: overrides from the book, before them.
            metric: number of the result that will be compared.

        Raises:
            ConfigError: when it can't be trained, or has no such result.
        """

    def train(self, folder: Path, runs: Sequence[tuple[Sequence[str], int]], metric: str) -> list[Loss]:
        """Train runs, each of overrides and a seed, in a folder that may have some already; return their metrics.

        Raises:
            ConfigError: when one is rejected.
            RunError: when one failed.
        """


class Session:
    """Answers requests about one campaign.

    Attributes:
        folder: of the campaign: its book, and its runs.
        trainer: trains runs.
    """

    def __init__(self, folder: Path, trainer: CampaignTrainer) -> None:
        self.folder, self.trainer = folder, trainer
        self.book = Book(folder)

    def read(self) -> Campaign:
        """Return the campaign's state; raise ConfigError when none was opened."""
        campaign = read_campaign(*self.book.read())
        if campaign is None:
            raise ConfigError(
                f"{self.folder}: no campaign was opened there; open one with python -m titan.campaign NAME open."
            )
        return campaign

    def open(self, baseline: Changes | None, **rules: Any) -> dict[str, Any]:
        """Open a campaign by its `Rules`, and return its state; one that is open with the same ones stays as it is.

        Raises:
            ConfigError: when the baseline can't be trained, or the campaign was opened with other rules.
        """
        check_pairs(rules.get("pairs"))
        if not baseline:
            raise ConfigError("open: there is no baseline; give overrides of titan.train, or baseline=TEXT.")
        metric = rules.get("metric", Rules.metric)
        id = hash_texts(baseline) if isinstance(baseline, str) else self.trainer.identify(baseline, (), metric)
        wanted = Rules(baseline, id, **rules)
        with self.book.locked() as append:
            campaign = read_campaign(*self.book.read())
            if campaign is None:
                append("opened", **vars(wanted))
            elif different := find_difference(campaign.rules, wanted):
                raise ConfigError(
                    f"{self.folder}: this campaign was opened with {different}; give the same, or choose another name."
                )
        return answers.describe_campaign(self.read())

    def list_ideas(self) -> dict[str, Any]:
        """Return the state of the campaign and all its ideas, with their evidence."""
        campaign = self.read()
        ideas = [answers.describe_idea(campaign, idea, from_book=True) for idea in campaign.ideas.values()]
        return {**answers.describe_campaign(campaign), "list": ideas}

    def show_idea(self, id: Changes | None) -> dict[str, Any]:
        """Return an idea with its evidence, None: the state of the campaign; raise ConfigError without such an idea."""
        campaign = self.read()
        if id is None:
            return answers.describe_campaign(campaign)
        if (idea := campaign.ideas.get(str(id))) is None:
            raise ConfigError(f"idea={id}: this campaign has no such idea; the verb list names them.")
        return answers.describe_idea(campaign, idea, from_book=True)

    def identify(self, campaign: Campaign, changes: Changes) -> Idea:
        """Return the idea that changes to the present baseline are; other spellings of the same have the same id.

        Raises:
            ConfigError: when they change nothing that is learned, or what they make can't be trained.
        """
        is_text = isinstance(campaign.rules.baseline, str)
        if is_text != isinstance(changes, str):
            kind = "a text, since another program trains" if is_text else "overrides of titan.train"
            raise ConfigError(f"idea={changes}: the ideas of this campaign are {kind}; give that.")
        if isinstance(changes, str):
            changes = " ".join(changes.split())
            result_id = hash_texts(campaign.baseline_id, changes)
        else:
            result_id = self.trainer.identify(changes, list_overrides(campaign), campaign.rules.metric)
        if result_id == campaign.baseline_id or not changes:
            raise ConfigError(
                f"{changes if isinstance(changes, str) else ' '.join(changes)}: changes nothing that is learned from "
                f"baseline {len(campaign.kept)}; give a setting another value."
            )
        id = hash_texts(campaign.baseline_id, result_id)
        return Idea(id, changes, None, len(campaign.kept), result_id, campaign.rules.pairs)

    def try_idea(
        self, changes: Changes | None, hypothesis: str | None = None, pairs: int | None = None, batch: int = 2
    ) -> dict[str, Any]:
        """Train pairs of the baseline and an idea until the evidence decides; answer from the book where it has.

        Args:
            pairs: the most of the screen; None: the campaign's. More than before go on where the screen ended.
            batch: pairs that are trained together.

        Raises:
            ConfigError: when the idea can't be tried, or another process is trying it.
            RunError: when a run failed.
        """
        campaign = self.read()
        if isinstance(campaign.rules.baseline, str):
            raise ConfigError(
                "try: another program trains this campaign's runs; enter their results with the verb result."
            )
        if changes is None:
            raise ConfigError("try: there is no idea; give overrides of titan.train.")
        check_pairs(pairs)
        idea = self.identify(campaign, changes)
        trained = 0
        with self._lock_idea(idea.id):
            self._resume(idea.id)
            while seeds := self._take_seeds(idea, hypothesis, pairs, batch):
                campaign = self.read()
                known = campaign.ideas[idea.id]
                baseline = list_overrides(campaign, known.baseline)
                recipes = (baseline, merge_overrides(baseline, known.changes))
                runs = [(recipe, seed) for seed in seeds for recipe in recipes]
                losses = self.trainer.train(self.folder / "ideas" / idea.id, runs, campaign.rules.metric)
                stage = "screen" if seeds[0] in known.taken["screen"] else "confirm"  # which took the seeds
                self._record_pairs(idea.id, stage, known.baseline, seeds, losses)
                trained += len(seeds)
        return describe_tried(self.read(), idea, from_book=not trained)

    def _take_seeds(self, idea: Idea, hypothesis: str | None, pairs: int | None, batch: int) -> list[int]:
        """Return the next seeds of an idea, and record them; none where it is decided."""
        with self.book.locked() as append:
            idea = self._record_idea(append, idea, hypothesis, pairs)
            if idea.state not in ("screening", "confirming"):
                return []
            if seeds := idea.untrained[:batch]:
                return seeds
            seeds = self.read().take_seeds(min(batch, idea.most_pairs - len(idea.stages[idea.stage])))
            append("seeds", idea=idea.id, stage=idea.stage, seeds=seeds, baseline=idea.baseline)
            return seeds

    def _record_idea(self, append: Append, idea: Idea, hypothesis: str | None, pairs: int | None = None) -> Idea:
        """Return an idea of the locked book; add it, or more pairs of it, where the book has them not."""
        known = self.read().ideas.get(idea.id)
        if known is None:
            append(
                "idea", idea=idea.id, pairs=pairs or idea.pairs, changes=idea.changes, hypothesis=hypothesis,
                baseline=idea.baseline, result_id=idea.result_id,
            )  # fmt: skip
        elif pairs is not None and pairs > known.pairs:
            append("extended", idea=idea.id, pairs=pairs)
        return self.read().ideas[idea.id]

    def _record_pairs(self, idea: str, stage: str, baseline: int, seeds: Sequence[int], losses: Sequence[Loss]) -> None:
        """Record pairs of losses, of the baseline and then of the idea, one for each seed."""
        with self.book.locked() as append:
            for seed, first, second in zip(seeds, losses[::2], losses[1::2], strict=True):
                append_pair(append, idea, stage, baseline, seed, first, second)

    def _lock_idea(self, name: str) -> contextlib.AbstractContextManager[int]:
        """Let one process at a time train an idea; raises ConfigError while another one does."""
        busy = f"{name}: another process is training it; wait for that one, or try another idea."
        return locks.hold_file(self.folder / "locks" / name, str(self.folder / "locks"), "make it writable", busy)

    def add_result(
        self, changes: Changes, seed: int, baseline_loss: Loss, loss: Loss, hypothesis: str | None = None
    ) -> dict[str, Any]:
        """Record the losses of a pair that another program trained.

        Raises:
            ConfigError: when the idea has used the seed, or in a confirmation any idea has.
        """
        if not 0 <= seed < MAX_SEED:
            raise ConfigError(f"seed={seed}: must be at least 0 and below 2**63.")
        idea = self._find_idea(changes)
        self._resume(idea.id)
        with self.book.locked() as append:
            idea = self._record_idea(append, idea, hypothesis)
            if is_open := idea.state in ("screening", "confirming"):
                check_seed(self.read(), idea, seed)
                append_pair(append, idea.id, idea.stage, idea.baseline, seed, baseline_loss, loss)
        return describe_tried(self.read(), idea, from_book=not is_open)

    def _find_idea(self, changes: Changes) -> Idea:
        """Return an idea by its id, or what changes to the present baseline are; see `identify`."""
        campaign = self.read()
        known = campaign.ideas.get(changes) if isinstance(changes, str) else None
        return known or self.identify(campaign, changes)

    def withdraw(self, changes: Changes, reason: str | None = None) -> dict[str, Any]:
        """Withdraw an idea that is not judged yet; its pairs stay, and so does the budget that it has spent.

        A process that is training it stops after its batch.

        Args:
            changes: its changes, or its id.

        Raises:
            ConfigError: when there is no such idea, and when it was judged.
        """
        id = self._find_idea(changes).id
        with self.book.locked() as append:
            idea = self.read().ideas.get(id)
            if idea is None:
                raise ConfigError(f"withdraw: {id}: this campaign has no such idea; the verb list names them.")
            if idea.state in ("kept", "rejected"):
                raise ConfigError(f"withdraw: {idea.id}: was judged, {idea.state}, and stays in the book as that.")
            if idea.state != "withdrawn":
                append("withdrawn", idea=id, reason=reason)
        return describe_tried(self.read(), idea, from_book=True)

    def _resume(self, id: str) -> None:
        """Let an idea that was withdrawn go on where it was: with all its pairs, and the number of its confirmation."""
        with self.book.locked() as append:
            idea = self.read().ideas.get(id)
            if idea is not None and idea.is_withdrawn:
                append("resumed", idea=id)

    def measure(self, name: str, pairs: int, batch: int = 2) -> dict[str, Any]:
        """Train pairs that are no idea's until there are so many.

        Args:
            name: `NOISE`, of the present baseline, each on two seeds; or `CHAIN`, of the first and the present baseline
                on fresh seeds.
            batch: pairs that are trained together.

        Raises:
            ConfigError: for the chain when nothing was kept yet, and when another process is doing that.
            RunError: when a run failed.
        """
        campaign = self.read()
        number, step = len(campaign.kept), 2 if name == NOISE else 1
        if name == CHAIN and number == 0:
            raise ConfigError("chain: no idea was kept yet, so the present baseline is the first one; try ideas first.")
        if isinstance(campaign.rules.baseline, str):
            raise ConfigError(f"{name}: another program trains this campaign's runs, which titan can't.")
        with self._lock_idea(f"{name}-{number}"):
            while True:
                with self.book.locked() as append:
                    campaign = self.read()
                    known = campaign.noise if name == NOISE else campaign.chain.get(number, [])
                    if (missing := pairs - len(known)) <= 0:
                        return answers.describe_campaign(campaign)
                    taken, done = campaign.taken.get(f"{name} {number}", []), {pair.seed for pair in known}
                    starts = [i for i in range(0, len(taken), step) if taken[i] not in done]  # taken, and not trained
                    seeds = [seed for i in starts for seed in taken[i : i + step]][: min(batch, missing) * step]
                    if not seeds:
                        seeds = campaign.take_seeds(min(batch, missing) * step)
                        append("seeds", idea=name, stage=name, seeds=seeds, baseline=number)
                present = list_overrides(campaign, number)
                recipes = [present] if name == NOISE else [list_overrides(campaign, 0), present]
                runs = [(recipe, seed) for seed in seeds for recipe in recipes]
                losses = self.trainer.train(self.folder / f"{name}-{number}", runs, campaign.rules.metric)
                self._record_pairs(name, name, number, seeds[::step], losses)

    def add_noise(self, losses: Sequence[float]) -> dict[str, Any]:
        """Record final metrics of runs of the baseline that another program trained, paired in their order.

        Raises:
            ConfigError: for an odd number.
        """
        if len(losses) % 2 or not losses:
            raise ConfigError(f"losses: {len(losses)} were given; give an even number, two for a pair.")
        self._record_pairs(NOISE, NOISE, len(self.read().kept), [-1] * (len(losses) // 2), losses)
        return answers.describe_campaign(self.read())


def append_pair(
    append: Append, idea: str, stage: str, baseline: int, seed: int, baseline_loss: Loss, loss: Loss
) -> None:
    """Append a pair of losses to a locked book."""
    append("pair", idea=idea, stage=stage, seed=seed, baseline_loss=baseline_loss, loss=loss, baseline=baseline)


def describe_tried(campaign: Campaign, idea: Idea, from_book: bool) -> dict[str, Any]:
    """Return the answer about an idea, with what was found about the same changes of older baselines."""
    earlier = [other for other in campaign.ideas.values() if other.changes == idea.changes and other.id != idea.id]
    return answers.describe_idea(campaign, campaign.ideas[idea.id], from_book) | {
        "on_older_baselines": [{"idea": i.id, "baseline": i.baseline, "state": i.state} for i in earlier]
    }


def check_pairs(pairs: int | None) -> None:
    """Raise ConfigError for a screen that no evidence can pass."""
    if pairs is not None and is_futile(0.0, pairs, SCREEN):
        fewest = next(n for n in range(1, 99) if not is_futile(0.0, n, SCREEN))
        raise ConfigError(f"pairs={pairs}: can't reach an e-value of {SCREEN:g}; give at least {fewest}.")


def check_seed(campaign: Campaign, idea: Idea, seed: int) -> None:
    """Raise ConfigError for a seed that an idea's present stage may not use."""
    users = campaign.seeds.get(seed, set())
    if idea.id in users:
        raise ConfigError(f"seed={seed}: this idea has used it; use another, such as {campaign.take_seeds(1)[0]}.")
    if users and idea.stage == "confirm":
        raise ConfigError(
            f"seed={seed}: something in this campaign has used it, and a confirmation needs fresh ones; use another, "
            f"such as {campaign.take_seeds(1)[0]}."
        )


def find_difference(old: Rules, new: Rules) -> str | None:
    """Return the first rule that differs, with both values; None where the rules are the same."""
    if old.baseline_id != new.baseline_id:
        texts = [r.baseline if isinstance(r.baseline, str) else " ".join(r.baseline) for r in (old, new)]
        return f"the baseline {texts[0]}, not {texts[1]}"
    names = [name for name in vars(old) if name not in ("baseline", "baseline_id")]
    return next(
        (f"{n}={getattr(old, n)}, not {getattr(new, n)}" for n in names if getattr(old, n) != getattr(new, n)), None
    )


def list_overrides(campaign: Campaign, number: int | None = None) -> tuple[str, ...]:
    """Return the overrides of a baseline; None: the present one."""
    overrides = tuple(campaign.rules.baseline)
    for id in campaign.kept[:number]:
        overrides = merge_overrides(overrides, campaign.ideas[id].changes)
    return overrides


def merge_overrides(overrides: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with changes: a setting that both have takes the changed value, in its old place."""
    merged = {_get_key(word): word for word in overrides}
    return tuple((merged | {_get_key(word): word for word in changes}).values())


def _get_key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def hash_texts(*parts: Changes) -> str:
    """Return 12 hex digits of a hash of texts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
