"""Traces one rank of each pipeline rank of a run, each in a process of its own, from a short version of the run."""

from __future__ import annotations

import dataclasses
import os
import time

from titan.cluster.forked_tasks import ForkedTaskError, map_in_forks
from titan.errors import RunError
from titan.estimate.operations import Speeds
from titan.estimate.regather import regathers_input
from titan.estimate.traced.compose import MICROBATCHES, UNITS, UNITS_AHEAD, compose_trace
from titan.estimate.traced.events import StepTrace
from titan.estimate.traced.result import RankResult, TracedStep, build_rank_result, build_traced_step
from titan.parallelism.strategy import blocks_are_alike
from titan.run.run import Run
from titan.training.trace.rank import trace_rank

TRACE_SECONDS = 7200.0
"""How long the traces of a run may take."""


def trace_run(run: Run, speeds: Speeds, *, full: bool = False) -> TracedStep:
    """Trace a step of the first rank of each pipeline rank.

    Args:
        run: on any number of ranks.
        full: trace all blocks and micro-batches instead of composing them from a few.
    """
    start = time.perf_counter()
    ranks = [number * run.layout.devices // run.layout.pipeline for number in range(run.layout.pipeline)]
    # one task for each process: process groups of a second trace would have other names, which DTensor's caches lack
    tasks = [(run, speeds, rank, full) for rank in ranks]
    try:
        rank_results = map_in_forks(_build_rank_result, tasks, os.cpu_count() or 1, TRACE_SECONDS)
    except ForkedTaskError as error:
        raise RunError(f"the run could not be traced ({error}); give the machine more memory.") from None
    return build_traced_step(run, run.layout, run.microbatches, speeds, rank_results, time.perf_counter() - start)


def _build_rank_result(run: Run, speeds: Speeds, rank: int, full: bool) -> RankResult:
    return build_rank_result(run, run.layout, speeds, build_rank_trace(run, rank, full=full), run.machine.device)


def build_rank_trace(run: Run, rank: int, *, full: bool = False) -> StepTrace:
    """Return the trace of a rank, composed from a short one where its blocks allow it; see `trace_run`."""
    eager_run, device, fuses_loss = make_eager(run), run.machine.device, run.compile.fuses
    if full or not _blocks_repeat(run):
        return trace_rank(eager_run, rank, device, fuses_loss)
    short = trace_rank(shorten_run(eager_run), rank, device, fuses_loss)
    blocks = {stage: run.staging.layers[stage] for stage in short.blocks}
    return compose_trace(short, blocks, _find_period(run), run.microbatches, _count_units(run))


def _blocks_repeat(run: Run) -> bool:
    """Whether blocks do the same one after another.

    They do not where they are of several kinds, where weights are gathered further ahead than the next block's, where
    DDP sums buckets of several blocks' gradients, where a schedule separates backward for weights, which torch computes
    for one after another, and where some blocks are sharded in another way.
    """
    alike = len(run.model.kinds()) == 1 and blocks_are_alike(run.model.parameter_names(), run.parallelism.groups or {})
    prefetch = run.parallelism.resolve_prefetch(run.layout)
    differ = prefetch > 1 or run.layout.only_replicated or run.staging.splits_backward
    return alike and not differ


def make_eager(run: Run) -> Run:
    """Return the run without what a trace can't execute: compilation, matmuls in eight bits, FlexAttention.

    Its masks are dense instead.
    """
    regather = regathers_input(run, run.layout)  # which depends on what is replaced
    parallelism = dataclasses.replace(run.parallelism, async_tensor=False, regather=regather)
    precision = dataclasses.replace(run.precision, matmuls="compute").drop_unused_settings()
    compile_settings = dataclasses.replace(run.compile, scope="off")
    training = run.training
    if training.attention == "flex":
        training = dataclasses.replace(training, attention="auto")
    return dataclasses.replace(
        run, compile=compile_settings, parallelism=parallelism, precision=precision, training=training
    )


def shorten_run(run: Run) -> Run:
    """Return the run with as few blocks and micro-batches as their composition needs."""
    layers, start = [], 0
    for first, end in run.staging.layers:
        count = end - first
        if count // _find_period(run) > _count_units(run):
            count = _count_units(run) * _find_period(run) + count % _find_period(run)
        layers.append((start, start + count))
        start += count
    staging = dataclasses.replace(run.staging, layers=tuple(layers))
    short = dataclasses.replace(run, staging=staging, model=dataclasses.replace(run.model, layers=start))
    if run.layout.pipeline > 1 or run.microbatches <= MICROBATCHES:
        return short
    tokens = MICROBATCHES * run.microbatch_rows * run.layout.data_ranks * run.training.seq_len
    training = dataclasses.replace(run.training, global_batch=tokens)
    return dataclasses.replace(short, microbatches=MICROBATCHES, training=training)


def _count_units(run: Run) -> int:
    """Return the units of blocks of a short trace."""
    return UNITS_AHEAD if run.parallelism.resolve_prefetch(run.layout) else UNITS


def _find_period(run: Run) -> int:
    """Return the number of blocks after which what a block does repeats."""
    return run.memory.every if run.memory.checkpointing == "every_n" else 1
