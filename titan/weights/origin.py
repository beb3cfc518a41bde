"""Find weights: the format of a folder or a hub's repository, and the model that it describes. Free of torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import INDEX
from titan.config import modules, settings
from titan.config.optional import import_optional
from titan.dataset.sources.hub import translate_hub_error
from titan.errors import ConfigError
from titan.files.run_directory import RUN, describe_runs_below
from titan.model.schema import Decoder

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_PATTERNS = ("model*.safetensors", "*.json", "tokenizer.model", "*.jinja")
"""The files to fetch from the hub."""


@dataclass(frozen=True)
class WeightsLocation:
    """Weights that were found.

    Attributes:
        kind: the format; "hub" for a repository of the hub, in Hugging Face's format.
        path: the folder (for a run that of its last complete checkpoint), or the repository's name.
        label: the user's setting, for messages.
    """

    kind: Literal["titan", "hf", "meta", "hub"]
    path: str
    label: str

    @property
    def folder(self) -> Path:
        """The folder; a repository of the hub is fetched once, with the user's login, into huggingface_hub's cache."""
        if self.kind != "hub":
            return Path(self.path)
        hub = import_optional("huggingface_hub", self.label, "there is no such directory, and a model of the hub")
        repository, _, revision = self.path.partition("@")
        try:
            return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=_PATTERNS))
        except Exception as error:
            problem = str(translate_hub_error(error, self.label, self.label)).removeprefix(f"{self.label}: ")
            is_complete = problem.startswith("there is no such ")
            prefix = "" if is_complete else "there is no such directory, and "
            raise ConfigError(f"{self.label}: {prefix}{problem}") from error


def check_source(name: str, setting: str = "") -> None:
    """Raise ConfigError for what can't be a model's path, before torch is imported and data are prepared.

    A name at Hugging Face's hub, as a setting may have it, looks like a path, too.
    """
    path = Path(name).expanduser()
    if setting and _ON_HUB.fullmatch(name):
        return
    if not os.path.exists(path) and (os.path.isdir(path.parent) or len(path.parts) != 2):
        advice = "correct the path" if "/" in name else "correct the path, or give OWNER/NAME of the hub"
        raise ConfigError(f"{settings.format_setting(setting, name)}: there is no such directory; {advice}.")


def find_weights(
    path: str | Path, setting: str = "checkpoint.weights", check: select.ContentCheck = lambda folder: None
) -> WeightsLocation:
    """Find the weights at `path`; see `titan.weights.formats.open_weights` and `titan.checkpoint.select.load_named`."""
    label, folder = settings.format_setting(setting, path), Path(path).expanduser().absolute()
    if not os.path.exists(folder) and isinstance(path, str) and _ON_HUB.fullmatch(path):
        return WeightsLocation("hub", path, label)
    if not os.path.isdir(folder):
        problem = "is a file; give its folder, or" if os.path.exists(folder) else "there is no such directory;"
        raise ConfigError(f"{label}: {problem} correct the path.")
    if any((folder / name).exists() for name in (manifest.NAME, "checkpoints", INDEX)):
        checkpoint = select.load_named(str(path), setting, check)
        select.report_skipped(checkpoint.notes, checkpoint.path)
        return WeightsLocation("titan", checkpoint.path, label)
    if any(folder.glob("consolidated.*.pth")) or (folder / "params.json").exists():
        return WeightsLocation("meta", str(folder), label)
    if any(folder.glob("*.safetensors*")) or (folder / "config.json").exists():
        return WeightsLocation("hf", str(folder), label)
    raise ConfigError(_explain_absence(folder, path, label))


def build_model(saved_manifest: Manifest, label: str) -> Any:
    """Return the model of a checkpoint, also of a class in a package that $TITAN_MODULES names."""
    allowed, name = modules.list_trusted_packages(()), str(saved_manifest.model.get("_target_", ""))
    package = name.partition(".")[0]
    if settings.is_foreign(saved_manifest.model) and package not in ("experiments", *allowed):
        raise ConfigError(
            f"{label}: its model is of the class {name}; if you trust it, set the environment variable "
            f"{modules.VARIABLE}={package}."
        )
    try:
        return settings.build(Decoder, saved_manifest.model, "model", allowed)
    except ConfigError as error:
        raise ConfigError(f"{label}: its {manifest.NAME} describes no model: {error}") from None


def _explain_absence(folder: Path, typed: str | Path, label: str) -> str:
    """Return the sentence on a folder without weights, as the user has typed it."""
    if any(folder.glob("pytorch_model*.bin")):
        return f"{label}: has its weights in pytorch_model.bin, which titan doesn't read; save them as safetensors."
    for name, problem in ((manifest.DAMAGED, "is corrupt"), (manifest.RETIRED, "is about to be deleted")):
        if (folder / name).exists():
            return f"{label}: {problem}; give another checkpoint."
    if (folder / ".metadata").exists():
        return f"{label}: is an incomplete checkpoint ({manifest.NAME} is missing); give a complete one."
    if (folder / RUN).is_file():
        return f"{label}: is a run without a complete checkpoint; wait for one, or train it with checkpoint=sync."
    if runs := describe_runs_below(typed):
        return f"{label}: {runs}."
    return (
        f"{label}: holds no weights: neither a run's checkpoints or one of them ({manifest.NAME}), nor Hugging Face's "
        "config.json and *.safetensors, nor Meta's params.json and consolidated.NN.pth; correct the path."
    )
