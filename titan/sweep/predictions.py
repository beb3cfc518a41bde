"""What a ladder predicted of its largest size before it ran, what came of it, and the user's record of predictions.

`prediction.json` in the sweep's directory is written once, and never changed. The record is a file in the user's state
directory, one line of JSON for each prediction that was scored; nothing is ever removed from it. Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan.errors import ConfigError
from titan.files import locks, untrusted
from titan.files.platform import find_state_folder, sync_file

PREDICTION, SCORE = "prediction.json", "score.json"
"""Names in a ladder's directory."""
RECORD = "predictions.jsonl"
"""Name of the record in the user's state directory."""
FORMAT = 1


@dataclass(frozen=True)
class PredictedLoss:
    """A predicted validation loss of one run.

    Attributes:
        dim: width of its model.
        n: parameters without embeddings.
        n_all: all parameters.
        d: tokens.
        value: median of the prediction.
        low: lower end of its interval.
        high: upper end.
        level: of the interval.
        variant: its label; empty in a ladder with one variant.
    """

    dim: int
    n: int
    n_all: int
    d: int
    value: float
    low: float
    high: float
    level: float
    variant: str = ""

    def holds(self, loss: float) -> bool:
        """Return whether a loss lies inside the interval."""
        return self.low <= loss <= self.high


@dataclass(frozen=True)
class LadderPrediction:
    """The content of `prediction.json`.

    Attributes:
        key: digest of the ladder's settings: which ladder it is for.
        time: when it was written, as ISO 8601.
        losses: of the largest size of each variant, the shortest length first.
        digest: of all the content but the time: a ladder that is repeated predicts the same.
        details: what else it has: the runs that were fitted, and the speed-ups that their law predicts.
    """

    key: str
    time: str
    losses: tuple[PredictedLoss, ...]
    digest: str
    details: Mapping[str, Any] = field(default_factory=dict)


def write_once(folder: Path, key: str, time: str, losses: Sequence[PredictedLoss], details: dict[str, Any]) -> None:
    """Write the prediction; where one is there already, it stays as it is.

    Args:
        details: what else is kept; see `LadderPrediction`.
    """
    content = {"key": key, "losses": [asdict(loss) for loss in losses], **details}
    text = json.dumps({"format": FORMAT, "time": time, "digest": _compute_digest(content), **content}, indent=1) + "\n"
    temporary = folder / f".{PREDICTION}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x") as file:
            file.write(text)
            file.flush()
            sync_file(file.fileno())
        os.link(temporary, folder / PREDICTION)  # unlike a rename it fails where the file exists
    except FileExistsError:
        return
    finally:
        temporary.unlink(missing_ok=True)


def _compute_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read(folder: Path) -> LadderPrediction | None:
    """Return the prediction in a ladder's directory; None where there is none.

    Raises:
        ConfigError: when it is damaged or was changed.
    """
    file = folder / PREDICTION
    try:
        content = untrusted.parse_object(untrusted.read_regular_file(file))
        if content.pop("format") != FORMAT:
            raise ValueError("it has another format")
        time, digest = content.pop("time"), content.pop("digest")
        if digest != _compute_digest(content):
            raise ValueError("it was changed")
        key, losses = content.pop("key"), content.pop("losses")
        return LadderPrediction(key, time, tuple(PredictedLoss(**loss) for loss in losses), digest, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: can't be used as a prediction ({error}); restore it, or start the ladder anew under another name."
        ) from error


@dataclass(frozen=True)
class Record:
    """What became of the user's predictions.

    Attributes:
        inside: how many losses were inside the interval.
        scored: how many predictions were scored.
        damaged: lines of the file that can't be read, and are not counted.
        level: of the intervals.
    """

    inside: int
    scored: int
    damaged: int
    level: float

    def describe(self) -> str:
        """Return the record in a sentence."""
        damaged = f"; {self.damaged} damaged lines are not counted" if self.damaged else ""
        return (
            f"your predictions so far: {self.inside} of {self.scored} inside {100 * self.level:g} % "
            f"({find_record()}{damaged})"
        )


def find_record() -> Path:
    """Return the file of the user's record."""
    return find_state_folder() / RECORD


def add_score(folder: Path, prediction: LadderPrediction, predicted: PredictedLoss, loss: float, time: str) -> None:
    """Add the outcome of the longest run of a variant to the user's record, once.

    Args:
        predicted: of the largest size at the longest length.
        loss: the validation loss there.
        time: when it was scored, as ISO 8601.

    Raises:
        OSError: when the record can't be written.
    """
    line = {
        "time": time, "predicted_at": prediction.time, "digest": prediction.digest, "folder": str(folder),
        **asdict(predicted), "loss": loss, "inside": predicted.holds(loss),
    }  # fmt: skip
    file = find_record()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("a+b", buffering=0) as record:
        locks.acquire(record.fileno(), str(file))
        record.seek(0)
        others = [other for other in map(_parse_line, record.read().splitlines()) if other]
        if (prediction.digest, predicted.variant) in [(o["digest"], o.get("variant", "")) for o in others]:
            return
        locks.append_lines(record.fileno(), line)


def read_record(level: float) -> Record:
    """Return the record of predictions with intervals of a level."""
    try:
        lines = untrusted.read_regular_file(find_record()).splitlines()
    except OSError:
        lines = []
    parsed = [_parse_line(line) for line in lines if line.strip()]
    scores = [score for score in parsed if score is not None and score["level"] == level]
    return Record(sum(score["inside"] for score in scores), len(scores), parsed.count(None), level)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of the record; None where it is damaged."""
    try:
        score = untrusted.parse_object(line)
        for name, kind in {"digest": str, "level": float, "inside": bool}.items():
            untrusted.check_type(score[name], kind, name)
    except (ValueError, KeyError):
        return None
    return score
