"""What a campaign decides, and what it asks of its trainer: seeds, stages, answers from the book, kills, bad input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import campaigns
from titan.errors import ConfigError
from titan.evidence import answers
from titan.evidence.campaign import read_campaign
from titan.evidence.session import Session, list_overrides, merge_overrides

EFFECTS = {"good=1": 3.0, "better=1": 3.0, "useless=1": 0.0, "bad=1": -3.0}
NOISE = np.random.default_rng(1).standard_normal((4, 100_000))


class ScriptedTrainer:
    """Makes losses: seed deviation 1, less the effects of a recipe's changes."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple[str, ...], int]] = []
        self.fail_at: int | None = None

    def identify(self, overrides: Sequence[str], recorded: Sequence[str], metric: str) -> str:
        words = sorted({*recorded, *(word.replace("1.0", "1") for word in overrides)} - {"nothing=0"})
        if "wrong=1" in words:
            raise ConfigError("wrong=1: can't be trained; leave it out.")
        return " ".join(words)

    def train(self, folder: Path, runs: Sequence[tuple[Sequence[str], int]], metric: str) -> list[float | None]:
        if self.fail_at is not None and len(self.runs) >= self.fail_at:
            raise KeyboardInterrupt
        self.runs += [(tuple(recipe), seed) for recipe, seed in runs]
        return [self._draw(recipe, seed) for recipe, seed in runs]

    def _draw(self, recipe: Sequence[str], seed: int) -> float | None:
        if "diverges=1" in recipe:
            return None
        return 5.0 + NOISE[len(recipe) % 4, seed] - sum(EFFECTS.get(word, 0.0) for word in recipe)


@pytest.fixture
def trainer() -> ScriptedTrainer:
    return ScriptedTrainer()


@pytest.fixture
def session(tmp_path: Path, trainer: ScriptedTrainer) -> Session:
    session = Session(tmp_path / "study", trainer)
    session.open(("model=debug",))
    return session


def test_a_good_idea_is_kept_on_fresh_seeds_and_the_next_one_is_compared_with_it(
    session: Session, trainer: ScriptedTrainer
) -> None:
    answer = session.try_idea(("good=1",), "a reason")
    assert answer["state"] == "kept" and answer["kept_as"] == 1 and answer["hypothesis"] == "a reason"
    idea = session.read().ideas[answer["idea"]]
    screen, confirm = ([pair.seed for pair in idea.stages[stage]] for stage in ("screen", "confirm"))
    assert len({*screen, *confirm}) == len(screen) + len(confirm) >= 8
    assert answer["confirm"]["highest"] >= answer["needed"] == 40 and answer["better_by"] == pytest.approx(3, abs=2)
    recipes = [recipe for recipe, _ in trainer.runs]
    assert recipes == [("model=debug",), ("model=debug", "good=1")] * (len(recipes) // 2)
    session.try_idea(("useless=1",))
    assert trainer.runs[-2:][0][0] == ("model=debug", "good=1")
    assert trainer.runs[-1][0] == ("model=debug", "good=1", "useless=1")


@pytest.mark.parametrize(("change", "pairs"), [("useless=1", 12), ("bad=1", 6), ("diverges=1", 2)], ids=str)
def test_other_ideas_are_rejected_with_their_evidence_and_answered_from_the_book(
    session: Session, trainer: ScriptedTrainer, change: str, pairs: int
) -> None:
    answer = session.try_idea((change,))
    assert answer["state"] == "rejected" and not answer["from_book"] and 2 <= answer["screen"]["pairs"] <= pairs
    assert (answer["screen"]["e_value"] == 0) == (answer["diverged"] > 0) == (change == "diverges=1")
    events = session.book.read()
    again = session.try_idea((change.replace("=1", "=1.0"),))
    assert again == answer | {"from_book": True} and session.book.read() == events


def test_a_rejected_idea_goes_on_with_more_pairs(session: Session, trainer: ScriptedTrainer) -> None:
    before = session.try_idea(("useless=1",), pairs=4)["screen"]["pairs"]
    answer = session.try_idea(("useless=1",), pairs=16)
    assert answer["screen"]["pairs"] > before and not answer["from_book"]
    seeds = [seed for _, seed in trainer.runs[::2]]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_never_used_twice(session: Session, trainer: ScriptedTrainer) -> None:
    session.measure("noise", 3)
    for change in ("useless=1", "good=1", "better=1"):
        session.try_idea((change,))
    session.measure("chain", 6)
    counts = {seed: [s for _, s in trainer.runs].count(seed) for _, seed in trainer.runs}
    noise = {seed for recipe, seed in trainer.runs[:6]}
    assert all(count == (1 if seed in noise else 2) for seed, count in counts.items())


def test_the_chain_is_worth_what_its_changes_are(session: Session, trainer: ScriptedTrainer) -> None:
    with pytest.raises(ConfigError, match="no idea was kept yet"):
        session.measure("chain", 4)
    for change in ("good=1", "better=1"):
        assert session.try_idea((change,))["state"] == "kept"
    chain = session.measure("chain", 9)["chain"]
    assert chain["pairs"] == 9 and chain["interval"][0] < 6 < chain["interval"][1]
    assert trainer.runs[-2][0] == ("model=debug",) and trainer.runs[-1][0] == ("model=debug", "good=1", "better=1")


def test_the_noise_floor_is_that_of_a_seed(session: Session) -> None:
    noise = session.measure("noise", 60, batch=60)["noise"]
    assert noise["pairs"] == 60 and noise["interval"][0] < 1 < noise["interval"][1]
    assert noise["seed_deviation"] == pytest.approx(1, abs=0.2)


def test_an_evidence_of_an_older_baseline_is_marked_and_decides_nothing(session: Session) -> None:
    for seed in range(1, 6):
        stale = session.add_result(("better=1",), seed, 5.0, 2.0 + seed / 10)
    assert stale["state"] == "confirming"
    assert session.try_idea(("good=1",))["state"] == "kept"
    show = answers.describe_idea(session.read(), session.read().ideas[stale["idea"]])
    assert show["state"] == "older baseline" and "is no longer the baseline" in show["text"]
    for seed in range(900, 903):
        stale = session.add_result(stale["idea"], seed, 5.0, 2.0 + seed / 1000)
    assert stale["state"] == "older baseline" and stale["from_book"] and stale["confirm"]["pairs"] == 0
    renewed = session.try_idea(("better=1",))
    assert renewed["state"] == "kept" and renewed["idea"] != stale["idea"]
    assert renewed["on_older_baselines"] == [{"idea": stale["idea"], "baseline": 0, "state": "older baseline"}]


@pytest.mark.parametrize("fail_at", [0, 4, 8, 14])
def test_what_a_kill_leaves_is_continued_with_the_same_seeds(
    session: Session, trainer: ScriptedTrainer, fail_at: int, tmp_path: Path
) -> None:
    trainer.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        session.try_idea(("good=1",))
    trainer.fail_at = None
    answer = session.try_idea(("good=1",))
    whole = Session(tmp_path / "whole", ScriptedTrainer())
    whole.open(("model=debug",))
    assert answer == whole.try_idea(("good=1",))


def test_one_process_at_a_time_trains_an_idea(session: Session, trainer: ScriptedTrainer, monkeypatch: Any) -> None:
    def train(*_: Any) -> list[float | None]:
        session.try_idea(("good=1",))
        return []

    monkeypatch.setattr(trainer, "train", train)
    with pytest.raises(ConfigError, match="another process is training it; wait"):
        session.try_idea(("good=1",))


@pytest.mark.full
def test_decisions_are_those_of_the_simulation(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    """Random ideas, entered one result at a time, pass the screen as `tests.support.campaigns` says, and when."""
    rng = np.random.default_rng(8)
    session = Session(tmp_path / "own", trainer)
    session.open("a recipe")
    outcomes = []
    for number in range(6):
        differences = rng.standard_normal(12) + 0.7
        logs = campaigns.compute_log_e_values(differences[np.newaxis])
        (passed,), (count,) = campaigns.decide(logs, np.array([campaigns.SCREEN]))
        answer: dict[str, Any] = {"state": "screening"}
        for k in range(count):
            assert answer["state"] == "screening"
            answer = session.add_result(f"idea {number}", 1000 * number + k, differences[k], 0.0)
        assert answer["state"] == ("confirming" if passed else "rejected")
        outcomes.append(bool(passed))
    assert 0 < sum(outcomes) < 6


def test_another_programs_results_decide_by_the_same_rules(tmp_path: Path, trainer: ScriptedTrainer) -> None:
    session = Session(tmp_path / "own", trainer)
    session.open("mine", slope=0.5)
    answer: dict[str, Any] = {"next_seed": 1, "state": "screening"}
    while answer["state"] in ("screening", "confirming"):
        seed = answer["next_seed"]
        answer = session.add_result("a  change", seed, 5.0, 4.5 + 0.1 * math.sin(seed))
    assert answer["state"] == "kept" and answer["changes"] == "a change"
    assert answer["speed_up"] == pytest.approx(math.exp(answer["better_by"] / 0.5), rel=1e-3)
    assert session.add_result("a change", 999, 1.0, 1.0)["baseline"] == 1  # now a change of the new baseline


REJECTED: dict[str, tuple[Any, str]] = {
    "nothing changes": (lambda s: s.try_idea(("nothing=0",)), "nothing=0: changes nothing that is learned"),
    "no idea": (lambda s: s.try_idea(None), "there is no idea; give overrides"),
    "composes to an error": (lambda s: s.try_idea(("wrong=1",)), "wrong=1: can't be trained"),
    "too few pairs": (lambda s: s.try_idea(("good=1",), pairs=3), "pairs=3: can't reach an e-value of 10; give at"),
    "another margin": (lambda s: s.open(("model=debug",), margin=0.1), "opened with margin=0.0, not 0.1; give"),
    "another baseline": (lambda s: s.open(("model=x",)), "opened with the baseline model=debug, not model=x"),
    "no baseline": (lambda s: s.open(None), "there is no baseline"),
    "a repeated seed": (lambda s: enter(s, 1, 1), "seed=1: this idea has used it; use another, such as 2"),
    "a seed of another idea": (lambda s: confirm_on_seed_of_another(s), "seed=1: something in this campaign has used"),
    "a text": (lambda s: s.add_result("words", 1, 1.0, 1.0), "the ideas of this campaign are overrides"),
    "a large seed": (lambda s: s.add_result(("good=1",), 2**63, 1.0, 1.0), "must be at least 0 and below"),
    "an odd number": (lambda s: s.add_noise([1.0]), "1 were given; give an even number"),
    "no folder for locks": (lambda s: try_without_locks(s), "locks: can't be written (File exists); make it writable"),
    "not opened": (lambda s: Session(s.folder / "other", s.trainer).read(), "no campaign was opened there"),
}  # fmt: skip


def enter(session: Session, *seeds: int, change: str = "good=1") -> dict[str, Any]:
    return [session.add_result((change,), seed, 5.0, 2.0 + seed / 100) for seed in seeds][-1]


def try_without_locks(session: Session) -> None:
    (session.folder / "locks").touch()
    session.try_idea(("good=1",))


def confirm_on_seed_of_another(session: Session) -> None:
    enter(session, 1, change="useless=1")
    assert enter(session, 2, 3, 4, 5, 6)["state"] == "confirming"
    enter(session, 1)


@pytest.mark.parametrize("case", REJECTED)
def test_bad_input_is_rejected_in_a_sentence(session: Session, case: str) -> None:
    act, sentence = REJECTED[case]
    events = session.book.read()
    with pytest.raises(ConfigError) as caught:
        act(session)
    assert sentence in str(caught.value) and str(caught.value).count("\n") == 0
    if "seed" not in case:
        assert session.book.read() == events


def test_a_screen_may_share_seeds_with_other_ideas(session: Session) -> None:
    enter(session, 1, 2, change="useless=1")
    assert enter(session, 1, 2)["screen"]["pairs"] == 2


def test_a_changed_setting_keeps_its_place() -> None:
    assert merge_overrides(("a=1", "+b=2", "c=3"), ("b=5", "d=1")) == ("a=1", "b=5", "c=3", "d=1")


def test_the_same_pair_twice_counts_once(session: Session) -> None:
    answer = enter(session, 1)
    with session.book.locked() as append:
        append("pair", idea=answer["idea"], stage="screen", seed=1, baseline_loss=9.0, loss=1.0, baseline=0)
    campaign = read_campaign(*session.book.read())
    assert campaign is not None and len(campaign.ideas[answer["idea"]].stages["screen"]) == 1
    assert list_overrides(campaign) == ("model=debug",)


class TestWithdraw:
    """Taking back an idea: an entry more, no budget that was not spent, and no second chance."""

    def screen(self, session: Session) -> str:
        """Return an idea that has passed the screen."""
        answers = [session.add_result(("good=1",), seed, 5.0, 2.0) for seed in range(5)]
        return str(answers[-1]["idea"])

    def test_before_any_evidence_it_spends_nothing(self, session: Session, trainer: ScriptedTrainer) -> None:
        trainer.fail_at = 0
        with pytest.raises(KeyboardInterrupt):
            session.try_idea(("useless=1",))
        before = session.book.file.read_bytes()
        answer = session.withdraw(("useless=1.0",), "a typing error")
        assert session.book.file.read_bytes().startswith(before), "nothing is changed or removed"
        assert (answer["state"], answer["budget_spent"], answer["confirmation"]) == ("withdrawn", 0.0, None)
        assert answer["text"].startswith("withdrawn before it was judged (a typing error); no budget was spent.")
        assert session.withdraw(answer["idea"]) == answer, "a second time adds nothing"
        trainer.fail_at = None
        assert session.try_idea(("good=1",))["confirmation"] == 1

    def test_after_a_confirmation_began_its_budget_stays_spent(self, session: Session) -> None:
        idea = self.screen(session)
        assert session.add_result(idea, 50, 5.0, 2.0)["confirmation"] == 1
        answer = session.withdraw(idea)
        assert answer["budget_spent"] == pytest.approx(0.05 / 2) and "0.025 of the budget stays" in answer["text"]
        other = session.try_idea(("better=1",))
        assert other["state"] == "kept" and other["confirmation"] == 2 and other["needed"] == 120

    def test_resumed_it_goes_on_with_its_evidence(self, session: Session) -> None:
        idea = self.screen(session)
        before = session.add_result(idea, 50, 5.0, 2.0)
        session.withdraw(idea)
        after = session.add_result(idea, 51, 5.0, 2.0)
        assert (after["state"], after["confirmation"]) == ("confirming", 1)
        assert after["confirm"]["pairs"] == before["confirm"]["pairs"] + 1 and after["seeds"][:6] == before["seeds"]

    def test_pairs_that_come_after_it_do_not_keep_the_idea(self, session: Session) -> None:
        """As of a process that trains it meanwhile; the evidence counts once somebody takes it up again."""
        idea = self.screen(session)
        session.withdraw(idea)
        with session.book.locked() as append:
            for seed in range(60, 72):
                append(
                    "pair", idea=idea, stage="confirm", seed=seed, baseline_loss=5.0, loss=2.0, baseline=0
                )  # fmt: skip
        campaign = session.read()
        assert campaign.ideas[idea].state == "withdrawn" and not campaign.kept and campaign.confirmations == 1
        assert session.try_idea(("good=1",))["state"] == "kept"

    def test_what_was_judged_stays(self, session: Session) -> None:
        kept, rejected = session.try_idea(("good=1",)), None
        with pytest.raises(ConfigError, match="was judged, kept"):
            session.withdraw(kept["idea"])
        rejected = session.try_idea(("bad=1",))
        with pytest.raises(ConfigError, match="was judged, rejected"):
            session.withdraw(("bad=1",))
        with pytest.raises(ConfigError, match="this campaign has no such idea"):
            session.withdraw(("useless=1",))
        assert session.read().ideas[rejected["idea"]].state == "rejected"

    def test_a_process_that_trains_it_stops_after_its_batch(self, session: Session, trainer: ScriptedTrainer) -> None:
        train = trainer.train

        def withdraw_meanwhile(*arguments: Any) -> list[float | None]:
            losses = train(*arguments)
            if len(trainer.runs) == 4:
                Session(session.folder, trainer).withdraw(("useless=1",))
            return losses

        trainer.train = withdraw_meanwhile  # type: ignore[method-assign]
        answer = session.try_idea(("useless=1",))
        assert answer["state"] == "withdrawn" and answer["screen"]["pairs"] == 2 and len(trainer.runs) == 4
