"""What a tracker shows of a run: its description and the curves of its records, without secrets. Free of torch."""

from __future__ import annotations

import http.client
import numbers
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

from titan.config.settings import format_value
from titan.config.text_kinds import TextKind, list_kinds
from titan.console.text import redact
from titan.metrics.reader import METRIC_PREFIX

Warn = Callable[[str], None]


class TrackerRun(Protocol):
    """A run at a tracker, which shows its records; it may raise and block."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record of metrics.jsonl."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Take the final result and close; nothing follows."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What trackers show of a run beside its records.

    Attributes:
        run_id: the same in every attempt of a run, so that a resumed run continues the same tracker run.
        group_id: shared by the seeds of one experiment; that of the run's first attempt.
        name: the run's display name.
        config: the resolved settings as plain containers; values that look like secrets are left out.
        facts: what identifies the run: choices, kinds, ids, commit, data, parameters, sweep and variant.
        sweep: the name of its sweep, if any.
        labels: its recipe, if it has one, and its layout.
    """

    run_id: str
    group_id: str
    name: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """Settings and facts, without secrets."""
        return remove_secrets({**self.config, **self.facts})


NO_CURVES = ("step", "time", "attempt")
"""Numbers of a record that are no measurements."""


def extract_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under their names in a tracker: train/loss, validation/loss, hooks/NAME/METRIC.

    Lists, strings and booleans are left out, and so are the step, which is the axis, the attempt, which is no
    measurement, and the time, which trackers record themselves: TensorBoard's values are fp32, in which a time is known
    to two minutes.
    """
    validation = "validation_loss" in record and "loss" not in record
    scalars = {}
    for key, value in record.items():
        if key not in NO_CURVES and isinstance(value, numbers.Real) and not isinstance(value, bool):
            short_name = key.removeprefix("validation_")
            group = "validation" if validation or short_name != key else "train"
            scalars[key if key.startswith(METRIC_PREFIX) else f"{group}/{short_name}"] = float(value)
    return scalars


def extract_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result, without booleans."""
    return {k: float(v) for k, v in result.items() if isinstance(v, numbers.Real) and not isinstance(v, bool)}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested settings by dotted names, values that are no scalars as text."""
    flat_settings: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat_settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            flat_settings[f"{prefix}{key}"] = (
                value if isinstance(value, (bool, int, float, str)) else format_value(value)
            )
    return flat_settings


T = TypeVar("T")

_SECRET = re.compile(
    r"secret|passw(or)?d|credential|api_?key|access_?key|private_?key|(^|[_.-])(key|token|auth|bearer)$", re.IGNORECASE
)

_ASSIGNED = re.compile(
    r"((?<![A-Za-z])(?:secret|passw(?:or)?d|passphrase|pwd|credentials?|(?:api|access|private)[_-]?key|key|token|auth|bearer)"
    r"['\"]?\s*[=:]\s*['\"]?)[^\s,;'\"&}\])]+",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(?<![\w/])([\w.+-]+:)[^\s:/@]+(?=@[\w-])")


def remove_secrets(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return a copy of nested settings without keys that look like secrets, and with secrets in strings masked."""

    def clean_value(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean_value(v) for k, v in value.items() if not _SECRET.search(str(k))}
        if isinstance(value, (list, tuple)):
            return type(value)(map(clean_value, value))
        return hide_secrets(value, environ) if isinstance(value, str) else value

    return {key: clean_value(value) for key, value in config.items() if not _SECRET.search(str(key))}


def hide_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` without passwords and tokens, in URLs or named in it, and without those of the environment."""
    for name, value in environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return _LOGIN.sub(r"\g<1>***", _ASSIGNED.sub(r"\g<1>***", redact(text)))


def hide_in_labels(settings: T) -> T:
    """Return a tracker's settings with secrets masked in texts that it shows, such as tags, or left out by name."""
    types = get_type_hints(type(settings), include_extras=True)
    names = [f.name for f in fields(settings) if f.init and TextKind.LABEL in list_kinds(types[f.name])]  # type: ignore[arg-type]
    labels = {name: getattr(settings, name) for name in names}
    shown = {name: remove_secrets({"": value})[""] for name, value in labels.items()}
    return replace(settings, **shown) if shown != labels else settings  # type: ignore[type-var]


def summarise_error(error: BaseException) -> str:
    """Return the first line of an error without secrets, or the name of its class where it says nothing."""
    text = hide_secrets(str(error)).strip()
    text = f"{type(error).__name__} {text}".strip() if not text or text.isdigit() else text
    return text.splitlines()[0].rstrip(".")


UNAVAILABLE = (502, 503, 504)
"""What a gateway answers for a server that is not there."""


def server_answers(url: str, seconds: float) -> bool:
    """Whether an HTTP server answers at `url`; wandb's own timeout is far longer."""
    try:
        urllib.request.urlopen(url, timeout=seconds).close()
    except urllib.error.HTTPError as error:
        return error.code not in UNAVAILABLE
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # wandb has its own certificates
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def check_writable(folder: Path) -> None:
    """Create a tracker's folder; raise OSError where it can't be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} can't be written to")
