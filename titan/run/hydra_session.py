"""Hydra, set up for one composition, with a guard of the files that it may merge; and Hydra's own node.

Of that titan supports output_subdir, verbose, env_set and callbacks, and rejects the rest; docs/configuration.md lists
what is supported.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from titan.config.settings import format_value
from titan.console.text import is_secret, redact_nested
from titan.errors import ConfigError, RunError
from titan.files.run_directory import FILES
from titan.run import hydra_private, trust
from titan.run.synonyms import check_optional, describe_value_error

VARIABLE = "TITAN_CONF"
"""The environment variable that names the user's own folders of configuration files."""
SEARCH_PATH = "hydra.searchpath"
"""What the primary configuration of a folder may name: further folders, and packages that Hydra imports."""
LONGEST_VALUE = 200
"""Characters of a value in a message."""
_DECODING = re.compile(r"\s*oc\.(decode|create)\s*:")
"""Resolvers that read a text as a configuration, with the interpolations in it."""
_CALL = re.compile(r"\$\{\s*oc\.env\s*:[^${}]*\}")
_READING = re.compile(r"\s*oc\.env\s*:\s*['\"]?(\w+)['\"]?\s*(,|$)")


def list_own_folders() -> list[str]:
    """Return the folders in $TITAN_CONF, absolute."""
    folders = [folder for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"{VARIABLE}={folder}: there is no such folder; correct the variable, or unset it.")
    return [os.path.abspath(folder) for folder in folders]


def guard_loader(loader: ConfigLoader, name: str, overrides: Collection[str]) -> None:
    """Let a loader check what each file that it merges from now on sets; raise ConfigError for the file `name` now.

    The files of a typed search path may start no programs and read no secrets, unless the user types these or trusts
    them. `hydra.searchpath=[...]`, --config-dir and --config-path name a folder for one command, such as one in a
    repository that was cloned. Its owner says nothing about its author: who clones owns the files. So a folder is the
    user's own where $TITAN_CONF names it, besides titan's and those of installed packages.
    """
    trusted_folders = (CONF, CONF.parent / "experiments", *map(Path, list_own_folders()))
    typed, packages = trust.list_typed(overrides), trust.list_packages(overrides)

    def check_file(result: ConfigResult, name: str, content: Any = None) -> None:
        scheme, _, folder = result.path.partition("://")
        path = Path(os.path.normpath(Path(os.path.abspath(folder), f"{name.removesuffix('.yaml')}.yaml")))
        is_in_trusted_folder = scheme == "file" and any(path.is_relative_to(folder) for folder in trusted_folders)
        # who names a package runs its code
        if is_in_trusted_folder or (scheme != "file" and not os.path.normpath(name).startswith("..")):
            return
        if content is None:
            content = OmegaConf.to_container(result.config, resolve=False)
        for key, value in trust.list_leaves("", content):
            risk, leaf = explain_file_risk(key, value), (key.removeprefix(trust.SWEPT), value)
            is_own = leaf[0] in typed or trust.is_listed(leaf, packages)
            if not risk or is_own or trust.was_typed((key, value)):
                continue
            text = format_value(value)
            text = text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
            typed_folder = os.path.abspath(folder if path.is_relative_to(os.path.abspath(folder)) else path.parent)
            folders = os.pathsep.join([*list_own_folders(), typed_folder])
            raise ConfigError(
                f"{leaf[0]}={text}: {path} sets this, which {risk}, and only the command line names its folder; if "
                f"you trust the folder, make it one of yours with export {VARIABLE}={folders}, or give {leaf[0]}=VALUE "
                "here."
            )

    source = next((source for source in loader.get_sources() if source.is_config(name)), None)
    if source is not None:  # which folders it adds, before Hydra searches them and imports packages
        result = source.load_config(name)
        searched = OmegaConf.select(result.config, SEARCH_PATH)
        folders = OmegaConf.to_container(searched) if OmegaConf.is_config(searched) else searched
        check_file(result, name, {SEARCH_PATH: folders})
    hydra_private.watch_files(loader, check_file)


def explain_file_risk(key: str, value: Any) -> str | None:
    """Return what a setting of a file would do that the user must have typed; None for others."""
    return "reads a secret" if _reads_secret(str(value)) else trust.explain_setting(key, value)


def _reads_secret(text: str) -> bool:
    """Return whether a value's interpolations read a variable of the environment that may be a secret."""
    for call in trust.find_resolvers(text):
        variable, decoding = _READING.match(call), _DECODING.match(call)
        is_unknown = "${" in call.partition(":")[0] or (call.lstrip().startswith("oc.env") and variable is None)
        decodes = decoding is not None and "$" in _CALL.sub("", call[decoding.end() :])
        if is_unknown or decodes or (variable is not None and is_secret(variable[1])):
            return True
    return False


PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(p for p in (PACKAGE / "conf", PACKAGE.parent / "conf") if p.is_dir())
"""The folder of configuration files: inside the package in a wheel, beside it in a checkout."""
CONFIG = "train"
"""The primary configuration in it."""
BASE = "1.3"
"""The version of Hydra whose defaults hold, as `hydra.runtime.version_base` records it."""


class ExtraConfigs(SearchPathPlugin):
    """Groups of others: packages with an entry point in `titan.plugins`, and the folders in $TITAN_CONF.

    They come after titan's own, so that they add choices and can't replace any. So do the folders that
    `hydra.searchpath` and --config-dir name on the command line: Hydra itself looks into the former only to compose,
    and not for the choices of a group.
    """

    search_folders: ClassVar[tuple[str, ...]] = ()
    """The folders of `hydra.searchpath`. A class variable, since Hydra makes the instance."""
    config_dir: ClassVar[str | None] = None
    """The folder of --config-dir, within `open_hydra`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in list_own_folders():
            search_path.append(VARIABLE, f"file://{folder}")
        for path in self.search_folders:
            search_path.append("hydra.searchpath in command-line", path)
        if self.config_dir:
            search_path.append("command-line", f"file://{os.path.abspath(self.config_dir)}")


@contextmanager
def open_hydra(args: argparse.Namespace | None = None) -> Iterator[ConfigLoader]:
    """Initialize Hydra for one composition; give the loader, which knows the choices."""
    GlobalHydra.instance().clear()
    ExtraConfigs.config_dir = getattr(args, "config_dir", None)
    folder = os.path.abspath(getattr(args, "config_path", None) or str(CONF))
    try:
        initialize_config_dir(folder, job_name="train", version_base=BASE)
        ExtraConfigs.config_dir = None
        yield GlobalHydra.instance().config_loader()
    finally:
        ExtraConfigs.config_dir = None
        GlobalHydra.instance().clear()


def compose_config(overrides: Sequence[str], name: str | None = None, mode: RunMode = RunMode.RUN) -> DictConfig:
    """Return what overrides compose, Hydra's own node included, within `open_hydra`.

    Raises:
        ConfigError: for a choice that does not exist, or has no name, and for a file that sets what only the user may.
    """
    loader = GlobalHydra.instance().config_loader()

    def list_choices(group: str) -> list[str]:
        return loader.get_group_options(group, ObjectType.CONFIG)

    guard_loader(loader, name or CONFIG, overrides)
    try:
        if mode == RunMode.RUN:
            cfg = compose(name or CONFIG, list(overrides), return_hydra_config=True)
        else:
            cfg = hydra_private.compose_mode(overrides, name or CONFIG, mode)
    except ValueError as error:
        raise ConfigError(describe_value_error(error, overrides, list_choices)) from error
    check_optional(list_choices, cfg)
    return cfg


JOB_LOGGING = ("default", "none", "disabled")
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
    groups = (group for group in ("hydra.job.env_set", "hydra.callbacks") if key.startswith(group))
    return next((f"{typed}: names are added one by one; write +{group}.NAME=VALUE." for group in groups), None)


def check_node(cfg: DictConfig) -> None:
    """Raise ConfigError for settings of Hydra that titan does not support."""
    if cfg.hydra.job.chdir:
        raise ConfigError(
            "hydra.job.chdir=true: paths are relative to the working directory of the command, which a run never "
            "changes; leave it out, results go to hydra.run.dir."
        )
    choice = cfg.hydra.runtime.choices.get("hydra/job_logging")
    overrides = [o for o in cfg.hydra.overrides.hydra if o.lstrip("+~").startswith("hydra.job_logging")]
    overrides += [] if choice in JOB_LOGGING else [f"hydra/job_logging={choice}"]
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
    content: Any = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    node = {key: value for key, value in content.pop("hydra").items() if key not in HELP_KEYS}
    parts = {"config": content, "hydra": {"hydra": node}, "overrides": node["overrides"]["task"]}
    subdir = cfg.hydra.output_subdir
    return {} if subdir is None else {f"{subdir}/{name}.yaml": redact_nested(part) for name, part in parts.items()}


def redact_config(cfg: Any) -> Any:
    """Return a copy of a part of the configuration with secrets redacted and interpolations unresolved."""
    return OmegaConf.create(redact_nested(OmegaConf.to_container(cfg, resolve=False)))


def build_options(cfg: DictConfig) -> tuple[str, ...]:
    """Return the options of the command line beside overrides, for the command that resumes the run."""
    sources = {source.provider: str(source.path) for source in cfg.hydra.runtime.config_sources}
    words = [] if sources.get("main") == str(CONF) else ["--config-path", sources["main"]]
    words += [] if cfg.hydra.job.config_name == CONFIG else ["--config-name", str(cfg.hydra.job.config_name)]
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
    node, words = OmegaConf.masked_copy(cfg, ["hydra"]), [str(o) for o in cfg.hydra.overrides.task]
    own_config = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return JobReturn(words, own_config, node, working_dir=os.getcwd(), task_name="train")
