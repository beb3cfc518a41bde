"""Hydra in, checked Run out.

The story of a command line: Hydra composes `conf/` and the overrides; `freeze` turns the result into a typed, frozen
`Run` and checks it; whatever can't work ends in one plain sentence and exit code 2. Hydra's own main would exit with 1,
print several lines and make the run's directory before anything is checked: so titan drives Hydra itself, and leaves
to it what only shows (`--cfg`, `--info`, completion) and the sweep (`-m`), whose points titan's launcher runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal import utils as hydra_utils
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launchers import foreign
from titan.cluster import devices
from titan.cluster.devices import Machine
from titan.cluster.schema import Cluster
from titan.config import help as help_text
from titan.config import modules, settings
from titan.config.arguments import version
from titan.config.settings import nearest
from titan.console.text import is_secret, redact, redacted
from titan.dataset.schema import KINDS, Dataset
from titan.errors import ConfigError, exit_code
from titan.model.schema import Llama, Qwen3
from titan.optimizer.schema import SGD, AdamW, Muon
from titan.run import command_line, hydra_node
from titan.run.paths import check_name
from titan.run.recipe import Recipe, Run
from titan.run.resolve import resolve
from titan.sweep.schema import Sweep

here = Path(__file__).resolve().parents[1]
CONF = next(p for p in (here / "conf", here.parent / "conf") if p.is_dir())
"""The configuration's folder: inside the package in a wheel, beside it in a checkout."""
CONFIG = "train"
OPTIONAL = ("recipe", "sweep")
"""Groups of which none need be chosen."""
PLUGGABLE: dict[str, dict[str, Any]] = {
    "model": {"llama": Llama, "qwen3": Qwen3},
    "dataset": {**KINDS, "base": Dataset},
    "optimizer": {"adamw": AdamW, "sgd": SGD, "muon": Muon},
}
"""Schemas of the axes that have several kinds: YAML files take their defaults from `/schema/AXIS/KIND`. A dataset of a
class of one's own takes those that all have in common from `/schema/dataset/base`."""


ADVICE = {
    "Could not append to config.": "there is such a setting already; write it without the +",
    "Multiple values for": "the axis has a choice already; write it without the +",
    "force-add of config groups": "the axis has a choice already; write it without the ++",
    "Ambiguous value for argument": "one value is expected; write [a,b] for a list, or add -m to run each",
    "Override ": "there is no such axis; see --help",
}
"""What to say in place of Hydra's messages that begin so."""


class OtherConf(SearchPathPlugin):
    """Groups of others: packages with an entry point in `titan.plugins`, and the folders in $TITAN_CONF.

    They come after titan's own, so that they add choices and can't replace any. So does what `hydra.searchpath` names
    on the command line: Hydra itself looks there only when it composes, and not for what there is to choose from.
    """

    asked: ClassVar[tuple[str, ...]] = ()
    """The folders that the command line names; Hydra makes the instance."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas of its own
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in filter(None, os.environ.get("TITAN_CONF", "").split(os.pathsep)):
            search_path.append("TITAN_CONF", f"file://{os.path.abspath(folder)}")
        for path in self.asked:
            search_path.append("hydra.searchpath in command-line", path)


def register() -> None:
    """Tell Hydra the schemas, the other folders and the launcher; calling it again changes nothing."""
    store = ConfigStore.instance()
    for axis, kinds in PLUGGABLE.items():
        for kind, cls in kinds.items():
            store.store(name=kind, group=f"schema/{axis}", node=settings.defaults(cls))
    fixed = settings.defaults(Recipe)
    chosen = dict.fromkeys(PLUGGABLE, settings.MISSING)
    store.store(name="run", group="schema", node=fixed | chosen | {"sweep": settings.defaults(Sweep)})
    Plugins.instance().register(OtherConf)
    from launchers import plugin

    plugin.register()


def command(argv: Sequence[str] | None, job: Callable[[Run], int], ranks: int | None = None) -> int:
    """Carry out a command line: compose, check, then `job`.

    Args:
        argv: the arguments; None: those of this process.
        job: runs one checked Run and returns its exit code.
        ranks: how many ranks a launcher has started already; None when titan is to start them.

    Returns:
        The exit code: 0 done, 1 a failed run, 2 a refusal, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _command(arguments, job, ranks))


def composed(overrides: Sequence[str], ranks: int | None = None, elsewhere: bool = False) -> Run:
    """The checked Run of a list of overrides, for programs; see `freeze`; raises `ConfigError`."""
    register()
    with _plainly(overrides), _Session() as hydra:
        trusted = modules.trusted(overrides)
        return freeze(_compose(hydra, list(overrides)), ranks=ranks, elsewhere=elsewhere, trusted=trusted)


def freeze(
    cfg: DictConfig,
    directory: str | None = None,
    ranks: int | None = None,
    elsewhere: bool = False,
    machine: Callable[[Cluster], Machine] | None = None,
    trusted: tuple[str, ...] = (),
) -> Run:
    """Turn what Hydra composed, its own node included, into a typed and checked `Run`.

    Args:
        cfg: the composed configuration.
        directory: where results go; None: `hydra.run.dir`.
        ranks: see `titan.run.resolve.resolve`.
        elsewhere: it is to run on the nodes that `cluster` describes, not on this machine.
        machine: finds out what the run's machine has; None: look now.
        trusted: packages that the user lets it import, whatever configuration files say:
            `titan.config.modules.trusted`.

    Raises:
        ConfigError: for what can't work.
    """
    HydraConfig.instance().set_config(cfg)
    if str(cfg.name) and not str(cfg.hydra.run.dir).strip():  # the name first: the directory follows from it
        raise ConfigError("hydra.run.dir=: names no directory; give one, or name=NAME.")
    hydra_node.check(cfg)
    directory = os.path.abspath(directory or str(cfg.hydra.run.dir))
    settings.check_text(directory, f"hydra.run.dir={directory}")
    hydra_node.place(cfg, directory)
    recipe = _typed(cfg, trusted)
    if machine is None:
        found = devices.elsewhere(recipe.cluster) if elsewhere else devices.detect(recipe.cluster.device)
    else:
        found = machine(recipe.cluster)
    choices = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items() if k in recipe.axes()}
    typed: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    overrides = tuple(redact(str(override)) for override in typed)
    return resolve(
        recipe,
        found,
        directory,
        ranks=ranks,
        elsewhere=elsewhere,
        choices=choices,
        overrides=overrides,
        hydra=hydra_node.files(cfg, _job(cfg)),
        options=hydra_node.options(cfg, str(CONF), CONFIG),
    )


def _typed(cfg: DictConfig, trusted: tuple[str, ...]) -> Recipe:
    HydraConfig.instance().set_config(cfg)
    content: Any = OmegaConf.to_container(_job(cfg), resolve=True)
    if not isinstance(content, dict):
        raise ConfigError("the configuration is not a mapping.")
    _warn_of_secrets(OmegaConf.to_container(_job(cfg), resolve=False), redacted(content))
    settings.build(Sweep, content.pop("sweep", {}), "sweep")
    if cfg.hydra.job.env_set and isinstance(content.get("cluster"), dict):
        ours, theirs = content["cluster"].get("environment") or {}, OmegaConf.to_container(cfg.hydra.job.env_set)
        content["cluster"]["environment"] = {**ours, **theirs}  # type: ignore[dict-item]
    modules.check(content.get("modules") or [], trusted)
    settings.check_targets(content, trusted)
    if settings.is_foreign(content):
        _check_all_else(content)
    built: Recipe = settings.build(Recipe, content, allowed=trusted)
    return built


def _check_all_else(content: dict[str, Any]) -> None:
    """Refuse what can be refused without code of others, before that is imported."""
    check_name(str(content.get("name")))
    own = {axis: value for axis, value in content.items() if not settings.is_foreign(value)}
    built = settings.parts(Recipe, own)
    for axis in ("model", "training", "parallelism", "dataset", "cluster"):
        if axis in built:
            built[axis].check()


def _warn_of_secrets(written: Any, content: Any, path: str = "") -> None:
    """Warn where `${oc.env:NAME}`, as `written` in files, brings a secret into `content`, as run.yaml will hold it."""
    if isinstance(written, dict):
        for key, value in written.items():
            _warn_of_secrets(value, content[key], f"{path}.{key}".lstrip("."))
    elif isinstance(written, list):
        for value, text in zip(written, content, strict=True):
            _warn_of_secrets(value, text, path)
    elif isinstance(written, str):
        for name in _ENVIRONMENT.findall(written):
            if is_secret(name) and (os.environ.get(name) or "\n") in str(content):
                _warn(
                    f"{path}={written}: the value of {name} goes into run.yaml and to trackers; let the library that "
                    "needs it read it from the environment."
                )


_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")


@functools.cache
def _warn(sentence: str) -> None:
    """Say a sentence on stderr, once: the points of a grid have the same to say."""
    print(f"titan: warning: {sentence}", file=sys.stderr)


def recipe(arguments: Sequence[str]) -> Recipe:
    """The typed choices of a command line, whether or not this machine can run them.

    Args:
        arguments: the command line.

    Raises:
        ConfigError: for what is no choice or setting, and for options that only show something.
    """
    register()
    args = command_line.parse(arguments)
    if command_line.asks_to_show(args):
        raise ConfigError("-m, --cfg, --info and the like are for titan.train; leave them out.")
    with _plainly(args.overrides), _Session(args) as hydra:
        command_line.check(args)
        return _typed(_compose(hydra, args.overrides, args.config_name), modules.trusted(args.typed))


def _command(arguments: list[str], job: Callable[[Run], int], ranks: int | None) -> int:
    from launchers import plugin

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting with 1
    register()
    args = command_line.parse(arguments)
    with _plainly(args.overrides):
        command_line.check(args)
        if args.version:
            print(version())
            return 0
        if args.help:
            with _Session(args) as hydra:
                print(help_text.text(hydra.config_loader, Recipe.axes()))
            return 0
        if not command_line.asks_to_show(args):
            cfg = _composed_as(args)
            args.multirun = cfg.hydra.mode == RunMode.MULTIRUN  # a file may say so
        if command_line.asks_to_show(args):
            return _hand_to_hydra(args)
        launcher, trusted = plugin.alone(cfg) if ranks is None else None, modules.trusted(args.typed)
        run = freeze(cfg, ranks=ranks, elsewhere=launcher is not None, trusted=trusted)
        calls = hydra_node.Calls(cfg, elsewhere=launcher is not None)
    return calls.around_run(lambda: plugin.one(launcher, run, cfg) if launcher else job(run), CONFIG)


def _composed_as(args: argparse.Namespace) -> DictConfig:
    """What the command line of one run composes; with `hydra.verbose` Hydra prints from what."""
    with _Session(args) as hydra:
        cfg = _compose(hydra, args.overrides, args.config_name)
        if not args.resumed:  # a trial of a named grid goes on alone
            _check_no_grid(cfg)
        modules.check_hydra(cfg, args.typed)
        hydra_node.say(hydra, cfg, args.config_name or CONFIG, args.overrides)
    return cfg


def _check_no_grid(cfg: DictConfig) -> None:
    """Refuse a named grid where one run was asked for, which would pass over all that it varies."""
    sweep = cfg.hydra.runtime.choices.get("sweep")
    if sweep not in (None, "null"):
        raise ConfigError(f"sweep={sweep}: is a grid of runs; add -m.")


def _hand_to_hydra(args: argparse.Namespace) -> int:
    named = [o.partition("=")[2] for o in args.overrides if o.startswith("name=")]
    if args.multirun and named:
        command_line.check_grid_name(named[-1], args.overrides)
        args.overrides.append(f"hydra.sweep.dir=runs/{named[-1]}")
    from launchers import plugin

    if args.multirun:
        plugin.GridLauncher.trusted = modules.trusted(args.overrides)
        with _Session(args) as hydra:
            modules.check_hydra(_compose(hydra, args.overrides, args.config_name, RunMode.MULTIRUN), args.overrides)
    try:
        with _showing() if args.cfg or args.info else contextlib.nullcontext():
            hydra_utils._run_hydra(args, hydra_utils.get_args_parser(), _never, str(CONF), args.config_name or CONFIG)
    except SystemExit as leave:
        if args.cfg and leave.code:
            raise ConfigError(f"--package {args.package}: no such part of the configuration; give an axis.") from None
        return leave.code if isinstance(leave.code, int) else 2
    except ValueError as error:
        raise ConfigError(_value_error(error, args.overrides)) from error
    finally:
        plugin.tidy()
    return plugin.exit_code() if args.multirun else 0


@contextlib.contextmanager
def _showing() -> Iterator[None]:
    """Show what Hydra prints without its secrets, and nothing of what it has to say beside."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        print(redact(out.getvalue()), end="")


def _never(cfg: DictConfig) -> None:
    """Stands where Hydra wants a task function; titan's launcher takes its place."""
    raise ConfigError("hydra/launcher: this launcher is not titan's; choose hydra/launcher=local.")


class _Session:
    """Hydra, set up for one composition."""

    def __init__(self, args: argparse.Namespace | None = None) -> None:
        self.folder = getattr(args, "config_path", None) or str(CONF)
        self.extra = getattr(args, "config_dir", None)

    def __enter__(self) -> Hydra:
        GlobalHydra.instance().clear()
        path = hydra_utils.create_automatic_config_search_path(None, None, self.folder)
        if self.extra:
            before = SearchPathQuery(provider="schema")  # Hydra wants that one to stay the last
            path.prepend("command-line", f"file://{os.path.abspath(self.extra)}", before)
        return Hydra.create_main_hydra2("train", path)

    def __exit__(self, *error: object) -> None:
        GlobalHydra.instance().clear()


def _compose(hydra: Hydra, overrides: list[str], name: str | None = None, mode: RunMode = RunMode.RUN) -> DictConfig:
    try:
        cfg = hydra.compose_config(
            config_name=name or CONFIG, overrides=overrides, run_mode=mode, with_log_configuration=False
        )
    except ValueError as error:
        raise ConfigError(_value_error(error, overrides)) from error
    check_optional(lambda group: hydra.config_loader.get_group_options(group, ObjectType.CONFIG), cfg)
    return cfg


def check_optional(known: Callable[[str], Sequence[str]], cfg: DictConfig) -> None:
    """Refuse an unknown recipe or sweep, which Hydra passes over because these groups are optional.

    Args:
        known: the choices that there are in a group.
        cfg: what was composed.

    Raises:
        ConfigError: with those that there are.
    """
    for group in OPTIONAL:
        choice = cfg.hydra.runtime.choices.get(group)
        if choice not in (None, "null") and choice not in (there := known(group)):
            raise ConfigError(_no_such_choice(group, str(choice), there))


def _no_such_choice(axis: str, choice: str, known: Sequence[str]) -> str:
    choices = f" Choices: {', '.join(known)}." if known else " There are none here."
    return f"{axis}={choice}: there is no such choice{nearest(choice, known)}{choices}"


def _value_error(error: ValueError, overrides: Sequence[str]) -> str:
    """What to say of a `ValueError` of Hydra's: mostly of an axis whose choice is a number or null."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if key in ("", *Recipe.axes()) and not isinstance(override.value(), (str, list)):
            return f"{override.input_line}: expected the name of a choice, AXIS=CHOICE; see --help."
    return f"{' '.join(str(error).split()).rstrip('.')}."


def _job(cfg: DictConfig) -> DictConfig:
    """The configuration without Hydra's own node."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


class _plainly:
    """Turn what Hydra and OmegaConf raise into a refusal of one sentence."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = overrides

    def __enter__(self) -> None:
        OtherConf.asked = command_line.search_path(self.overrides)
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.filterwarnings("error", ".* is not available", UserWarning)  # a folder to search that isn't there

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.warnings.__exit__(None, None, None)
        OtherConf.asked = ()
        if isinstance(error, (HydraException, OmegaConfBaseException, UserWarning)):
            raise ConfigError(_own_refusal(error) or self._sentence(error)) from error

    def _sentence(self, error: BaseException) -> str:
        if isinstance(error, MissingConfigException) and error.options is not None:
            return self._unknown_choice(error)
        if isinstance(error, OverrideParseException):
            return f"{error.override}: not understood; write AXIS=CHOICE or AXIS.SETTING=VALUE, quoted where special."
        if isinstance(error, MissingConfigException):
            return f"--config-name {error.missing_cfg_file}: there is no such configuration; leave it out."
        if isinstance(error, UserWarning):
            path = str(error).partition("path=")[2].removesuffix(" is not available.")
            return f"hydra.searchpath=[{path}]: there is no such folder; write [file:///FOLDER], with an absolute path."
        if isinstance(error, OmegaConfBaseException) and error.full_key:
            return self._interpolation(error)
        text = " ".join(str(error).partition("full_key:")[0].split())
        for beginning, advice in ADVICE.items():
            if text.startswith(beginning):
                return f"{self._meant(text)}: {advice}."
        cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
        unknown = re.match(r"Could not override '([^']+)'", text)
        if unknown:
            return self._unknown_setting(unknown[1])
        text = text.removeprefix("Error merging override ")
        if cause is None:
            return text.rstrip(".") + "."
        return f"{text}: {' '.join(str(cause).split('full_key')[0].split()).rstrip('.')}; give another value."

    def _interpolation(self, error: OmegaConfBaseException) -> str:
        reason = " ".join(str(error).split("full_key")[0].split()).rstrip(".")
        return f"{self._typed(str(error.full_key))}: {reason}; correct what stands in the braces."

    def _meant(self, text: str) -> str:
        """The override that `text` quotes, or else the last one that names what it names."""
        quoted = [o for o in self.overrides if o in text or re.search(rf"\b{re.escape(_key(o))}\b", text)]
        return max(quoted, key=len, default=text.rstrip("."))

    def _typed(self, key: str) -> str:
        return next((o for o in self.overrides if _key(o) == key), key)

    def _unknown_choice(self, error: MissingConfigException) -> str:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and (advice := foreign.launcher(option)):
            return advice
        return _no_such_choice(group, option, error.options or ())

    def _unknown_setting(self, key: str) -> str:
        typed = self._typed(key)
        if key in OPTIONAL:  # its folder is there only when there are any
            return _no_such_choice(key, typed.partition("=")[2], ())
        if advice := foreign.setting(key, typed) or hydra_node.advice(key, typed):
            return advice
        known = self._known()
        elsewhere = any(name.endswith(f".{key}") for name in known)
        hint = nearest(key, Recipe.axes()) if "." not in key and not elsewhere else "."
        hint = nearest(key, known) if hint == "." else hint
        return f"{typed}: there is no such setting{hint} See --help and --cfg job."

    def _known(self) -> list[str]:
        """Every name that may stand before an equals sign, for the choices on this command line."""
        parse = OverridesParser.create().parse_override
        chosen = [o for o in self.overrides if _key(o) in Recipe.axes() and not parse(o).is_sweep_override()]
        try:
            with _Session() as hydra:
                cfg = _compose(hydra, chosen)
        except (HydraException, OmegaConfBaseException):
            return list(Recipe.axes())
        content = OmegaConf.to_container(cfg, resolve=False)
        names = _names({k: v for k, v in content.items() if k != "hydra"})  # type: ignore[union-attr]
        return [*names, "hydra.run.dir", "hydra.sweep.dir", "hydra/launcher"]


def _own_refusal(error: BaseException | None) -> str | None:
    """The refusal of titan's own that Hydra has wrapped, if that is what happened."""
    while error is not None:
        if isinstance(error, ConfigError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _names(content: dict[Any, Any], path: str = "") -> list[str]:
    names = []
    for key, value in content.items():
        names.append(path + str(key))
        if isinstance(value, dict):
            names += _names(value, f"{path}{key}.")
    return names
