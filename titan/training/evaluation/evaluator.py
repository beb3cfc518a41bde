"""Everything that a run measures of its weights: its sources' evaluation sets, files of text, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan.dataset.mixture import RowMixture
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import ConfigError
from titan.evaluation.items import TaskItem
from titan.evaluation.requests import Request, build_requests
from titan.evaluation.scores import TaskScore, compute_scores
from titan.run.run import Run
from titan.training.evaluation.averages import MovingAverage, use_evaluation_weights
from titan.training.evaluation.likelihoods import compute_loglikelihoods
from titan.training.evaluation.sets import build_eval_sets, build_file_sets, evaluate_files, evaluate_sets
from titan.training.train_step import TrainStep


@dataclass(frozen=True)
class TaskRequests:
    """A task and what is asked of the model for it, one request for each choice."""

    items: Sequence[TaskItem]
    requests: Sequence[Request]


class Evaluator:
    """Measures the weights of a train step; all ranks call it together, and all get the same."""

    def __init__(
        self,
        run: Run,
        train_step: TrainStep,
        mix: RowMixture,
        show: Callable[[str], None],
        stopped: Callable[[], bool],
        tokenizer: str | None = None,
    ) -> None:
        """Read the sets and the tasks.

        Args:
            show: see `build_eval_sets`.
            stopped: see `build_eval_sets`.
            tokenizer: the argument of `load_tokenizer`; None: that of the data.

        Raises:
            ConfigError: when a file can't be read, or the data have no tokenizer.
            StopRequestedError: see `build_eval_sets`.
            RunError: see `build_eval_sets`.
        """
        self.run, self.train_step, self.world = run, train_step, train_step.world
        text_tokenizer = _load_given_tokenizer(tokenizer, run) if tokenizer else _load_data_tokenizer(run, mix)
        self.sets = build_eval_sets(run, self.world, mix, show, stopped)
        self.files = build_file_sets(run, self.world, text_tokenizer)
        self.tasks = _build_tasks(run, text_tokenizer)

    def __bool__(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self.sets or self.files or self.tasks)

    def measure(self, average: MovingAverage | None = None) -> dict[str, float]:
        """Return all figures of what is evaluated, and of its average where there is one, by keys of metrics.jsonl."""
        with use_evaluation_weights(self.train_step):
            metrics = self.measure_parameters()
        if average is not None:
            with average.swap_in():
                metrics |= {f"ema/{key}": value for key, value in self.measure_parameters().items()}
        return metrics

    def measure_parameters(self) -> dict[str, float]:
        """Return all figures of the parameters as they are."""
        metrics = evaluate_sets(self.train_step, self.world, self.sets) if self.sets else {}
        metrics |= evaluate_files(self.train_step, self.world, self.files)
        for task, task_figures in self.measure_tasks().items():
            for name, figure in task_figures.items():
                key = f"evaluation/{task}/{name}"
                metrics |= {key: figure.value, f"{key}_low": figure.low, f"{key}_high": figure.high}
        return metrics

    def measure_tasks(self) -> dict[str, dict[str, TaskScore]]:
        """Return the figures of each task."""
        run = self.run
        tokens, compiled = run.microbatch_rows * run.training.seq_len, run.compile.scope != "off"
        return {
            name: compute_scores(
                task.items,
                compute_loglikelihoods(self.train_step, task.requests, run.training.seq_len, tokens, compiled=compiled),
            )
            for name, task in self.tasks.items()
        }


def _load_given_tokenizer(name: str, run: Run) -> Tokenizer:
    """Return a tokenizer that is not that of the data.

    Raises:
        ConfigError: when it has more ids than the model.
    """
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > run.model.vocab:
        raise ConfigError(
            f"tokenizer={name}: has {tokenizer.vocab_size} ids, and the model {run.model.vocab}; give the model's own."
        )
    return tokenizer


def _load_data_tokenizer(run: Run, mix: RowMixture) -> Tokenizer | None:
    """Return the data's tokenizer, where something needs it.

    Raises:
        ConfigError: when they have none.
    """
    if not (run.evaluation.sets or run.evaluation.tasks):
        return None
    corpus = mix.sources[0].corpus
    if corpus.tokenizer["fingerprint"] == "none":
        raise ConfigError(
            f"evaluation.{'sets' if run.evaluation.sets else 'tasks'}: dataset={corpus.name} has no tokenizer to read "
            "text with; leave it out, or choose a dataset of text."
        )
    return load_tokenizer(corpus.tokenizer_path)


def _build_tasks(run: Run, tokenizer: Tokenizer | None) -> dict[str, TaskRequests]:
    tasks: dict[str, TaskRequests] = {}
    if tokenizer is None:
        return tasks
    for name, task in (run.evaluation.tasks or {}).items():
        setting_name = f"evaluation.tasks.{name}"
        items = task.build(setting_name)
        requests = build_requests(items, tokenizer, run.training.seq_len, bos=task.bos, prefix=setting_name)
        tasks[name] = TaskRequests(items, requests)
    return tasks
