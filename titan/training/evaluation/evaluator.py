"""Everything that a run measures of its weights: its sources' evaluation sets, files of text, and tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titan.dataset.loader import TARGETS, BatchBuilder, read_first_rows
from titan.dataset.mixture import RowMixture
from titan.dataset.mixture import TokenSequences as Source
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.debug.module_hooks import ModuleHooks, StageCall, force_eager
from titan.errors import ConfigError, RunError
from titan.evaluation.items import TaskItem, read_texts
from titan.evaluation.schema import ValidationSet
from titan.evaluation.scores import Request, build_requests, compute_scores
from titan.model.layers import IGNORED
from titan.parallelism.mesh import RunContext
from titan.parallelism.microbatches import Microbatches
from titan.run.run import Run
from titan.training.evaluation.averages import MovingAverage, use_evaluation_weights
from titan.training.observe import iterate_logit_chunks
from titan.training.train_step import TrainStep


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
            tokenizer: the argument of `load_tokenizer`; None: that of the data.

        Raises:
            ConfigError: when a file can't be read, or the data have no tokenizer.
            StopRequestedError: see `build_eval_sets`.
            RunError: see `build_eval_sets`.
        """
        self.run, self.train_step, self.world = run, train_step, train_step.world
        text_tokenizer = _load_tokenizer(tokenizer, run, mix)
        self.sets = build_eval_sets(run, self.world, mix, show, stopped)
        self.files: dict[str, EvalSet] = {}
        self.tasks: dict[str, tuple[Sequence[TaskItem], Sequence[Request]]] = {}
        if text_tokenizer is not None:
            self._read_files(text_tokenizer)

    def _read_files(self, tokenizer: Tokenizer) -> None:
        """Read the sets of `evaluation.sets`, and the items of each task with a request for each choice."""
        run, seq_len = self.run, self.run.training.seq_len
        for name, validation_set in (run.evaluation.sets or {}).items():
            split = read_validation_set(validation_set, tokenizer, f"evaluation.sets.{name}")
            fields = read_first_rows(split, seq_len, split.count_rows(seq_len), run.dataset.mask_documents, masked=True)
            self.files[name] = _build_eval_set(run, self.world, fields, tokenizer.count_token_bytes())
        for name, task in (run.evaluation.tasks or {}).items():
            prefix = f"evaluation.tasks.{name}"
            items = task.build(prefix)
            self.tasks[name] = items, build_requests(items, tokenizer, seq_len, bos=task.bos, prefix=prefix)

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
        metrics = self._measure_sources() if self.sets else {}
        for name, eval_set in self.files.items():
            (loss,) = self._sum_losses(eval_set)
            mean, key = loss / eval_set.count, f"evaluation/{name}"
            metrics |= {f"{key}/loss": mean, f"{key}/perplexity": math.exp(min(mean, 700))}
            if eval_set.bytes:
                metrics[f"{key}/bits_per_byte"] = loss / math.log(2) / eval_set.bytes
        for task, (items, requests) in self.tasks.items():
            for name, figure in compute_scores(items, self._compute_loglikelihoods(requests)).items():
                key = f"evaluation/{task}/{name}"
                metrics |= {key: figure.value, f"{key}_low": figure.low, f"{key}_high": figure.high}
        return metrics

    def _sum_losses(self, eval_set: EvalSet) -> list[float]:
        """Return the summed loss of a set over all ranks, and the sums of the model's `evaluation_figures`."""
        sums: list[float] = self.world.all_reduce(self.train_step.evaluate(eval_set.rows).double()).reshape(-1).tolist()
        return sums

    def _measure_sources(self) -> dict[str, float]:
        """Return the mean loss per token and bits per byte, over all sources and, where there are several, of each.

        The model's `evaluation_figures` are of all sources.
        """
        names, sets = self.train_step.stages[0].model.config.evaluation_figures, self.sets
        sums = {name: self._sum_losses(eval_set) for name, eval_set in sets.items()}
        totals = [sum(values) for values in zip(*sums.values(), strict=True)]
        parts = {"": (totals[0], list(sets.values()))}
        if len(sets) > 1:
            parts |= {f"/{name}": (sums[name][0], [eval_set]) for name, eval_set in sets.items()}
        metrics: dict[str, float] = {}
        for suffix, (loss, members) in parts.items():
            metrics[f"validation_loss{suffix}"] = loss / sum(eval_set.count for eval_set in members)
            if text_bytes := sum(eval_set.bytes for eval_set in members):
                metrics[f"bits_per_byte{suffix}"] = loss / math.log(2) / text_bytes
        count = sum(eval_set.count for eval_set in sets.values())
        return metrics | {
            f"evaluation/{name}/loss": total / count for name, total in zip(names, totals[1:], strict=True)
        }

    @torch.no_grad()
    def _compute_loglikelihoods(self, requests: Sequence[Request]) -> NDArray[np.float64]:
        """Return the log-likelihood of each continuation in nats, and 1 where greedy decoding gives it; [requests, 2].

        All ranks call it together, and all get the same. The model runs as it is written, not compiled.
        """
        sums = torch.zeros(len(requests), 2, dtype=torch.float64, device=self.train_step.device)
        window, multiple = self.run.training.seq_len, self.train_step.seq_len_multiple
        with force_eager(self.run.compile.scope != "off"):
            for length, numbers in _group_by_length(requests, multiple, window).items():
                self._score_requests([requests[n] for n in numbers], numbers, length, sums)
        losses, mismatches = self.world.all_reduce(sums).cpu().numpy().T
        return np.stack([-losses, mismatches == 0], axis=1).astype(np.float64)

    def _score_requests(self, requests: Sequence[Request], numbers: Sequence[int], length: int, sums: Tensor) -> None:
        """Add the losses and the number of tokens that are not greedy of some requests to their lines of `sums`.

        Args:
            numbers: their lines.
            length: tokens of a row.
            sums: [all requests, 2].
        """
        shard, rows = self.world.data_shard, max(1, self.run.microbatch_rows * self.run.training.seq_len // length)
        rank_requests, count = shard.slice_rows(len(requests)), -(-shard.count_slots(len(requests)) // rows)
        tokens = torch.zeros(count * rows, length, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for row, number in enumerate(rank_requests):
            ids, size = torch.tensor(requests[number].tokens), len(requests[number].tokens) - 1
            tokens[row, :size] = ids[:-1]
            targets[row, size - requests[number].scored : size] = ids[-requests[number].scored :]
        rank_lines = torch.tensor([numbers[i] for i in rank_requests], dtype=torch.int64, device=sums.device)
        lines = torch.split(rank_lines, rows)

        def add_scores(call: StageCall, head: nn.Module, args: tuple[Tensor, ...]) -> None:
            row_sums = _compute_row_sums(head, *args)
            if self.world.counts_loss and call.microbatch < len(lines):
                line = lines[call.microbatch]
                sums[line] += row_sums[: len(line)]

        with ModuleHooks(self.train_step.stages) as hooks:
            for index, stage in enumerate(self.train_step.stages):
                if stage.model.head is not None:
                    hooks.add_before(index, stage.model.head, add_scores)
            parts = (part.view(count, rows, length).to(sums.device) for part in (tokens, targets))
            self.train_step.evaluate(Microbatches(*parts))


def _load_tokenizer(name: str | None, run: Run, mix: RowMixture) -> Tokenizer | None:
    """Return the tokenizer of this name or that of the data, where something needs it."""
    if name:
        tokenizer = load_tokenizer(name)
        if tokenizer.vocab_size > run.model.vocab:
            raise ConfigError(
                f"tokenizer={name}: has {tokenizer.vocab_size} ids, and the model {run.model.vocab}; give the model's "
                "own."
            )
        return tokenizer
    if not (run.evaluation.sets or run.evaluation.tasks):
        return None
    corpus = mix.sources[0].corpus
    if corpus.tokenizer["fingerprint"] == "none":
        raise ConfigError(
            f"evaluation.{'sets' if run.evaluation.sets else 'tasks'}: dataset={corpus.name} has no tokenizer to read "
            "text with; leave it out, or choose a dataset of text."
        )
    return load_tokenizer(corpus.tokenizer_path)


_POLL_SECONDS = 0.5
_POLLS_PER_MESSAGE = 40


@dataclass(frozen=True)
class EvalSet:
    """This rank's rows of an evaluation set, all ranks' targets that count, and their bytes of text (0: unknown)."""

    rows: Microbatches
    count: int
    bytes: int


def build_eval_sets(
    run: Run, world: RunContext, mix: RowMixture, show: Callable[[str], None], stopped: Callable[[], bool]
) -> dict[str, EvalSet]:
    """Return the evaluation set of each source that has one: `evaluation.tokens` of each.

    While a source is being prepared this waits until the rows exist, so that they are the same as afterwards.

    Args:
        show: called with a line now and then while it waits, and where a set is empty.

    Raises:
        StopRequestedError: when a signal came while it waited.
        RunError: when the rows are not prepared within `cluster.timeout`.
    """
    count, sets = run.evaluation.tokens // run.training.seq_len, {}
    for source in mix.sources if count else ():
        _wait_for_rows(source, count, run.cluster.timeout, show, stopped)
        corpus = source.corpus
        fields = read_first_rows(
            corpus.validation,
            run.training.seq_len,
            count,
            run.dataset.mask_documents,
            corpus.masked,
            run.model.uses_keys,
        )
        targets = fields[TARGETS][fields[TARGETS] != IGNORED]
        if targets.size:
            sets[source.name] = _build_eval_set(run, world, fields, corpus.token_bytes)
        elif run.dataset.validation:
            share = f"dataset.validation={run.dataset.validation}"
            show(f"{source.name}: no validation loss: {share} of its documents are none; give more, or 0.")
    if run.evaluation.tokens and not count:
        show(f"evaluation.tokens={run.evaluation.tokens}: no validation loss: it is less than training.seq_len.")
    return sets


def _build_eval_set(run: Run, world: RunContext, fields: NDArray[np.int32], token_bytes: NDArray[np.uint16]) -> EvalSet:
    """Return the set of whole rows, which all ranks have read; of these the rank keeps its own, in micro-batches."""
    targets = fields[TARGETS][fields[TARGETS] != IGNORED]
    total, shard, size = fields.shape[1], world.data_shard, run.microbatch_rows
    rank_rows = shard.slice_rows(total)
    shape = (math.ceil(shard.count_slots(total) / size), size, run.training.seq_len)
    reader = BatchBuilder(run.training.seq_len, run.dataset.mask_documents, run.model.uses_keys)
    local = reader.fill_padding(reader.allocate(shape))  # [fields, microbatches, rows, seq_len]
    local.reshape(len(local), -1, shape[-1])[:, : len(rank_rows)] = fields[:, rank_rows.start : rank_rows.stop]
    rows = Microbatches.from_fields(torch.from_numpy(local).to(world.device).long())
    text_bytes = int(token_bytes[targets].sum()) if run.model.predicts_tokens else 0
    return EvalSet(rows, targets.size, text_bytes)


class StopRequestedError(Exception):
    """A signal came before training had begun."""


def _wait_for_rows(
    source: Source, count: int, timeout: float, show: Callable[[str], None], stopped: Callable[[], bool]
) -> None:
    """Wait until the evaluation rows of a source are prepared."""
    polls, start = 0, time.monotonic()
    while (
        source.corpus.has_validation
        and not source.corpus.complete
        and source.corpus.validation.count_rows(source.seq_len) < count
    ):
        if stopped():
            raise StopRequestedError
        done_jobs, all_jobs = source.corpus.shard_jobs
        line = f"the evaluation set of {source.name}: {done_jobs} of {all_jobs} shard jobs are done"
        if time.monotonic() - start > timeout:
            raise RunError(f"waited {timeout:.0f} s for {line}; prepare more data first, or raise cluster.timeout.")
        if polls % _POLLS_PER_MESSAGE == 1:
            show(f"waiting for {line}")
        polls += 1
        time.sleep(_POLL_SECONDS)
        source.corpus.check_alive()
        source.corpus = source.corpus.reopen()


MIN_ROW_TOKENS = 32
"""Tokens of the shortest rows."""


def _group_by_length(requests: Sequence[Request], multiple: int, window: int) -> dict[int, list[int]]:
    """Return the numbers of the requests by the length of their rows: powers of two, or multiples of `multiple`."""
    numbers_by_length: dict[int, list[int]] = {}
    for number, request in enumerate(requests):
        power = 1 << max(MIN_ROW_TOKENS - 1, len(request.tokens) - 2).bit_length()
        numbers_by_length.setdefault(min(window, -(-power // multiple) * multiple), []).append(number)
    return numbers_by_length


def _compute_row_sums(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of each row's losses, and its number of tokens that are not greedy; float64 [rows, 2]."""
    sums = torch.zeros(len(targets), 2, dtype=torch.float64, device=hidden.device)
    for logits, part in iterate_logit_chunks(head, hidden, targets):
        valid = part != IGNORED
        index = part.where(valid, 0)[..., None]
        losses = logits.logsumexp(-1) - logits.gather(-1, index)[..., 0]
        sums[:, 0] += losses.double().where(valid, 0).sum(1)
        sums[:, 1] += ((logits.argmax(-1) != part) & valid).sum(1)
    return sums


ENCODE_BATCH = 64
"""Documents that are encoded together."""


@dataclass(frozen=True)
class TextSplit:
    """Tokens in memory, int32, and where documents begin; the interface of `titan.dataset.shards.Split`.

    Behind the tokens nothing counts.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]

    def count_rows(self, seq_len: int) -> int:
        """Return the number of rows, the last of which may be padded."""
        return -(-(len(self.ids) - 1) // seq_len)

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """Return the tokens [start, start + count), padded with zeros."""
        tokens = self.ids[start : start + count]
        return np.pad(tokens, (0, count - len(tokens)))

    def read_loss_mask(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return which of the tokens [start, start + count) are no padding."""
        return np.arange(start, start + count) < len(self.ids)

    def find_document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the positions, relative to `start`, of documents that begin in [start + 1, start + count)."""
        return self.starts[(self.starts > start) & (self.starts < start + count)] - start


def read_validation_set(settings: ValidationSet, tokenizer: Tokenizer, prefix: str) -> TextSplit:
    """Return the first tokens of a file.

    Raises:
        ConfigError: when the file can't be read, or has fewer than two tokens.
    """
    ids, starts = list[int](), list[int]()
    texts = read_texts(settings.path, settings.field, prefix)
    while len(ids) <= settings.tokens and (batch := list(islice(texts, ENCODE_BATCH))):
        for document in tokenizer.encode_batch(batch):
            starts.append(len(ids))
            ids += tokenizer.add_bos_eos(document)
    if len(ids) < 2:
        raise ConfigError(f"{prefix}.path={settings.path}: has fewer than two tokens; give a longer file.")
    starts = [start for start in starts if start <= settings.tokens]
    return TextSplit(np.array(ids[: settings.tokens + 1], dtype=np.int32), np.array(starts, dtype=np.int64))
