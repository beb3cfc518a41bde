"""The body of a rank that generates: join the process group, build the model, load weights, continue the prompts."""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from titan.cluster.rank_info import RankInfo
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import RunError
from titan.generation.decode import BatchDecoder, Continuation, Detokenizer, SamplingRules
from titan.generation.request import GenerationJob
from titan.generation.terminal import GenerationOutput, JsonLinesOutput, TerminalOutput, Throughput
from titan.parallelism import mesh
from titan.parallelism.mesh import World
from titan.precision.schema import Precision
from titan.training import build
from titan.weights.formats import Weights, open_weights
from titan.weights.load import load_weights

TIMEOUT = 1800.0
"""The timeout of collective operations, in seconds."""


def work(job: GenerationJob, rank_info: RankInfo) -> int:
    """Generate as one of the job's ranks; rank 0 shows the results.

    Returns:
        0.

    Raises:
        RunError: when it runs out of memory, or the logits are not finite.
    """
    world = mesh.connect_world(rank_info, job.layout, job.device, TIMEOUT)
    tokenizer = None if job.tokenizer is None else load_tokenizer(job.tokenizer)
    try:
        model = load_model(open_weights(job.path, ""), job.precision, world)
        output = GenerationOutput()
        if world.is_rank0 and job.settings.to is not None:
            output = JsonLinesOutput(Path(job.settings.to).expanduser(), tokenizer)
        elif world.is_rank0:
            output = TerminalOutput(tokenizer, len(job.prompts) * job.settings.samples)
        with contextlib.closing(output):
            throughput = continue_prompts(job, model, tokenizer, world, output)
    except torch.OutOfMemoryError as error:
        message = str(error).split(". ")[0]
        raise RunError(
            f"out of memory: {message}. Give a smaller batch or chunk, or a larger parallelism.tensor."
        ) from error
    world.close()  # only after success: see titan.training.worker
    if world.is_rank0:
        print(f"titan: {throughput.format_line()}", file=sys.stderr)
    return 0


def load_model(weights: Weights, precision: Precision, world: World) -> Any:
    """Return the model of some weights, or this tensor rank's part of it, that computes without gradients."""
    model = build.build_for_generation(weights.model, precision, world)
    load_weights(dict(model.named_weights()), weights, no_dist=world.rank_info.world_size == 1, setting="")
    return model


def continue_prompts(
    job: GenerationJob, model: Any, tokenizer: Tokenizer | None, world: World, output: GenerationOutput
) -> Throughput:
    """Continue every prompt, a batch at a time, and return the throughput; all ranks call it together."""
    settings, throughput, stops = job.settings, Throughput(), job.settings.list_stops()
    rules = SamplingRules(
        settings.temperature, settings.top_k, settings.top_p, settings.seed, job.vocab, job.eos, settings.max_tokens
    )
    decoder = BatchDecoder(model, rules, device=world.device, chunk=settings.chunk, broadcast=world.broadcast_rows)

    def on_token(token: int, text: str) -> None:
        throughput.count_token()
        output.show_token(token, text)

    rows = (
        Continuation(prompt, sample, None if tokenizer is None else Detokenizer(tokenizer, prompt, stops), on_token)
        for prompt in job.prompts
        for sample in range(settings.samples)
    )
    while batch := list(islice(rows, settings.batch)):
        output.begin_prompt(batch[0].prompt)
        decoder.run(batch)
        for row in batch:
            output.finish_row(row)
    return throughput
