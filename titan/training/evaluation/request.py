"""Which checkpoints or weights an evaluation measures, and by what: all checks before work starts. Free of torch.

The run's own command line is composed again, with the user's overrides behind it, as for a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from titan.checkpoint.manifest import Manifest
from titan.config.arguments import operand
from titan.config.settings import format_value, setting, to_plain
from titan.console.numbers import format_plural
from titan.dataset import corpora
from titan.errors import ConfigError
from titan.evaluation.items import FORMATS
from titan.evaluation.schema import Evaluation, Task, ValidationSet
from titan.files.run_directory import RUN
from titan.model.schema import Llama, Qwen3
from titan.model.schema_deepseek import DeepseekV3
from titan.model.schema_llama4 import Llama4
from titan.model.schema_moe import Qwen3Moe
from titan.run import identity
from titan.run.attempts import Attempt
from titan.run.run import Run
from titan.training import recompose
from titan.training.recompose import Compose

if TYPE_CHECKING:
    from titan.weights.interface import Weights

EXCLUDED_OVERRIDES = ("name", "hydra", "sweep", "checkpoint.", "checkpoint=", "metrics")
"""Overrides of the run that say where it writes, by their beginnings."""
MAX_ROW_TOKENS = 2048
"""Tokens of a row for exported weights, where the user gives no `training.seq_len`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and of what."""

    source: str = operand("MODEL", "a run, or a folder of weights in the format of Hugging Face, Meta or titan")
    step: int | None = setting(None, "the step of the checkpoint; null: the last one", at_least=1)
    average: int = setting(1, "measure the average of this many checkpoints too, the last ones up to step", at_least=1)
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


OpenWeights = Callable[[str, str], "Weights"]
"""Opens weights by their path and the setting that names it."""


def plan_evaluation(
    settings: Settings,
    overrides: Sequence[str],
    scratch: Path,
    compose: Compose,
    weights: OpenWeights,
    find_damage: Callable[[Path, bool], str | None],
) -> EvaluationJob:
    """Return the job of the ranks.

    Args:
        find_damage: returns what is wrong with a checkpoint; the flag: verify checksums.

    Raises:
        ConfigError: when there is no such checkpoint or file, or the run can't work here.
    """
    if not (Path(settings.source).expanduser() / RUN).is_file():
        return _plan_weights(settings, overrides, scratch, compose, weights(settings.source, ""))
    if settings.tokenizer is not None:
        raise ConfigError(f"tokenizer={settings.tokenizer}: the data of a run have one; leave it out.")
    name, documents = settings.source, recompose.read_run_attempts(settings.source)
    document = documents[-1]
    command, _ = recompose.build_command(document, overrides, EXCLUDED_OVERRIDES)
    run = compose(overrides, command)
    run = recompose.disable_outputs(run, _choose_evaluation(settings, run.evaluation), scratch)
    user_overrides = [override for override in overrides if not override.lstrip("+").startswith("model")]
    mix, attempt, _ = recompose.open_run_again(name, document, run, user_overrides)
    check = None if settings.step else lambda folder: find_damage(folder, run.checkpoint.verify)
    checkpoints = recompose.list_checkpoints(name, document, str(documents[0]["run_id"]), check)
    selected = _select_checkpoints(settings, checkpoints)
    attempt = recompose.begin_at(attempt, run, mix, *selected[-1][1])
    return EvaluationJob(run, attempt, tuple((step, path) for step, (path, _) in selected) if len(selected) > 1 else ())


def _plan_weights(
    settings: Settings, overrides: Sequence[str], scratch: Path, compose: Compose, weights: Weights
) -> EvaluationJob:
    """Return the job for weights of no run; the data are a placeholder that is not read."""
    for key, default in (("step", None), ("average", 1)):
        if getattr(settings, key) != default:
            raise ConfigError(f"{key}={getattr(settings, key)}: {settings.source} is no run; leave {key} out.")
    if not (settings.sets or settings.tasks) or settings.tokens == 0:
        raise ConfigError(f"{settings.source}: is no run, so there is nothing to measure; give tasks or sets.")
    tokenizer = settings.tokenizer or weights.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{settings.source}: has no tokenizer to read text with; give tokenizer=FILE.")
    run = compose(overrides, _build_command(weights))
    evaluation = replace(_choose_evaluation(settings, Evaluation()), tokens=0)
    run = recompose.disable_outputs(run, evaluation, scratch)
    mix = corpora.build_mixture(run.dataset, run.training, corpora.prepare_corpora(run.dataset))
    ids = identity.compute_ids(run, identity.collect_science(run, corpora.compute_data_digest(mix), None))
    attempt = Attempt(1, "evaluate", ids, mix.folders, None, 0, 0, "start", None, weights.path)
    return EvaluationJob(run, attempt, (), tokenizer)


def _build_command(weights: Weights) -> list[str]:
    """Return the command line of a run with the model of some weights."""
    choices = {
        Llama: "debug",
        Qwen3: "qwen3_debug",
        Qwen3Moe: "qwen3_moe_debug",
        DeepseekV3: "deepseek_v3_debug",
        Llama4: "llama4_debug",
    }
    if type(weights.model) not in choices:
        raise ConfigError(f"{weights.path}: is a model of another package; give the run that made it.")
    max_positions = int(getattr(weights, "config", {}).get("max_position_embeddings") or MAX_ROW_TOKENS)
    rows = min(MAX_ROW_TOKENS, max_positions)
    model = [f"model.{key}={format_value(value)}" for key, value in to_plain(weights.model).items()]
    data = ["dataset=synthetic", "dataset.tokens=65536", "dataset.vocab=16", "checkpoint=off"]
    sizes = [f"training.seq_len={rows}", f"training.global_batch={rows * 8}", "training.steps=1", "schedule.warmup=0"]
    return [f"model={choices[type(weights.model)]}", *model, *data, *sizes]


def _choose_evaluation(settings: Settings, run_evaluation: Evaluation) -> Evaluation:
    """Return what is measured: what the settings name, or what the run itself measures."""
    tasks = (
        run_evaluation.tasks or {}
        if settings.tasks is None
        else dict(_parse_task(text, run_evaluation) for text in settings.tasks)
    )
    sets = (
        run_evaluation.sets or {}
        if settings.sets is None
        else {Path(file).stem: ValidationSet(path=_check_file(file, f"sets=[{file}]")) for file in settings.sets}
    )
    if settings.limit is not None and not tasks:
        raise ConfigError(
            f"limit={settings.limit}: there are no tasks whose items it limits; give tasks, or leave it out."
        )
    if settings.limit is not None:
        tasks = {name: replace(task, limit=settings.limit) for name, task in tasks.items()}
    if settings.tokens:
        sets = {name: replace(validation_set, tokens=settings.tokens) for name, validation_set in sets.items()}
    tokens = run_evaluation.tokens if settings.tokens is None else settings.tokens
    evaluation = replace(run_evaluation, every=0, tokens=tokens, sets=sets or None, tasks=tasks or None)
    _check_evaluation(settings, evaluation)
    return evaluation


def _check_evaluation(settings: Settings, evaluation: Evaluation) -> None:
    """Raise ConfigError for files that can't be read, and where there is nothing to measure."""
    for requested, measured in ((settings.tasks, evaluation.tasks), (settings.sets, evaluation.sets)):
        if requested is not None and len(requested) != len(measured or {}):
            raise ConfigError(
                f"{format_value(requested)}: two files have the same name without their endings; rename one."
            )
    evaluation.check()
    if not (evaluation.tokens or evaluation.sets or evaluation.tasks):
        raise ConfigError(f"{settings.source}: there is nothing to measure; give tasks, sets or tokens.")


def _parse_task(text: str, run_evaluation: Evaluation) -> tuple[str, Task]:
    """Return the name and the task of a word of `tasks`."""
    kind, colon, path = text.partition(":")
    if not colon and text in (run_evaluation.tasks or {}):
        return text, (run_evaluation.tasks or {})[text]
    if kind not in FORMATS or not path:
        alternatives = f", or one of the run's own: {', '.join(run_evaluation.tasks)}" if run_evaluation.tasks else ""
        raise ConfigError(f"tasks=[{text}]: give FORMAT:FILE with one of {', '.join(FORMATS)}{alternatives}.")
    return Path(path).stem, Task(path=_check_file(path, f"tasks=[{text}]"), format=kind)  # type: ignore[arg-type]


def _check_file(path: str, typed: str) -> str:
    """Return the path of a file; raises ConfigError when there is none."""
    if not Path(path).expanduser().is_file():
        raise ConfigError(f"{typed}: there is no file {path}; correct the path.")
    return path


def _select_checkpoints(
    settings: Settings, checkpoints: Mapping[int, tuple[str, Manifest]]
) -> list[tuple[int, tuple[str, Manifest]]]:
    """Return the checkpoints to measure, the last of them as it is; of those of the run by their steps."""
    steps = sorted(step for step in checkpoints if settings.step is None or step <= settings.step)
    if not steps or settings.step not in (None, steps[-1]):
        advice = (
            f"give one of {', '.join(map(str, sorted(checkpoints)))}"
            if checkpoints
            else "train it with checkpoint=sync"
        )
        setting_text = f"step={settings.step}" if settings.step else settings.source
        raise ConfigError(f"{setting_text}: the run has no such complete checkpoint; {advice}.")
    if settings.average > len(steps):
        raise ConfigError(
            f"average={settings.average}: the run has {format_plural(len(steps), 'complete checkpoint')} up to step "
            f"{steps[-1]}; give at most as many, or train it with a larger checkpoint.keep."
        )
    return [(step, checkpoints[step]) for step in steps[-settings.average :]]


def describe_job(job: EvaluationJob) -> dict[str, Any]:
    """Return what was measured, for the result."""
    steps = [step for step, _ in job.checkpoints]
    return {"step": job.attempt.step, **({"steps": steps} if steps else {}), "layout": str(job.run.layout)}


RESULT = "evaluated.json"


@dataclass(frozen=True)
class EvaluationJob:
    """The input of the ranks, whose run has a temporary directory, and what is to be measured.

    Of `checkpoints`, by their steps, the average is measured too; `tokenizer` is the argument of `load_tokenizer`, None
    for that of the run's data.
    """

    worker: ClassVar[str] = "titan.training.evaluation.worker"
    run: Run
    attempt: Attempt
    checkpoints: tuple[tuple[int, str], ...] = ()
    tokenizer: str | None = None


def read_result(job: EvaluationJob) -> dict[str, Any]:
    """Return what rank 0 has measured."""
    results: dict[str, Any] = json.loads((Path(job.run.directory) / RESULT).read_text())
    return results
