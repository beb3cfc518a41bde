"""Warn where GPUs get so little work that a run of this size is not worth them. Free of torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from titan.config.warning import warn_once
from titan.console.numbers import format_rounded
from titan.estimate import fit
from titan.run.hydra_session import CONF

if TYPE_CHECKING:
    from titan.run.run import Run

LARGE_MODEL = 100_000_000
"""Parameters from which a model is not for tests."""
SHORT_SHARE = 8
"""Rows are far shorter than the context before RoPE scaling if they have less than this fraction of its tokens."""
SAVED_SHARE = 0.05
"""Share of a rank's memory that a recommended setting saves at least."""
FEW_TOKENS = 2048
"""Tokens of a GPU in a step below which reading and gathering weights takes longer than computing with them."""


def warn_of_small_work(run: Run, planned: bool = False) -> None:
    """Warn of rows that are far shorter than the context before RoPE scaling, of few tokens for each GPU, or of experts
    that ranks do not share.

    Args:
        run: the run; on a CPU, with a small model, or on one GPU if it is not planned, there is no warning.
    """
    _recommend_shared_experts(run)
    is_relevant = planned or run.layout.devices > 1
    is_large = run.machine.device == "cuda" and run.model.parameters() >= LARGE_MODEL
    if is_relevant and is_large and (sentence := describe_small_work(run)):
        warn_once(sentence)


def _recommend_shared_experts(run: Run) -> None:
    """Warn where each tensor rank has whole experts, and `expert=auto` needs less memory."""
    layout, device = run.layout, run.machine.device
    if layout.tensor == 1 or layout.expert > 1 or not run.parallelism.sequence_parallel:
        return
    node = fit.count_node_devices(run, run.machine)
    degree = math.gcd(layout.sharded * layout.tensor, fit.find_largest_degrees(run, node)["expert"])
    if degree == 1:
        return
    present, less = (
        fit.estimate_memory(run, candidate, run.microbatches, device).gib
        for candidate in (layout, replace(layout, expert=degree))
    )
    if less < present * (1 - SAVED_SHARE):
        warn_once(
            f"parallelism.expert=1: each of {layout.tensor} tensor ranks has whole experts; with "
            f"parallelism.expert=auto, which shares them among {degree} ranks, a rank needs {format_rounded(less)} "
            f"instead of {format_rounded(present)} GiB."
        )


def describe_small_work(run: Run) -> str:
    """Return what a run has little of, with the settings to change; empty where it has enough."""
    training, model = run.training, run.model
    context = model.rope_original if model.rope_factor != 1 else 0  # without RoPE scaling nothing names the context
    tokens = run.rank_rows * training.seq_len // run.layout.context
    is_short, is_few = SHORT_SHARE * training.seq_len < context, tokens < FEW_TOKENS
    reasons = [f"rows are far shorter than the {context:,} tokens of model.rope_original"] * is_short
    rows, ranks = training.rows, run.layout.data_ranks
    reasons += [f"only {rows:,} of {ranks:,} data-parallel ranks have a row"] * (rows < ranks)
    reasons += [f"each GPU computes only {tokens:,} tokens per step"] * is_few
    if not reasons:
        return ""
    seq_len = context if is_short else training.seq_len
    rank_rows = math.ceil(FEW_TOKENS * run.layout.context / seq_len)  # that give each GPU enough tokens
    batch = max(ranks * rank_rows, math.ceil(training.global_batch / seq_len)) * seq_len
    changes = [f"training.seq_len={seq_len}"] * is_short
    changes += [f"training.global_batch={batch} or more"] * (batch != training.global_batch)
    settings = f"training.seq_len={training.seq_len} training.global_batch={training.global_batch}"
    recipe = _find_training_recipe(run) if is_short and is_few else None
    complete = f"; recipe={recipe} is a complete choice for a real run" if recipe else ""
    return f"{settings}: {', and '.join(reasons)}; give {' and '.join(changes)}{complete}."


def _find_training_recipe(run: Run) -> str | None:
    is_chosen = any(override.lstrip("+").startswith("recipe=") for override in run.overrides)
    files = [] if is_chosen else sorted((CONF / "recipe").glob("train_*.yaml"))
    return next((f.stem for f in files if f"/model: {run.choices.get('model')}\n" in f.read_text()), None)
