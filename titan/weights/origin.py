"""Where weights come from: which format a folder has, and the model that it says it holds. Free of torch."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan.checkpoint import manifest, select
from titan.checkpoint.manifest import Manifest
from titan.checkpoint.remote import INDEX
from titan.config import settings
from titan.config.optional import optional_package
from titan.console.text import safe
from titan.dataset.sources.hub import hub_error
from titan.errors import ConfigError
from titan.model.schema import Decoder
from titan.weights import model_config
from titan.weights.hf_config import schema_of

_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WANTED = ("model*.safetensors", "*.json", "tokenizer.model", "*.jinja")
"""What is fetched of a model on the hub."""


@dataclass(frozen=True)
class Origin:
    """Weights that were found.

    Attributes:
        kind: the format, or hub for a name there, which is in Hugging Face's.
        place: the folder; of a run the one of its last complete checkpoint, of the hub its name there.
        label: what the user gave, for messages.
    """

    kind: Literal["titan", "hf", "meta", "hub"]
    place: str
    label: str

    @property
    def folder(self) -> Path:
        """The folder, fetched once if it is on the hub.

        Raises:
            ConfigError: when it can't be had.
        """
        return Path(self.place) if self.kind != "hub" else self._fetch("snapshot_download", allow_patterns=_WANTED)

    def model(self) -> Any:
        """The model that the weights say they are of; None for Meta's format, whose tensors tell the rest.

        Raises:
            ConfigError: when titan has no such model, or what describes it is broken.
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
        """What a function of huggingface_hub fetches, with the user's login, into its cache."""
        hub = optional_package("huggingface_hub", self.label)
        repository, _, revision = self.place.partition("@")
        try:
            return Path(getattr(hub, how)(repository, revision=revision or None, **what))
        except Exception as error:
            raise hub_error(error, self.label, self.label) from error


def find(path: str | Path, setting: str = "checkpoint.weights") -> Origin:
    """What lies at `path`.

    Args:
        path: a folder, or OWNER/NAME[@REVISION] on Hugging Face's hub where there is no such folder.
        setting: what the user gave it as, for messages.

    Raises:
        ConfigError: when there are no weights; names what was looked for.
    """
    label, folder = f"{setting}={path}", Path(path).expanduser().absolute()
    if not folder.exists() and isinstance(path, str) and _ON_HUB.fullmatch(path):
        return Origin("hub", path, label)
    if not folder.is_dir():
        what = "is a file; give the folder that it lies in, or" if folder.exists() else "there is no such directory;"
        raise ConfigError(f"{label}: {what} correct the path.")
    if any((folder / name).exists() for name in (manifest.NAME, "checkpoints", INDEX)):
        return Origin("titan", _last(select.load_named(str(path), setting)), label)
    if any(folder.glob("consolidated.*.pth")) or (folder / "params.json").exists():
        return Origin("meta", str(folder), label)
    if any(folder.glob("*.safetensors*")) or (folder / "config.json").exists():
        return Origin("hf", str(folder), label)
    raise ConfigError(_nothing(folder, label))


def _last(found: select.Candidate) -> str:
    """The folder of a run's last complete checkpoint; those that were passed over are told."""
    for note in found.notes:
        print(f"titan: {safe(note)}; {Path(found.path).name} is taken", file=sys.stderr)
    return found.path


def model_of(found: Manifest, label: str) -> Any:
    """The model of a checkpoint.

    Raises:
        ConfigError: when its manifest describes none.
    """
    try:
        return settings.build(Decoder, found.model, "model")
    except ConfigError as refusal:
        raise ConfigError(f"{label}: its {manifest.NAME} describes no model: {refusal}") from None


def _nothing(folder: Path, label: str) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return f"{label}: has weights as pytorch_model.bin, which titan doesn't read; save them as safetensors."
    for name, what in ((manifest.BROKEN, "was found damaged"), (manifest.RETIRED, "is about to be deleted")):
        if (folder / name).exists():
            return f"{label}: {what}; give another checkpoint."
    if (folder / ".metadata").exists():
        return f"{label}: is a save that did not end ({manifest.NAME} is missing); give a complete checkpoint."
    return (
        f"{label}: holds no weights: neither a run's checkpoints or one of them ({manifest.NAME}), nor Hugging Face's "
        "config.json and *.safetensors, nor Meta's params.json and consolidated.NN.pth; correct the path."
    )
