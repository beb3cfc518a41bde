"""Keep a book of many small comparisons: `python -m titan.campaign NAME VERB [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.config import settings as typed_settings
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.output_files import check_output_file, write_output_file
from titan.config.settings import setting, suggest_nearest
from titan.errors import ConfigError, RunError, describe_user_error
from titan.files import untrusted

if TYPE_CHECKING:
    from titan.evidence.campaign import Changes
    from titan.evidence.session import Session

DIVERGED = "diverged"
PAGE = "campaign.html"


@dataclass(frozen=True)
class Settings:
    """The settings of `python -m titan.campaign`."""

    words: tuple[str, ...] = operand("NAME", "name below runs/ or a folder; then the verb, or a line of JSON with it")
    metric: str | None = setting(
        None, "open: number of result.json that is compared, lower is better; null: validation_loss"
    )
    budget: float | None = setting(
        None, "open: chance that any useless idea is ever kept; null: 0.05", above=0, at_most=0.5
    )
    margin: float | None = setting(
        None, "open: an idea is useless unless it is better by more, in units of the metric; null: 0", at_least=0
    )
    slope: float | None = setting(
        None,
        "open: by how much the metric falls where the compute is multiplied by e (2.718); null: not known, no speed-up",
        above=0,
    )
    baseline: str | tuple[str, ...] | None = setting(
        None, "open: name of a recipe that another program trains; overrides of titan.train are given without a key"
    )
    pairs: int | None = setting(
        None,
        "open, try: most pairs of a screen, a confirmation has twice as many, null: 12; noise, chain: pairs to have, "
        "null: 6",
        at_least=1,
        cap=10_000,
    )
    batch: int = setting(2, "try, noise, chain: pairs that are launched together", at_least=1, cap=10_000)
    hypothesis: str | None = setting(None, "try, result: why the idea should help", any_text=True)
    idea: str | tuple[str, ...] | None = setting(
        None, "show, result, withdraw: an idea's id, or its changes as another program names them; null: the overrides"
    )
    reason: str | None = setting(None, "withdraw: why", any_text=True)
    seed: int | None = setting(None, "result: seed of both runs", at_least=0)
    baseline_loss: float | str | None = setting(None, "result: final metric of the baseline's run, or diverged")
    loss: float | str | None = setting(None, "result: final metric of the idea's run, or diverged")
    losses: tuple[float, ...] | None = setting(
        None, "noise: final metrics of runs of the baseline that another program trained, an even number"
    )
    requests: str | None = setting(None, "file with a line of JSON for each request; -: stdin")
    to: str | None = setting(None, f"page: an HTML file; null: {PAGE} in the campaign's folder")


DEFAULT_PAIRS = 6
"""Pairs of the noise and of the chain: the fewest that have an interval."""
COMMAND = Command(
    "titan.campaign",
    "Keep a book of many small comparisons, and keep noise out of the baseline.",
    {
        "study open model=debug training.steps=200": "the baseline, as overrides of titan.train",
        "study noise": "runs of the baseline against itself: the noise floor",
        'study try optimizer.lr=2e-3 hypothesis="a higher rate"': "train pairs until the evidence decides",
        "study withdraw optimizer.lr=2e-3": "an idea that was a mistake, before it is judged",
        "study list": "all ideas, with their evidence",
        "study chain": "what all kept changes are worth on fresh seeds",
        "study page": "the same as a page",
        """study '{"verb": "try", "idea": ["optimizer.lr=2e-3"]}'""": "a request as JSON; requests=FILE: one a line",
    },
    Settings,
    overrides="Other words are overrides of titan.train: of the baseline (open), or the idea's changes to it.",
    notes="Verbs: open, noise, try, result, withdraw, list, show, chain, page. Each request is answered with a line of "
    "JSON on stdout; runs print on stderr.",
    uses_torch=True,
)


def _run_requests(command_line: CommandLine[Settings]) -> int:
    """Answer the requests of a file, that of a line of JSON, or that of the words."""
    settings, overrides, words = command_line.settings, command_line.overrides, command_line.settings.words
    folder = find_folder(words[0])
    if settings.requests is not None:
        if overrides or len(words) > 2:
            raise ConfigError(f"requests={settings.requests}: the requests are in the file; leave the other words out.")
        return max((_answer_line(folder, line, *words[1:]) for line in _read_lines(settings.requests)), default=0)
    if words[-1].startswith("{"):
        if overrides or settings != Settings(words) or len(words) not in (2, 3):
            raise ConfigError("a request as JSON holds everything; leave the other words out.")
        return _answer_line(folder, words[-1], *words[1:-1])
    if len(words) != 2:
        wrong = f"{' '.join(words[1:])}: one verb is expected" if len(words) > 1 else "the verb is missing"
        raise ConfigError(f"{wrong}; give one of {', '.join(VERBS)} behind the campaign's name.")
    verb = _find_verb(words[1])
    if overrides:
        if verb.overridden is None:
            raise ConfigError(f"{overrides[0]}: {verb.name} takes no overrides; leave it out.")
        if getattr(settings, verb.overridden) is not None:
            raise ConfigError(f"{overrides[0]}: {verb.overridden}= is given as well; leave one of them out.")
        settings = Settings(**{**vars(settings), verb.overridden: tuple(overrides)})
    return _print_answer(_answer(folder, verb, settings))


def find_folder(name: str) -> Path:
    """Return the folder of a campaign: a name is one below runs/; raise ConfigError for a name that is no folder's."""
    typed_settings.check_text(name, f"NAME={name}")
    folder = Path(name) if "/" in name else Path("runs") / name
    if name in (".", "..") or folder.is_file():
        raise ConfigError(
            f"{name}: is no name of a campaign; give a name such as study, which is the folder runs/study."
        )
    return folder


def _find_verb(name: object) -> Verb:
    """Return a verb, or raise ConfigError when there is no such verb."""
    if name not in VERBS:
        raise ConfigError(
            f"{name}: there is no such verb{suggest_nearest(str(name), VERBS)} There are {', '.join(VERBS)}."
        )
    return VERBS[str(name)]


def _read_lines(name: str) -> Iterable[str]:
    """Return the lines of a file, or those of stdin as they come; raise ConfigError when it can't be read."""
    if name == "-":
        return filter(str.strip, sys.stdin)
    try:
        return [line for line in untrusted.read_regular_file(Path(name)).decode().split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        is_undecodable = isinstance(error, UnicodeDecodeError)
        reason = "no text in UTF-8" if is_undecodable else getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"requests={name}: can't be read ({reason}); correct the path, or give - for stdin."
        ) from None


def _answer_line(folder: Path, line: str, verb: str | None = None) -> int:
    """Answer a line, also with an error, and return its exit code."""
    try:
        return _print_answer(_answer(folder, *_parse_request(line.strip(), verb)))
    except Exception as error:
        if (user_error := describe_user_error(error)) is None:
            raise
        code, sentence = user_error
        print(f"titan: {sentence}", file=sys.stderr)
        _print_answer({"error": sentence, "exit_code": code})
        return code


def _parse_request(text: str, name: str | None) -> tuple[Verb, Settings]:
    """Return the verb and the settings of a line of JSON, or raise ConfigError when it is no request.

    Args:
        name: of the verb that the command line gives; None where the line has it.
    """
    try:
        content = untrusted.parse_object(text)
    except ValueError as error:
        example = '{"verb": "list"}'
        raise ConfigError(f"{text[:80]}: is no JSON object ({error}); write a request such as {example}.") from None
    if "verb" in content and name is not None:
        raise ConfigError(f"verb={content['verb']}: the command line has the verb {name}; leave one of them out.")
    verb = _find_verb(content.pop("verb", name))
    if isinstance(content.get("idea"), dict):  # another program's settings: their order means nothing
        content["idea"] = json.dumps(content["idea"], sort_keys=True)
    known = {field.name for field in fields(Settings)} - {"words", "requests"}
    if unknown := next((name for name in content if name not in known), None):
        raise ConfigError(f"{unknown}: a request has no such key{suggest_nearest(unknown, sorted(known))}")
    return verb, typed_settings.build(Settings, {"words": ["-"], **content})


def _print_answer(answer: Mapping[str, Any]) -> int:
    print(json.dumps(answer, allow_nan=False), flush=True)
    return 0


def _answer(folder: Path, verb: Verb, request: Settings) -> dict[str, Any]:
    """Return the answer to a request.

    Raises:
        ConfigError: when it can't work.
        RunError: when a run failed.
    """
    from titan.evidence.session import Session  # only now: --help and wrong words need not wait for numpy

    defaults = vars(Settings(request.words, requests=request.requests))
    for name, value in vars(request).items():
        if value != defaults[name] and name not in verb.takes:  # it would have no effect
            takes = f"takes {', '.join(verb.takes)}" if verb.takes else "takes no settings"
            raise ConfigError(f"{name}={typed_settings.format_value(value)}: {verb.name} {takes}; leave it out.")
    if verb.overridden is not None:
        check_overrides(getattr(request, verb.overridden))
    session = Session(folder, TitanTrainer())
    with contextlib.redirect_stdout(sys.stderr), redirect_descriptor():
        return {"verb": verb.name, **verb.answer(session, **{name: getattr(request, name) for name in verb.takes})}


def _open(session: Session, baseline: Changes | None, **rules: Any) -> dict[str, Any]:
    return session.open(baseline, **{name: value for name, value in rules.items() if value is not None})


def _try_idea(session: Session, idea: Changes | None, **settings: Any) -> dict[str, Any]:
    if isinstance(idea, str):
        raise ConfigError(f"idea={idea}: give overrides of titan.train, as a list in JSON.")
    return session.try_idea(idea, **settings)


def _add_result(
    session: Session, idea: Changes | None, hypothesis: str | None, seed: int | None, **losses: float | str | None
) -> dict[str, Any]:
    if idea is None or seed is None:
        missing = "idea" if idea is None else "seed"
        raise ConfigError(f"result: {missing} is missing; give idea, seed, baseline_loss and loss.")
    for name, value in losses.items():
        if value is None or (isinstance(value, str) and value != DIVERGED):
            raise ConfigError(
                f"{name}={'' if value is None else value}: is no finite number; give the run's final metric, or "
                f"{DIVERGED}."
            )
    first, second = (None if isinstance(value, str) else value for value in losses.values())
    return session.add_result(idea, seed, first, second, hypothesis)


def _withdraw(session: Session, idea: Changes | None, reason: str | None) -> dict[str, Any]:
    if idea is None:
        raise ConfigError("withdraw: idea is missing; give its id, or its changes.")
    return session.withdraw(idea, reason)


def _measure(
    name: str, session: Session, pairs: int | None, batch: int, losses: Sequence[float] | None = None
) -> dict[str, Any]:
    return session.measure(name, pairs or DEFAULT_PAIRS, batch) if losses is None else session.add_noise(losses)


def check_overrides(changes: str | Sequence[str] | None) -> None:
    """Raise ConfigError for words that are no overrides, and for settings that the campaign sets itself."""
    for word in changes if isinstance(changes, tuple) else ():
        key = word.partition("=")[0].lstrip("+~")
        if word.startswith("-") or key in SET_BY_CAMPAIGN or key.startswith(("hydra.run", "hydra.sweep", "sweep")):
            raise ConfigError(
                f"{word}: the campaign sets seeds and folders, waits for its runs, and takes no options; leave it out."
            )


SET_BY_CAMPAIGN = (
    "name", "resume", "training.seed", "training.repeat", "hydra.mode", "hydra.launcher.wait", "hydra.launcher.dry_run",
)  # fmt: skip


def _write_page(session: Session, to: str | None) -> dict[str, Any]:
    from titan.config.optional import import_optional

    file = check_output_file(to or str(session.folder / PAGE), (".html",))
    campaign = session.read()
    import_optional("jinja2", "page")
    from titan.report.render.campaign_report import render_page

    made = f"{datetime.now():%Y-%m-%d %H:%M}: python -m titan.campaign {session.folder} page"
    write_output_file(file, render_page(campaign, session.folder.name, made))
    return {"written": str(file)}


class Verb(NamedTuple):
    """What a campaign can be asked.

    Attributes:
        name: its name.
        takes: the settings that it takes.
        answer: returns the answer of a session to these.
        overridden: the setting that overrides of titan.train give; None: it takes none.
    """

    name: str
    takes: tuple[str, ...]
    answer: Callable[..., dict[str, Any]]
    overridden: str | None = None


VERBS = {
    verb.name: verb
    for verb in (
        Verb("open", ("baseline", "metric", "budget", "margin", "pairs", "slope"), _open, "baseline"),
        Verb("noise", ("pairs", "batch", "losses"), partial(_measure, "noise")),
        Verb("try", ("idea", "hypothesis", "pairs", "batch"), _try_idea, "idea"),
        Verb("result", ("idea", "hypothesis", "seed", "baseline_loss", "loss"), _add_result, "idea"),
        Verb("withdraw", ("idea", "reason"), _withdraw, "idea"),
        Verb("list", (), lambda session: session.list_ideas()),
        Verb("show", ("idea",), lambda session, idea: session.show_idea(idea)),
        Verb("chain", ("pairs", "batch"), partial(_measure, "chain")),
        Verb("page", ("to",), _write_page),
    )
}


@contextlib.contextmanager
def redirect_descriptor() -> Iterator[None]:
    """Let the processes that are started meanwhile print on stderr: stdout has answers only."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(original, 1)
        os.close(original)


class TitanTrainer:
    """Trains runs with titan's launchers; see `titan.evidence.session.CampaignTrainer`.

    Attributes:
        typed: overrides of the request, as against those of the book.
    """

    def __init__(self) -> None:
        self.typed: tuple[str, ...] = ()

    def identify(self, overrides: Sequence[str], recorded: Sequence[str], metric: str) -> str:
        """Compose a recipe and return the id of what it learns; see `CampaignTrainer.identify`."""
        from launchers.command import compose_trial
        from titan.run import identity
        from titan.sweep import objective

        self.typed = tuple(overrides)
        run = compose_trial(overrides, recorded)
        objective.check_measured("metric", metric, [run])
        return identity.compute_variant_id(run)

    def train(self, folder: Path, runs: Sequence[tuple[Sequence[str], int]], metric: str) -> list[float | None]:
        """Train runs, those that are not finished yet, and return their metrics; see `Trainer.train`."""
        from launchers.command import launch_trials
        from titan.run.command_line import quote_value

        def is_launcher(word: str) -> bool:
            """Return whether an override chooses how runs are launched, which is the same for both recipes."""
            return word.lstrip("+~").startswith(("hydra/launcher", "hydra.launcher"))

        launcher = list(dict.fromkeys(word for recipe, _ in runs for word in recipe if is_launcher(word)))
        trials = [[*(w for w in recipe if not is_launcher(w)), f"training.seed={seed}"] for recipe, seed in runs]
        words = [f"hydra.sweep.dir={quote_value(str(folder.absolute()))}", *launcher]
        launched = launch_trials(words, trials, self.typed)
        return [read_metric(Path(run.directory), code, metric) for run, code in launched]


def read_metric(directory: Path, code: int, metric: str) -> float | None:
    """Return the final metric of a trial; None where it diverged.

    Raises:
        ConfigError: when its result has no such number.
        RunError: when it failed for another reason.
    """
    from titan.report.collect import GAVE_UP
    from titan.run.directory import is_finished, read_result
    from titan.sweep import ledger

    result = read_result(directory)[0]
    if not is_finished(directory):
        sweep = ledger.read(directory.parent)
        trials = sweep.trials if sweep is not None else ()
        reason = next((trial.reason for trial in trials if Path(trial.directory) == directory), None) or ""
        if any(words in reason for words in GAVE_UP):
            return None
        details = f": {reason.rstrip('.')}" if reason else ""
        raise RunError(f"{directory}: the run ended with exit code {code}{details}; the same command tries it again.")
    value = result.get(metric, "")
    if value is None or isinstance(value, (int, float)):
        return value if value is None or math.isfinite(value) else None
    numbers = [k for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    raise ConfigError(f"metric={metric}: {directory}/result.json has no such number; it has {', '.join(numbers)}.")


main, cli = COMMAND.bind(_run_requests)

if __name__ == "__main__":
    cli()
