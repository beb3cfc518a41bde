"""Find weights: the format of a folder or a hub's repository, and the model that it describes. Free of torch."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import INDEX
from titan.config import modules, settings
from titan.config.optional import import_optional
from titan.console.text import safe
from titan.dataset.sources.hub import translate_hub_error
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.weights import model_config
from titan.weights.hf_config import schema_of

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WANTED = ("model*.safetensors", "*.json", "tokenizer.model", "*.jinja")
"""The files to fetch from the hub."""


@dataclass(frozen=True)
class Origin:
    """Weights that were found.

    Attributes:
        kind: the format; "hub" for a repository of the hub, in Hugging Face's format.
        place: the folder (for a run that of its last complete checkpoint), or the repository's name.
        label: the user's setting, for messages.
    """

    kind: Literal["titan", "hf", "meta", "hub"]
    place: str
    label: str

    @property
    def folder(self) -> Path:
        """The folder; a repository of the hub is fetched once.

        Raises:
            ConfigError: when it can't be fetched.
        """
        return Path(self.place) if self.kind != "hub" else self._fetch("snapshot_download", allow_patterns=_WANTED)

    def model(self) -> Any:
        """Return the model that the folder describes; None for Meta's format, whose description is incomplete.

        Raises:
            ConfigError: when titan has no such model, or the description is broken.
        """
        if self.kind == "titan":
            found = manifest.read(Path(self.place))
            return None if found is None else model_of(found, self.label)
        if self.kind == "meta":
            return None
        on_hub = self.kind == "hub"
        file = self._fetch("hf_hub_download", filename="config.json") if on_hub else Path(self.place) / "config.json"
        return schema_of(model_config.load(file, self.label), self.label)

    def _fetch(self, how: str, **what: Any) -> Path:
        """Fetch with a function of huggingface_hub and the user's login, into its cache."""
        hub = import_optional("huggingface_hub", self.label)
        repository, _, revision = self.place.partition("@")
        try:
            return Path(getattr(hub, how)(repository, revision=revision or None, **what))
        except Exception as error:
            raise translate_hub_error(error, self.label, self.label) from error


def find(path: str | Path, setting: str = "checkpoint.weights") -> Origin:
    """Find the weights at `path`.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub if there is no such folder.
        setting: the name of the user's setting, for messages.

    Raises:
        ConfigError: when there are no weights.
    """
    label, folder = f"{setting}={path}", Path(path).expanduser().absolute()
    if not folder.exists() and isinstance(path, str) and _ON_HUB.fullmatch(path):
        return Origin("hub", path, label)
    if not folder.is_dir():
        what = "is a file; give its folder, or" if folder.exists() else "there is no such directory;"
        raise ConfigError(f"{label}: {what} correct the path.")
    if any((folder / name).exists() for name in (manifest.NAME, "checkpoints", INDEX)):
        return Origin("titan", _last(select.load_named(str(path), setting)), label)
    if any(folder.glob("consolidated.*.pth")) or (folder / "params.json").exists():
        return Origin("meta", str(folder), label)
    if any(folder.glob("*.safetensors*")) or (folder / "config.json").exists():
        return Origin("hf", str(folder), label)
    raise ConfigError(_nothing(folder, label))


def _last(found: select.CheckpointCandidate) -> str:
    """Return the folder of a run's last complete checkpoint, and log those that were skipped."""
    for note in found.notes:
        print(f"titan: {safe(note)}; using {Path(found.path).name}", file=sys.stderr)
    return found.path


def model_of(found: Manifest, label: str) -> Any:
    """Return the model of a checkpoint, also of a class in a package that $TITAN_MODULES names.

    Raises:
        ConfigError: when its manifest describes no valid model, or one of another class.
    """
    allowed, name = modules.list_trusted_packages(()), str(found.model.get("_target_", ""))
    package = name.partition(".")[0]
    if settings.is_foreign(found.model) and package not in ("experiments", *allowed):
        raise ConfigError(
            f"{label}: its model is of the class {name}; if you trust it, set the environment variable "
            f"{modules.VARIABLE}={package}."
        )
    try:
        return settings.build(Decoder, found.model, "model", allowed)
    except ConfigError as error:
        raise ConfigError(f"{label}: its {manifest.NAME} describes no model: {error}") from None


def _nothing(folder: Path, label: str) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return f"{label}: has its weights in pytorch_model.bin, which titan doesn't read; save them as safetensors."
    for name, what in ((manifest.DAMAGED, "is corrupt"), (manifest.RETIRED, "is about to be deleted")):
        if (folder / name).exists():
            return f"{label}: {what}; give another checkpoint."
    if (folder / ".metadata").exists():
        return f"{label}: is an incomplete checkpoint ({manifest.NAME} is missing); give a complete one."
    return (
        f"{label}: holds no weights: neither a run's checkpoints or one of them ({manifest.NAME}), nor Hugging Face's "
        "config.json and *.safetensors, nor Meta's params.json and consolidated.NN.pth; correct the path."
    )
