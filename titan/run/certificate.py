"""Certificates: what `titan.prove` has shown of a layout, kept for `titan.train`. Free of torch.

A certificate is valid for runs with the same model, row length, layout, precision, recomputation, compilation,
optimizer and own code, of the same titan and torch. Seeds, learning rates, numbers of steps and data don't decide
whether a layout is right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan.config.settings import to_plain
from titan.console.text import redact_nested
from titan.errors import ConfigError
from titan.files import untrusted
from titan.files.atomic import write_atomic
from titan.files.platform import find_state_folder
from titan.parallelism.schema import DIMENSIONS
from titan.run import identity
from titan.run.run import Run, as_config
from titan.run.shrink import has_uneven_rows

KEY = "certificate"
"""Its key in run.yaml."""
AXES = ("model", "optimizer", "precision", "parallelism", "memory", "compile")
TRAINING = ("clip_norm", "loss_chunk", "z_loss", "label_smoothing", "loss_terms", "attention", "seq_len")
"""Settings of `training` that a layout treats."""
IGNORED = {
    "optimizer": ("lr", "weight_decay"),
    "compile": ("backend",),
    "parallelism": (*DIMENSIONS, "expert", "microbatches", "schedule"),
}
"""Settings that are numbers of the recipe only, that a shrunk run replaces, and that the key has resolved."""


@dataclass(frozen=True)
class Certificate:
    """A certificate that was read: which runs it is for, whether all checks held, and when it was made (ISO 8601)."""

    key: str
    hash: str
    passed: bool
    made: str
    content: Mapping[str, Any]

    def summarize(self) -> dict[str, Any]:
        """Return what run.yaml has of it."""
        return {"key": self.key, "hash": self.hash, "passed": self.passed, "made": self.made}


def compute_key(run: Run) -> str:
    """Return 16 hex digits of all that decides whether a run's layout is right."""
    config, code = as_config(run), identity.describe_code(run)
    settings = {axis: {k: v for k, v in config[axis].items() if k not in IGNORED.get(axis, ())} for axis in AXES}
    training = {name: config["training"][name] for name in TRAINING}
    hooks = {name: hook for name, hook in (run.hooks or {}).items() if hook.science}
    classes = {axis: identity.list_kinds(getattr(run, axis)) for axis in (*AXES, "training")}
    kind = {
        "settings": settings | {"training": training},
        "classes": classes,
        "hooks": [(name, to_plain(hook), identity.list_kinds(hook)) for name, hook in hooks.items()],
        "layout": run.layout.degrees() | {"expert": run.layout.expert},
        "rows": (min(2, run.microbatches), min(2, run.microbatch_rows), has_uneven_rows(run)),
        "stages": run.staging.layers,
        "schedule": run.parallelism.schedule,
        "masks": run.dataset.mask_documents,
        "async": run.checkpoint.mode == "async",
        "device": run.machine.device,
        # builds of one torch for CPUs and GPUs are the same
        "code": {name: code.get(name) for name in ("titan", "commit", "diff", "torchao", "own")}
        | {"torch": str(code.get("torch")).partition("+")[0]},
    }
    return _digest(redact_nested(kind))


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_folder() -> Path:
    """Return the folder of the user's certificates."""
    return find_state_folder() / "certificates"


def write(content: Mapping[str, Any], key: str) -> Path:
    """Write a certificate, and return its file.

    Args:
        content: "passed", "made" and all else that is shown.
    """
    redacted: dict[str, Any] = redact_nested({**content, "key": key})
    file = find_folder() / f"{key}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(redacted | {"hash": _digest(redacted)}, indent=1) + "\n")
    return file


def read(key: str) -> Certificate | None:
    """Return the certificate for a key; None where there is none, or where it is damaged or was changed."""
    try:
        content = untrusted.read_object(find_folder() / f"{key}.json", {"key": str, "passed": bool, "made": str})
        digest = content.pop("hash")
    except (OSError, ValueError, KeyError):
        return None
    if content["key"] != key or digest != _digest(content):
        return None
    return Certificate(key, digest, content["passed"], content["made"], content)


def find(run: Run) -> Certificate | None:
    """Return the certificate for a run; None where there is none."""
    return read(compute_key(run)) if find_folder().is_dir() else None


def check(run: Run) -> None:
    """Raise ConfigError where a run must have a valid certificate, and has none."""
    if run.cluster.certificate != "required":
        return
    found = find(run)
    if found is not None and found.passed:
        return
    problem = "its proof failed" if found is not None else "this layout has no valid certificate"
    raise ConfigError(
        f"cluster.certificate=required: {problem}, of this recipe and code; prove it with `python -m titan.prove` and "
        "the same overrides, or give cluster.certificate=off."
    )
