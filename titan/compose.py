"""Hydra in, checked Run out.

The story of a command line: Hydra composes `conf/` and the overrides; `freeze` turns the result into a typed, frozen
`Run` and checks it; whatever can't work ends in one plain sentence and exit code 2. Hydra's own main would exit with 1,
print several lines and make the run's directory before anything is checked: so titan drives Hydra itself, and leaves
to it what only shows (`--cfg`, `--info`, completion) and the sweep (`-m`), whose points titan's launcher runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

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

from titan import help as help_text
from titan import settings
from titan.cluster import devices
from titan.dataset.schema import KINDS, Dataset
from titan.model.schema import Llama, Qwen3
from titan.optimizer import SGD, AdamW, Muon
from titan.run import Recipe, Run, check_name, resolve
from titan.settings import Failure, Refusal, nearest
from titan.sweep import Sweep

here = Path(__file__).resolve().parent
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

    They come after titan's own, so that they add choices and can't replace any.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the other folders."""
        for entry in entry_points(group="titan.plugins"):
            entry.load()  # so that it can register schemas of its own
            search_path.append(entry.name, f"pkg://{entry.value.split(':')[0]}.conf")
        for folder in filter(None, os.environ.get("TITAN_CONF", "").split(os.pathsep)):
            search_path.append("TITAN_CONF", f"file://{os.path.abspath(folder)}")


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


def exit_code(body: Callable[[], int]) -> int:
    """What `body` returns; else, once its sentence is said, 2 for a refusal, 1 for a failure, 130 for Ctrl-C."""
    try:
        return body()
    except Refusal as refusal:
        print(f"titan: {refusal}", file=sys.stderr)
        return 2
    except Failure as failure:
        print(f"titan: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _fault(error)


def _fault(error: OSError) -> int:
    """The exit code for what the machine lacks, once that is said; the error is raised where it is another one."""
    if isinstance(error, BrokenPipeError):  # whoever read has seen enough: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if (words := settings.fault(error)) is None:
        raise error
    print(f"titan: {words}", file=sys.stderr)
    return 1


def composed(overrides: Sequence[str], ranks: int | None = None, elsewhere: bool = False) -> Run:
    """The checked Run of a list of overrides, for programs; see `freeze`; raises `Refusal`."""
    register()
    with _plainly(overrides), _Session() as hydra:
        return freeze(_compose(hydra, list(overrides)), ranks=ranks, elsewhere=elsewhere)


def freeze(cfg: DictConfig, directory: str | None = None, ranks: int | None = None, elsewhere: bool = False) -> Run:
    """Turn what Hydra composed, its own node included, into a typed and checked `Run`.

    Args:
        cfg: the composed configuration.
        directory: where results go; None: `hydra.run.dir`.
        ranks: see `titan.run.resolve`.
        elsewhere: it is to run on the nodes that `cluster` describes, not on this machine.

    Raises:
        Refusal: for what can't work.
    """
    recipe = _typed(cfg)
    machine = devices.elsewhere(recipe.cluster) if elsewhere else devices.detect(recipe.cluster.device)
    directory = os.path.abspath(directory or str(cfg.hydra.run.dir))
    choices = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items() if k in recipe.axes()}
    overrides = tuple(map(str, cfg.hydra.overrides.task))
    return resolve(
        recipe,
        machine,
        directory,
        ranks=ranks,
        elsewhere=elsewhere,
        choices=choices,
        overrides=overrides,
        hydra=_hydra_files(cfg),
    )


def _typed(cfg: DictConfig) -> Recipe:
    HydraConfig.instance().set_config(cfg)
    content = OmegaConf.to_container(_job(cfg), resolve=True)
    if not isinstance(content, dict):
        raise Refusal("the configuration is not a mapping.")
    settings.build(Sweep, content.pop("sweep", {}), "sweep")
    modules = content.get("modules") or []
    if not isinstance(modules, list):
        raise Refusal(f"modules={modules}: expected a list, such as modules=[mine].")
    built: Recipe = settings.build(Recipe, content, allowed=tuple(map(str, modules)))
    return built


def recipe(arguments: Sequence[str]) -> Recipe:
    """The typed choices of a command line, whether or not this machine can run them.

    Raises:
        Refusal: for what is no choice or setting, and for options that only show something.
    """
    register()
    parser = hydra_utils.get_args_parser()
    parser.error = _refuse_arguments  # type: ignore[method-assign]
    args = parser.parse_args(list(arguments))
    _check_arguments(args)
    if args.multirun or args.cfg or args.info or args.shell_completion or args.hydra_help:
        raise Refusal("-m, --cfg, --info and the like are for titan.train; leave them out.")
    with _plainly(args.overrides), _Session(args) as hydra:
        return _typed(_compose(hydra, args.overrides, args.config_name))


def _command(arguments: list[str], job: Callable[[Run], int], ranks: int | None) -> int:
    from launchers import plugin

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting with 1
    register()
    parser = hydra_utils.get_args_parser()
    parser.error = _refuse_arguments  # type: ignore[method-assign]
    args = parser.parse_args(arguments)
    _check_arguments(args)
    with _plainly(args.overrides):
        if args.help:
            with _Session(args) as hydra:
                print(help_text.text(hydra.config_loader, Recipe.axes()))
            return 0
        if args.multirun or args.cfg or args.info or args.shell_completion or args.hydra_help:
            return _hand_to_hydra(args, parser)
        with _Session(args) as hydra:
            cfg = _compose(hydra, args.overrides, args.config_name)
            _check_no_grid(cfg)
            launcher = plugin.alone(cfg) if ranks is None else None
            run = freeze(cfg, ranks=ranks, elsewhere=launcher is not None)
    return plugin.one(launcher, run, cfg) if launcher else job(run)


def _check_no_grid(cfg: DictConfig) -> None:
    """Refuse a named grid where one run was asked for, which would pass over all that it varies."""
    sweep = cfg.hydra.runtime.choices.get("sweep")
    if sweep not in (None, "null"):
        raise Refusal(f"sweep={sweep}: is a grid of runs; add -m.")


def _hand_to_hydra(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    named = [o.partition("=")[2] for o in args.overrides if o.startswith("name=")]
    if args.multirun and named:
        _check_grid_name(named[-1], args.overrides)
        args.overrides.append(f"hydra.sweep.dir=runs/{named[-1]}")
    from launchers import plugin

    try:
        with contextlib.redirect_stderr(io.StringIO()) if args.cfg else contextlib.nullcontext():
            hydra_utils._run_hydra(args, parser, _never, str(CONF), args.config_name or CONFIG)
    except SystemExit as leave:
        if args.cfg and leave.code:
            raise Refusal(f"--package {args.package}: no such part of the configuration; give an axis.") from None
        return leave.code if isinstance(leave.code, int) else 2
    except ValueError as error:
        raise Refusal(_value_error(error, args.overrides)) from error
    finally:
        plugin.tidy()
    return plugin.exit_code() if args.multirun else 0


def _check_grid_name(name: str, overrides: Sequence[str]) -> None:
    """Refuse what is no name of one folder under runs/, and a second place for the same grid."""
    if not re.fullmatch(r"[\w./+-]+", name):
        raise Refusal(f"name={name}: a grid has one name; give one folder's name.")
    check_name(name)
    if place := [o for o in overrides if o.startswith("hydra.sweep.dir=")]:
        raise Refusal(f"{place[0]}: name={name} says where the grid is already; leave one out.")


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse what Hydra would pass over in silence, or say too much of."""
    for option, folder in (("--config-dir", args.config_dir), ("--config-path", args.config_path)):
        if folder and not os.path.isdir(folder):
            raise Refusal(f"{option} {folder}: there is no such folder; correct the path.")
    if (args.package or args.resolve) and not args.cfg:
        option = "--resolve" if args.resolve else f"--package {args.package}"
        raise Refusal(f"{option}: only says what --cfg shows; add --cfg job.")
    for override in args.overrides:
        key, _, value = override.partition("=")
        if key.startswith("~") and not key.startswith("~hydra"):
            raise Refusal(f"{override}: no setting can be taken away; write {key[1:]}=VALUE, or leave it out.")
        if args.multirun and key == "hydra/launcher" and value in ("basic", "null"):
            raise Refusal(f"{override}: this launcher is not titan's; choose hydra/launcher=local.")


def _never(cfg: DictConfig) -> None:
    """Stands where Hydra wants a task function; titan's launcher takes its place."""
    raise Refusal("hydra/launcher: this launcher is not titan's; choose hydra/launcher=local.")


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


def _compose(hydra: Hydra, overrides: list[str], name: str | None = None) -> DictConfig:
    try:
        cfg = hydra.compose_config(
            config_name=name or CONFIG, overrides=overrides, run_mode=RunMode.RUN, with_log_configuration=False
        )
    except ValueError as error:
        raise Refusal(_value_error(error, overrides)) from error
    check_optional(hydra.config_loader, cfg)
    return cfg


def check_optional(loader: Any, cfg: DictConfig) -> None:
    """Refuse an unknown recipe or sweep, which Hydra passes over because these groups are optional.

    Raises:
        Refusal: with those that there are.
    """
    for group in OPTIONAL:
        choice = cfg.hydra.runtime.choices.get(group)
        known = loader.get_group_options(group, ObjectType.CONFIG)
        if choice not in (None, "null", *known):
            raise Refusal(_no_such_choice(group, str(choice), known))


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


def _hydra_files(cfg: DictConfig) -> dict[str, str]:
    """What Hydra would have written under `.hydra/`."""
    node = Hydra.get_sanitized_hydra_cfg(cfg)
    job = _job(cfg)
    return {
        "config.yaml": OmegaConf.to_yaml(job),
        "hydra.yaml": OmegaConf.to_yaml(node),
        "overrides.yaml": OmegaConf.to_yaml(cfg.hydra.overrides.task),
    }


def _refuse_arguments(message: str) -> NoReturn:
    raise Refusal(f"{message}; see --help.")


class _plainly:
    """Turn what Hydra and OmegaConf raise into a refusal of one sentence."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = overrides

    def __enter__(self) -> None:
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.filterwarnings("error", ".* is not available", UserWarning)  # a folder to search that isn't there

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.warnings.__exit__(None, None, None)
        if isinstance(error, (HydraException, OmegaConfBaseException, UserWarning)):
            raise Refusal(_own_refusal(error) or self._sentence(error)) from error

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
        text = " ".join(str(error).split())
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
        return _no_such_choice(group, option, error.options or ())

    def _unknown_setting(self, key: str) -> str:
        typed = self._typed(key)
        if key in OPTIONAL:  # its folder is there only when there are any
            return _no_such_choice(key, typed.partition("=")[2], ())
        known = self._known()
        elsewhere = any(name.endswith(f".{key}") for name in known)
        hint = nearest(key, Recipe.axes()) if "." not in key and not elsewhere else "."
        hint = nearest(key, known) if hint == "." else hint
        return f"{typed}: there is no such setting{hint} See --help and --cfg job."

    def _known(self) -> list[str]:
        """Every name that may stand before an equals sign, for the choices on this command line."""
        chosen = [o for o in self.overrides if o.partition("=")[0] in Recipe.axes()]
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
        if isinstance(error, Refusal):
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
