"""Keep a book of many small comparisons: `python -m titan.campaign NAME VERB [KEY=VALUE ...]`; see `--help`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from titan.cluster.environment import prepare_environment
from titan.config import settings as typed_settings
from titan.config.arguments import operand
from titan.config.command import Command, CommandLine
from titan.config.settings import setting, suggest_nearest
from titan.console import output
from titan.errors import ConfigError, describe_user_error
from titan.files import untrusted
from titan.files.output_files import check_output_file, write_output_file

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
        None, "show, result: an idea's id, or its changes as another program names them; null: the overrides"
    )
    seed: int | None = setting(None, "result: seed of both runs", at_least=0)
    baseline_loss: float | str | None = setting(None, "result: final metric of the baseline's run, or diverged")
    loss: float | str | None = setting(None, "result: final metric of the idea's run, or diverged")
    losses: tuple[float, ...] | None = setting(
        None, "noise: final metrics of runs of the baseline that another program trained, an even number"
    )
    requests: str | None = setting(None, "file with a line of JSON for each request; -: stdin")
    to: str | None = setting(None, f"page: an HTML file; null: {PAGE} in the campaign's folder")


VERBS = ("open", "noise", "try", "result", "list", "show", "chain", "page")
COMMAND = Command(
    "titan.campaign",
    "Keep a book of many small comparisons, and keep noise out of the baseline.",
    {
        "study open model=debug training.steps=200": "the baseline, as overrides of titan.train",
        "study noise": "runs of the baseline against itself: the noise floor",
        'study try optimizer.lr=2e-3 hypothesis="a higher rate"': "train pairs until the evidence decides",
        "study list": "all ideas, with their evidence",
        "study chain": "what all kept changes are worth together, on seeds that nothing has used",
        "study page": "the same as a page",
        """study '{"verb": "try", "idea": ["optimizer.lr=2e-3"]}'""": "a request as JSON; requests=FILE: one a line",
    },
    Settings,
    overrides="Other words are overrides of titan.train: of the baseline (open), or the idea's changes to it (try).",
    notes=f"Verbs: {', '.join(VERBS)}. Each request is answered with a line of JSON on stdout; runs print on stderr.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    prepare_environment(os.environ)
    return COMMAND.run(_run_requests, argv)


def _run_requests(command_line: CommandLine[Settings]) -> int:
    settings = command_line.settings
    folder = find_folder(settings.words[0])
    if settings.requests is None:
        verb, request = _read_words(settings, command_line.overrides)
        return _print_answer(_answer(folder, verb, request))
    if command_line.overrides or len(settings.words) > 2:
        raise ConfigError(f"requests={settings.requests}: the requests are in the file; leave the other words out.")
    verb = settings.words[1] if len(settings.words) == 2 else None
    return max((_answer_line(folder, line, verb) for line in _read_lines(settings.requests)), default=0)


def find_folder(name: str) -> Path:
    """Return the folder of a campaign: a name is one below runs/.

    Raises:
        ConfigError: for a name that is no folder's.
    """
    typed_settings.check_text(name, f"NAME={name}")
    folder = Path(name) if "/" in name else Path("runs") / name
    if name in (".", "..") or folder.is_file():
        raise ConfigError(f"{name}: is no name of a campaign; give a name such as study, which is the folder runs/study.")
    return folder


def _read_words(settings: Settings, overrides: Sequence[str]) -> tuple[str, Settings]:
    """Return the verb and the request of a command line."""
    words = settings.words[1:]
    if words and words[-1].startswith("{"):
        given = [name for name in vars(settings) if getattr(settings, name) != getattr(Settings, name, None)]
        if overrides or len(words) > 2 or given != ["words"]:
            raise ConfigError("a request as JSON holds everything; leave the other words out.")
        return parse_request(words[-1], words[0] if len(words) == 2 else None)
    if len(words) != 1:
        wrong = f"{' '.join(words)}: one verb is expected" if words else "the verb is missing"
        raise ConfigError(f"{wrong}; give one of {', '.join(VERBS)} behind the campaign's name.")
    verb = check_verb(words[0])
    return verb, _add_overrides(settings, verb, overrides)


def _add_overrides(settings: Settings, verb: str, overrides: Sequence[str]) -> Settings:
    """Return the request with the other words where the verb has them."""
    name = {"open": "baseline", "try": "idea", "result": "idea"}.get(verb)
    if not overrides:
        return settings
    if name is None:
        raise ConfigError(f"{overrides[0]}: {verb} takes no overrides; leave it out.")
    if getattr(settings, name) is not None:
        raise ConfigError(f"{overrides[0]}: {name}= is given as well; leave one of them out.")
    return Settings(**{**vars(settings), name: tuple(overrides)})


def check_verb(verb: object) -> str:
    """Return a verb.

    Raises:
        ConfigError: when there is no such verb.
    """
    if verb not in VERBS:
        raise ConfigError(f"{verb}: there is no such verb{suggest_nearest(str(verb), VERBS)} There are {', '.join(VERBS)}.")
    return str(verb)


def parse_request(text: str, verb: str | None = None) -> tuple[str, Settings]:
    """Return the verb and the request of a line of JSON.

    Args:
        text: the line.
        verb: the one that the command line gives; None where the line has it.

    Raises:
        ConfigError: when the line is no request.
    """
    try:
        content = untrusted.parse_object(text)
    except ValueError as error:
        raise ConfigError(f"{text[:80]}: is no JSON object ({error}); write a request such as {EXAMPLE}.") from None
    if "verb" in content and verb is not None:
        raise ConfigError(f"verb={content['verb']}: the command line has the verb {verb}; leave one of them out.")
    verb = check_verb(content.pop("verb", verb))
    if isinstance(content.get("idea"), dict):  # another program's settings: their order means nothing
        content["idea"] = json.dumps(content["idea"], sort_keys=True)
    known = {field.name for field in fields(Settings)} - {"words", "requests"}
    if unknown := next((name for name in content if name not in known), None):
        raise ConfigError(f"{unknown}: a request has no such key{suggest_nearest(unknown, sorted(known))}")
    return verb, typed_settings.build(Settings, {"words": ["-"], **content})


EXAMPLE = '{"verb": "list"}'


def _read_lines(name: str) -> Iterator[str]:
    """Yield the lines of a file or of stdin.

    Raises:
        ConfigError: when it can't be read.
    """
    if name == "-":
        yield from (line for line in sys.stdin if line.strip())
        return
    try:
        with open(name, encoding="utf-8") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise ConfigError(f"requests={name}: can't be read ({reason}); correct the path.") from None


def _answer_line(folder: Path, line: str, verb: str | None) -> int:
    """Answer a line, also with an error, and return its exit code."""
    try:
        return _print_answer(_answer(folder, *parse_request(line.strip(), verb)))
    except Exception as error:
        if (user_error := describe_user_error(error)) is None:
            raise
        code, sentence = user_error
        print(f"titan: {sentence}", file=sys.stderr)
        _print_answer({"error": sentence, "exit_code": code})
        return code


def _print_answer(answer: Mapping[str, Any]) -> int:
    print(json.dumps(answer, allow_nan=False), flush=True)
    return 0


def _answer(folder: Path, verb: str, request: Settings) -> dict[str, Any]:
    """Return the answer to a request.

    Raises:
        ConfigError: when it can't work.
        RunError: when a run failed.
    """
    from launchers import campaigns  # only now: --help and wrong command lines need not wait for numpy

    return {"verb": verb, **campaigns.ANSWERS[verb](folder, request)}
