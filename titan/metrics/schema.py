"""The metrics axis: what is reported, how often and where to. Free of torch."""

from __future__ import annotations

import os
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from titan.config.kinds import get_kind
from titan.config.settings import setting
from titan.config.text_kinds import Account, Address, Label, Output

if TYPE_CHECKING:
    from titan.metrics.tracker_run import RunDescription, TrackerRun

SQLITE = "sqlite:///"
"""How the URI of a database begins, which MLflow keeps in a file."""
TRACKIO_DIRECTORY = "TRACKIO_DIR"
"""The environment variable with the folder of trackio's files, which it reads when it is imported."""
WARM = 3
"""The first steps of an attempt, which no speed counts: they compile and allocate."""


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """The settings of a tracker, a service that shows what metrics.jsonl records; one of your own derives from this.

    Attributes:
        packages: what `build` imports that may not be installed, by the name to import: what pip installs. Where one
            is missing, the run warns and continues without the tracker.
        finish_minutes: minutes that the end of a finished run waits for the tracker; a stopped run waits less.
    """

    packages: ClassVar[Mapping[str, str]] = {}

    finish_minutes: float = setting(
        5.0, "minutes that the end of a finished run waits for the tracker to send the rest", above=0, cap=1440
    )
    _target_: str = field(init=False, default="")  # so that ids and run.yaml tell trackers of equal settings apart

    def __post_init__(self) -> None:
        """Record which class this is."""
        object.__setattr__(self, "_target_", get_kind(type(self)))

    @abstractmethod
    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> TrackerRun:
        """Open a run at the tracker; on rank 0, in a thread that may block and fail without ending the run.

        Args:
            directory: the run's directory, to write to.
            description: of the run; `run_id` is the same in every attempt, so that a resumed run continues its run.
            warn: shows a sentence to the user.
        """
        raise NotImplementedError

    def find_viewer(self, directory: Path) -> str | None:
        """Return the command that shows the run, for the end of a run; None where there is none."""
        return None


@dataclass(frozen=True, kw_only=True)
class MLflow(Tracker):
    """Runs at MLflow, in a local database unless a server is named."""

    packages: ClassVar[Mapping[str, str]] = {"mlflow": "mlflow-skinny"}

    tracking_uri: Address | None = setting(
        None,
        "a server's URL, or sqlite:///FILE, which several runs may share; null: $MLFLOW_TRACKING_URI, or else "
        "mlflow/mlflow.db in the run's directory",
    )
    experiment: Label = setting("titan", "the experiment at MLflow; it is created where there is none")
    tags: Mapping[str, Label] | None = setting(None, "more tags of the run, {NAME: VALUE}", hashed=False)

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> TrackerRun:
        """Is not called: `titan.metrics.trackers` opens the run."""
        raise NotImplementedError

    def choose_tracking_uri(self, directory: Path, environ: Mapping[str, str] = os.environ) -> str:
        """Return the store of a run: that of the settings, else of the environment, else a database of the run."""
        local = f"{SQLITE}{directory.absolute() / 'mlflow' / 'mlflow.db'}"
        return self.tracking_uri or environ.get("MLFLOW_TRACKING_URI") or local

    def find_viewer(self, directory: Path) -> str | None:
        """Return the command that shows a database; a server's pages are at its URL."""
        uri = self.choose_tracking_uri(directory)
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}" if uri.startswith(SQLITE) else None


@dataclass(frozen=True, kw_only=True)
class Trackio(Tracker):
    """Runs at trackio, in local files unless a Space at Hugging Face is named."""

    packages: ClassVar[Mapping[str, str]] = {"trackio": "trackio"}

    project: Label = setting("titan", "the project at trackio")
    directory: Output | None = setting(
        None,
        "the folder of trackio's database, which several runs may share; null: $TRACKIO_DIR, or else trackio/ in the "
        "run's directory",
    )
    space: Account | None = setting(
        None, "a Space at Hugging Face to send to, USER/NAME; null: $TRACKIO_SPACE_ID, or else none"
    )
    private: bool = setting(True, "whether a Space that does not exist yet is created as a private one")
    group: Label | None = setting(None, "the run's group; null: its group id, which the repeats with other seeds share")

    def build(self, directory: Path, description: RunDescription, warn: Callable[[str], None]) -> TrackerRun:
        """Is not called: `titan.metrics.trackers` opens the run."""
        raise NotImplementedError

    def choose_folder(self, directory: Path, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the folder of trackio's files: that of the settings, else of the environment, else one of the run."""
        return Path(self.directory or environ.get(TRACKIO_DIRECTORY) or directory / "trackio").absolute()

    def find_viewer(self, directory: Path) -> str | None:
        """Return the command that shows local files."""
        folder = shlex.quote(str(self.choose_folder(directory)))
        return f"{TRACKIO_DIRECTORY}={folder} trackio show" if self.space is None else None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What a run reports beside metrics.jsonl, which every run writes."""

    console_every: int = setting(10, "steps between progress lines where there is no terminal", at_least=1)
    tensorboard: bool = setting(False, "write TensorBoard event files to tensorboard/")
    wandb: bool = setting(False, "log to Weights & Biases, files in wandb/")
    wandb_project: Label = setting("titan", "the project at Weights & Biases")
    wandb_entity: Account | None = setting(None, "the user or team at Weights & Biases; null: your default one")
    wandb_mode: Literal["offline", "online"] = setting(
        "offline", "offline: files only, for a later `wandb sync`; online: send while training"
    )
    wandb_group: Label | None = setting(
        None, "the run's group at Weights & Biases; null: its group id, which the repeats with other seeds share"
    )
    wandb_tags: tuple[Label, ...] = setting((), "the run's tags at Weights & Biases, beside the name of its sweep")
    wandb_finish_minutes: float = setting(
        5.0, "minutes that the end of a finished run waits for Weights & Biases to send the rest", above=0, cap=1440
    )
    trackers: Mapping[str, Tracker] | None = setting(
        None, "more trackers, by names that you choose: {NAME: {_target_: mine.Tracker, ...}}", later=True, hashed=False
    )
    plot: bool = setting(True, "plot loss.svg at the end")
    sample_tokens: int = setting(64, "tokens sampled from the trained model at the end; 0: none", at_least=0, cap=10**6)
    layers_every: int = setting(
        0,
        "steps between metrics of each layer: norms of gradients and weights, update-to-weight ratio, size of "
        "activations, largest attention logit; 0: never",
        at_least=0,
    )
    spike_window: int = setting(
        100, "steps whose losses decide whether the next one is a spike; 0: no spikes are marked", at_least=0, cap=10**6
    )
    spike_deviations: float = setting(
        7.0, "a loss this many robust standard deviations above the window's median is a spike", above=0, cap=1e6
    )
