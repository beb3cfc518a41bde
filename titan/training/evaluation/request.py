"""Which checkpoints or weights an evaluation measures, and by what: all checks before work starts. Free of torch.

The run's own command line is composed again, with the user's overrides behind it, as for a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan.checkpoint import select
from titan.checkpoint.manifest import Manifest
from titan.config.settings import MISSING, plain, setting, show
from titan.dataset import corpora
from titan.errors import ConfigError
from titan.evaluation.items import FORMATS
from titan.evaluation.schema import Evaluation, Task, ValidationSet
from titan.metrics.schema import Metrics
from titan.model.schema import Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.run import identity
from titan.run.attempts import Attempt
from titan.run.directory import RUN
from titan.run.lineage import parent, rows_read
from titan.run.run import Run
from titan.training.evaluation.job import Job
from titan.training.replay.request import Compose, attempts_of, check_science, command_of

if TYPE_CHECKING:
    from titan.weights.interface import Weights

LEFT_OUT = ("name", "hydra", "sweep", "checkpoint.", "checkpoint=", "metrics")
"""Overrides of the run that say where it writes, by their beginnings."""
LONGEST = 2048
"""Tokens of a row for exported weights, where the user gives no `training.seq_len`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and of what."""

    from_: str = setting(MISSING, "a run, or a folder of weights in the format of Hugging Face, Meta or titan")
    step: int | None = setting(None, "the step of the checkpoint; null: the last one", at_least=1)
    average: int = setting(1, "measure the average of so many checkpoints too, the last ones up to step", at_least=1)
    tasks: tuple[str, ...] | None = setting(
        None, "FORMAT:FILE of each task, or names of the run's own tasks: [a,b]; null: all of the run's own"
    )
    sets: tuple[str, ...] | None = setting(None, "files of text: [a,b]; null: the run's own validation sets")
    limit: int | None = setting(None, "items of each task to use, the first ones; null: all", at_least=1)
    tokens: int | None = setting(
        None, "tokens of each file and of each source's evaluation set; null: as the run has them", at_least=0
    )
    tokenizer: str | None = setting(None, "the tokenizer of weights whose folder has none; null: that of the folder")
    to: str | None = setting(None, "a JSON file to write, with everything that is shown")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that are settings, and the overrides of the run."""
    known = {field.name.rstrip("_") for field in fields(Settings)}
    own = [word for word in words if "=" not in word or word.partition("=")[0] in known]
    return own, [word for word in words if word not in own]


def plan(settings: Settings, overrides: Sequence[str], scratch: Path, compose: Compose, weights: Open) -> Job:
    """Return the job of the ranks.

    Args:
        settings: of the user.
        overrides: of the run's command line, by the user.
        scratch: where the ranks write.
        compose: composes command lines.
        weights: opens exported weights.

    Raises:
        ConfigError: when there is no such checkpoint or file, or the run can't work here.
    """
    if (Path(settings.from_).expanduser() / RUN).is_file():
        return _of_run(settings, overrides, scratch, compose)
    return _of_weights(settings, overrides, scratch, compose, weights(settings.from_, "from"))


Open = Callable[[str, str], "Weights"]


def _of_run(settings: Settings, overrides: Sequence[str], scratch: Path, compose: Compose) -> Job:
    if settings.tokenizer is not None:
        raise ConfigError(f"tokenizer={settings.tokenizer}: the data of a run have one; leave it out.")
    name, documents = settings.from_, attempts_of(settings.from_)
    document = documents[-1]
    command, _ = command_of(document, overrides, LEFT_OUT)
    run = compose(overrides, command)
    run = _quiet(run, _chosen(settings, run.evaluation), scratch)
    folders = corpora.prepare_corpora(run.dataset)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(folders))
    begins = parent(replace(run, directory=name), [], mix, own=False)
    science = identity.science_of(run, corpora.data_digest(mix), begins.id)
    free = [override for override in overrides if not override.lstrip("+").startswith("model")]
    check_science(name, document, science, free)
    elsewhere = document["config"].get("checkpoint", {}).get("path")
    saved = select.complete(Path(name).expanduser(), elsewhere, str(documents[0]["run_id"]))
    chosen = _checkpoints(settings, {step: (each.path, each.about) for step, each in saved.items()})
    step, (path, about) = chosen[-1]
    ids = identity.ids(run, science)
    attempt = Attempt(1, "evaluate", ids, folders, path, step, rows_read(run, mix, about), "resume", begins.id, None)
    return Job(run, attempt, tuple((step, path) for step, (path, _) in chosen) if len(chosen) > 1 else ())


def _of_weights(settings: Settings, overrides: Sequence[str], scratch: Path, compose: Compose, weights: Weights) -> Job:
    """Return the job for weights of no run; the data are a placeholder that is not read."""
    for key, default in (("step", None), ("average", 1)):
        if getattr(settings, key) != default:
            raise ConfigError(f"{key}={getattr(settings, key)}: from={settings.from_} is no run; leave {key} out.")
    if not (settings.sets or settings.tasks) or settings.tokens == 0:
        raise ConfigError(f"from={settings.from_}: is no run, so there is nothing to measure; give tasks or sets.")
    tokenizer = settings.tokenizer or weights.tokenizer
    if tokenizer is None:
        raise ConfigError(f"from={settings.from_}: has no tokenizer to read text with; give tokenizer=FILE.")
    run = compose(overrides, _command(weights))
    evaluation = replace(_chosen(settings, Evaluation()), tokens=0)
    run = _quiet(run, evaluation, scratch)
    folders = corpora.prepare_corpora(run.dataset)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.open_corpora(folders))
    ids = identity.ids(run, identity.science_of(run, corpora.data_digest(mix), None))
    attempt = Attempt(1, "evaluate", ids, folders, None, 0, 0, "start", None, weights.path)
    return Job(run, attempt, (), tokenizer)


def _command(weights: Weights) -> list[str]:
    """Return the command line of a run with the model of some weights.

    Raises:
        ConfigError: for a model that no choice of the model axis has.
    """
    choices = {
        Llama: "debug",
        Qwen3: "qwen3_debug",
        Qwen3Moe: "qwen3_moe_debug",
        DeepseekV3: "deepseek_v3_debug",
        Llama4: "llama4_debug",
    }
    if type(weights.model) not in choices:
        raise ConfigError(f"from={weights.path}: is a model of another package; give from=RUN, the run that made it.")
    longest = int(getattr(weights, "config", {}).get("max_position_embeddings") or LONGEST)
    rows = min(LONGEST, longest)
    model = [f"model.{key}={show(value)}" for key, value in plain(weights.model).items()]
    data = ["dataset=synthetic", "dataset.tokens=65536", "dataset.vocab=16", "checkpoint=off"]
    sizes = [f"training.seq_len={rows}", f"training.global_batch={rows * 8}", "training.steps=1", "schedule.warmup=0"]
    return [f"model={choices[type(weights.model)]}", *model, *data, *sizes]


def _chosen(settings: Settings, own: Evaluation) -> Evaluation:
    """Return what is measured: what the settings name, or what the run itself measures."""
    tasks = own.tasks or {} if settings.tasks is None else dict(_task(text, own) for text in settings.tasks)
    sets = (
        own.sets or {}
        if settings.sets is None
        else {Path(file).stem: ValidationSet(path=file) for file in settings.sets}
    )
    if settings.limit is not None:
        tasks = {name: replace(task, limit=settings.limit) for name, task in tasks.items()}
    if settings.tokens:
        sets = {name: replace(one, tokens=settings.tokens) for name, one in sets.items()}
    tokens = own.tokens if settings.tokens is None else settings.tokens
    chosen = replace(own, every=0, tokens=tokens, sets=sets or None, tasks=tasks or None)
    _check(settings, chosen)
    return chosen


def _check(settings: Settings, chosen: Evaluation) -> None:
    """Raise ConfigError for files that can't be read, and where there is nothing to measure."""
    for given, named in ((settings.tasks, chosen.tasks), (settings.sets, chosen.sets)):
        if given is not None and len(given) != len(named or {}):
            raise ConfigError(f"{show(given)}: two files have the same name without their endings; rename one.")
    chosen.check()
    if not (chosen.tokens or chosen.sets or chosen.tasks):
        raise ConfigError(f"from={settings.from_}: there is nothing to measure; give tasks, sets or tokens.")


def _task(text: str, own: Evaluation) -> tuple[str, Task]:
    """Return the name and the task of a word of `tasks`."""
    kind, colon, path = text.partition(":")
    if not colon and text in (own.tasks or {}):
        return text, (own.tasks or {})[text]
    if kind not in FORMATS or not path:
        known = f", or one of the run's own: {', '.join(own.tasks)}" if own.tasks else ""
        raise ConfigError(f"tasks=[{text}]: give FORMAT:FILE with one of {', '.join(FORMATS)}{known}.")
    return Path(path).stem, Task(path=path, format=kind)  # type: ignore[arg-type]


def _quiet(run: Run, evaluation: Evaluation, scratch: Path) -> Run:
    """Return the run with what is measured, another directory, and without what it writes."""
    checkpoint = replace(run.checkpoint, mode="sync", every=0, minutes=0, path=None, export=None)
    metrics = Metrics(sample_tokens=0, plot=False, spike_window=0)
    return replace(run, directory=str(scratch), checkpoint=checkpoint, metrics=metrics, evaluation=evaluation)


def _checkpoints(
    settings: Settings, found: Mapping[int, tuple[str, Manifest]]
) -> list[tuple[int, tuple[str, Manifest]]]:
    """Return the checkpoints to measure, the last of them as it is; of those of the run by their steps.

    Raises:
        ConfigError: when there is no such checkpoint, or too few for an average.
    """
    steps = sorted(step for step in found if settings.step is None or step <= settings.step)
    if not steps or settings.step not in (None, steps[-1]):
        known = f"give one of {', '.join(map(str, sorted(found)))}" if found else "train it with checkpoint=sync"
        what = f"step={settings.step}" if settings.step else f"from={settings.from_}"
        raise ConfigError(f"{what}: the run has no such complete checkpoint; {known}.")
    if settings.average > len(steps):
        raise ConfigError(
            f"average={settings.average}: the run has {len(steps)} complete checkpoints up to step {steps[-1]}; give "
            "at most as many, or train it with a larger checkpoint.keep."
        )
    return [(step, found[step]) for step in steps[-settings.average :]]


def about(job: Job) -> dict[str, Any]:
    """Return what was measured, for the result."""
    steps = [step for step, _ in job.checkpoints]
    return {"step": job.attempt.step, **({"steps": steps} if steps else {}), "layout": str(job.run.layout)}
