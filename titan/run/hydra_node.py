"""Hydra's own node: titan supports output_subdir, verbose, env_set and callbacks, and rejects the rest.

docs/configuration.md lists what is supported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from titan.console.text import redact_nested
from titan.errors import ConfigError, RunError
from titan.files.run_directory import FILES
from titan.run import hydra_private

LOGGING = ("default", "none", "disabled")
"""Choices of hydra/job_logging that ask for no other logging than titan's."""
KEPT_OVERRIDES = ("hydra.searchpath=", "hydra.output_subdir=", "hydra.job.", "hydra.callbacks.", "hydra/callbacks=")
"""Overrides of Hydra's node that all attempts of a run share."""
HELP_KEYS = ("hydra_help", "help")
"""Texts of --help, which Hydra leaves out of hydra.yaml."""
ON_JOB = ("on_job_start", "on_job_end")


def advise_key(key: str, typed: str) -> str | None:
    """Return the error message for a key of `hydra.*` or `hooks.*` that there is not; None for other keys."""
    if re.fullmatch(r"hooks\.[^.]+", key):
        return f"{typed}: there is no such hook yet; write +{key}={{_target_:MODULE.CLASS,...}}, or hooks=[NAME,...]."
    for group in ("hydra.job.env_set", "hydra.callbacks"):
        if key.startswith(group):
            return f"{typed}: names are added one by one; write +{group}.NAME=VALUE."
    return None


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings of Hydra that titan does not support."""
    if cfg.hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: paths are relative to the working directory of the command, which a run never "
            "changes; leave it out, results go to hydra.run.dir."
        )
    choice = cfg.hydra.runtime.choices.get("hydra/job_logging")
    overrides = [o for o in cfg.hydra.overrides.hydra if o.lstrip("+~").startswith("hydra.job_logging")]
    overrides += [] if choice in LOGGING else [f"hydra/job_logging={choice}"]
    if overrides:
        raise ConfigError(f"{overrides[0]}: ranks write log/rank-N.log of the run, and nothing else; leave it out.")
    subdir = cfg.hydra.output_subdir
    if subdir is not None and (not subdir.strip(". ") or "/" in subdir or subdir in FILES - {".hydra"}):
        raise ConfigError(f"hydra.output_subdir={subdir}: must name a new folder in the run's directory, or be null.")


def build_files(cfg: DictConfig) -> dict[str, Any]:
    """Return what the files of `hydra.output_subdir` say, by path in the run's directory; none where that is null.

    They have what Hydra writes, with secrets redacted and interpolations unresolved; `hydra_private.dump_yaml` gives
    their text.
    """
    subdir = cfg.hydra.output_subdir
    if subdir is None:
        return {}
    content: Any = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    node = {key: value for key, value in content["hydra"].items() if key not in HELP_KEYS}
    own_config = {key: value for key, value in content.items() if key != "hydra"}
    parts = {"config": own_config, "hydra": {"hydra": node}, "overrides": node["overrides"]["task"]}
    return {f"{subdir}/{name}.yaml": redact_nested(part) for name, part in parts.items()}


def redact_config(cfg: Any) -> Any:
    """Return a copy of a part of the configuration with secrets redacted and interpolations unresolved."""
    return OmegaConf.create(redact_nested(OmegaConf.to_container(cfg, resolve=False)))


def build_options(cfg: DictConfig, folder: str, name: str) -> tuple[str, ...]:
    """Return the options of the command line beside overrides, for the command that resumes the run."""
    sources = {source.provider: str(source.path) for source in cfg.hydra.runtime.config_sources}
    words = [] if sources.get("main") == folder else ["--config-path", sources["main"]]
    words += [] if cfg.hydra.job.config_name == name else ["--config-name", str(cfg.hydra.job.config_name)]
    words += ["--config-dir", sources["command-line"]] if "command-line" in sources else []
    return (*words, *(o for o in cfg.hydra.overrides.hydra if o.lstrip("+").startswith(KEPT_OVERRIDES)))


class HydraCallbacks:
    """The instantiated callbacks of a command line; `titan.config.modules.check_hydra` checks what they import."""

    def __init__(self, cfg: DictConfig, remote: bool = False, instances: Any = None) -> None:
        """Instantiate them.

        Args:
            remote: the job does not run in a process of this command.
            instances: the instances that Hydra has made, if any.
        """
        self.config = cfg
        try:
            self.callbacks = instances or hydra_private.Callbacks(cfg)
        except InstantiationException as error:
            reason = " ".join(str(error).split("\n")[0].split()).rstrip(".:")
            raise ConfigError(f"hydra.callbacks: {reason}; correct the callback's settings.") from error
        for callback in self.callbacks.callbacks if remote else ():
            names = [n for n in ON_JOB if getattr(type(callback), n, None) not in (None, getattr(Callback, n))]
            if names:
                raise ConfigError(
                    f"hydra.callbacks: {type(callback).__name__}.{names[0]} would be called where no job runs; leave "
                    "the callback out, or run jobs one after the other on this machine (hydra/launcher=local, "
                    "at_once=1)."
                )

    def around_run(self, body: Callable[[], int], name: str) -> int:
        """Execute a single run with all its callbacks; return its exit code."""
        if not self.callbacks.callbacks:
            return body()
        self.callbacks.on_run_start(config=self.config, config_name=name)
        job_return = _build_job_return(self.config)
        try:
            return self.around_job(body, self.config, job_return)
        finally:
            self.callbacks.on_run_end(config=self.config, config_name=name, job_return=job_return)

    def around_job(self, body: Callable[[], int], cfg: DictConfig, job_return: JobReturn | None = None) -> int:
        """Execute a job of this process with its callbacks; return its exit code."""
        if not self.callbacks.callbacks:
            return body()
        job_return = job_return or _build_job_return(cfg)
        with env_override(cfg.hydra.job.env_set):
            self.callbacks.on_job_start(config=cfg, task_function=lambda _: body())
            try:
                code = body()
                job_return.status = JobStatus.FAILED if code else JobStatus.COMPLETED
                job_return.return_value = RunError(f"the run ended with exit code {code}.") if code else code
                return code
            except BaseException as error:
                job_return.status, job_return.return_value = JobStatus.FAILED, error
                raise
            finally:
                self.callbacks.on_job_end(config=cfg, job_return=job_return)


def _build_job_return(cfg: DictConfig) -> JobReturn:
    job = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    node = OmegaConf.masked_copy(cfg, ["hydra"])
    overrides = [str(o) for o in cfg.hydra.overrides.task]
    return JobReturn(overrides=overrides, cfg=job, hydra_cfg=node, working_dir=os.getcwd(), task_name="train")
