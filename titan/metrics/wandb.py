"""Runs at Weights & Biases, offline or online."""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from titan.metrics.schema import Metrics
from titan.metrics.tracker_run import (
    RunDescription,
    Warn,
    check_writable,
    extract_numbers,
    extract_scalars,
    hide_secrets,
    server_answers,
    summarise_error,
)

MAX_TAG_LENGTH = 64
"""Characters of a tag that W&B accepts."""
INIT_SECONDS = 10.0
"""wandb's timeout for starting a run; without a network it fails after about three times this."""

WANDB_URL = "https://api.wandb.ai"


def build_wandb_options(metrics: Metrics, description: RunDescription) -> dict[str, Any]:
    """Return what describes a run to wandb.init."""
    tags = dict.fromkeys(filter(None, [*metrics.wandb_tags, description.sweep, *description.labels]))
    return {
        "id": description.run_id,
        "group": metrics.wandb_group or description.group_id,
        "name": description.name,
        "tags": [tag[:MAX_TAG_LENGTH] for tag in tags],
        "config": description.metadata,
    }


class WeightsAndBiases:
    """A run at Weights & Biases, or its files for a later `wandb sync`."""

    def __init__(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], warn: Warn) -> None:
        """Open the run; offline, with a warning, where online was asked for but is not possible.

        Args:
            metrics: project, entity and mode.
            directory: where wandb/ is created.
            settings: see `build_wandb_options`.
        """
        check_writable(directory)  # wandb would silently write to /tmp
        run = self._start_online(metrics, directory, settings, warn) if metrics.wandb_mode == "online" else None
        self._run: Any = run or _start_wandb(metrics, directory, settings, "offline")
        self._run.config.update(settings["config"], allow_val_change=True)  # a resumed run has its first attempt's
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _start_online(self, metrics: Metrics, directory: Path, settings: Mapping[str, Any], warn: Warn) -> Any:
        """Return the online run; None, with a warning, where that is not possible."""
        obstacle = find_online_obstacle()
        if not obstacle:
            try:
                return _start_wandb(metrics, directory, settings, "online")
            except Exception as error:
                obstacle = summarise_error(error)
                _tear_down_wandb()
        warn(f"metrics.wandb_mode=online: {obstacle}; W&B stays offline, `wandb sync` sends its files later.")
        return None

    def log(self, record: Mapping[str, Any]) -> None:
        """Log the numbers of a record over the metric `step`."""
        if "step" in record:
            self._run.log({"step": int(record["step"]), **extract_scalars(record)})

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the final result into the run's summary and close it."""
        self._run.summary.update({f"result/{name}": value for name, value in extract_numbers(result).items()})
        self._run.finish()


def _start_wandb(
    metrics: Metrics, directory: Path, settings: Mapping[str, Any], mode: Literal["online", "offline"]
) -> Any:
    import wandb

    sys.argv[:] = map(hide_secrets, sys.argv)  # W&B records it; nothing reads it any more
    options = wandb.Settings(
        init_timeout=INIT_SECONDS,
        finish_timeout=60 * metrics.wandb_finish_minutes,
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,  # env.json has the commit; a remote's URL may contain a password
        disable_job_creation=True,
        x_save_requirements=False,
    )
    # wandb sends its own error reports even offline, and without a network they delay the process's end by 10 s
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb.setup(wandb.Settings(silent=True))  # else the login prints before the run's settings apply
    return wandb.init(
        project=metrics.wandb_project,
        entity=metrics.wandb_entity,
        dir=str(directory),
        mode=mode,
        resume="allow",
        reinit="create_new",
        save_code=False,
        settings=options,
        **settings,
    )


def _tear_down_wandb() -> None:
    """End wandb's background process: it has the id of the run that it failed to start."""
    import wandb

    wandb.teardown()


def find_online_obstacle(environ: Mapping[str, str] = os.environ, seconds: float = 5.0) -> str:
    """Return why wandb can't go online, or "": no API key (a run never prompts for one), or no answer."""
    if not has_wandb_key(environ):
        return "no API key is stored (`wandb login` stores one)"
    url = environ.get("WANDB_BASE_URL", WANDB_URL)
    return "" if server_answers(url, seconds) else f"{url} does not answer within {seconds:g} s"


def has_wandb_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether wandb can log in without a prompt: by WANDB_API_KEY or by the netrc file that `wandb login` writes."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://", "", environ.get("WANDB_BASE_URL", WANDB_URL)).split("/")[0].split(":")[0]
    home = Path(environ.get("HOME", "~")).expanduser()
    for file in [Path(environ["NETRC"])] if "NETRC" in environ else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(file)).authenticators(host) is not None:
                return True
    return False
