"""The body of a rank that generates: join the process group, build the model, load weights, continue the prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from titan.cluster.rank_info import RankInfo
from titan.dataset.tokenizers.load import load_tokenizer
from titan.dataset.tokenizers.tokenizer import Tokenizer
from titan.errors import RunError
from titan.generation.decode import Decoder, Row, SamplingRules
from titan.generation.request import Job
from titan.generation.terminal import JsonLines, NoOutput, Output, Terminal, Throughput
from titan.generation.text import Text
from titan.parallelism import mesh
from titan.parallelism.mesh import World
from titan.training import build
from titan.weights.formats import open_weights
from titan.weights.load import load_weights

TIMEOUT = 1800.0
"""The timeout of collective operations, in seconds."""


def work(job: Job, rank_info: RankInfo) -> int:
    """Generate as one of the job's ranks; rank 0 shows the results.

    Returns:
        0.

    Raises:
        RunError: when it runs out of memory, or the logits are not finite.
    """
    world = mesh.connect_world(rank_info, job.layout, job.device, TIMEOUT)
    tokenizer = None if job.tokenizer is None else load_tokenizer(job.tokenizer)
    try:
        model = _model(job, world)
        with _output(job, tokenizer, world) as output:
            throughput = continue_all(job, model, tokenizer, world, output)
    except torch.OutOfMemoryError as error:
        message = str(error).split(". ")[0]
        raise RunError(
            f"out of memory: {message}. Give a smaller batch or chunk, or a larger parallelism.tensor."
        ) from error
    world.close()  # only after success: see titan.training.worker
    if world.is_rank0:
        print(f"titan: {throughput.line()}", file=sys.stderr)
    return 0


def _model(job: Job, world: World) -> Any:
    """Return the model, or this rank's part of it, with its weights."""
    weights = open_weights(job.path, "from")
    model = build.build_for_generation(weights.model, job.precision, world)
    load_weights(dict(model.named_weights()), weights, no_dist=world.rank_info.world_size == 1, setting="from")
    return model


def continue_all(job: Job, model: Any, tokenizer: Tokenizer | None, world: World, output: Output) -> Throughput:
    """Continue every prompt, a batch at a time, and return the throughput; all ranks call it together."""
    s, throughput = job.settings, Throughput()
    rules = SamplingRules(s.temperature, s.top_k, s.top_p, s.seed, job.vocab, job.eos, s.max_tokens)
    decoding = Decoder(model, rules, device=world.device, chunk=s.chunk, agree=world.broadcast_rows)

    def show(token: int, text: str) -> None:
        throughput.count()
        output.piece(token, text)

    rows = _rows(job, tokenizer, show)
    while batch := list(islice(rows, s.batch)):
        output.begin(batch[0].prompt)
        decoding.run(batch)
        for row in batch:
            output.done(row)
    return throughput


def _rows(job: Job, tokenizer: Tokenizer | None, show: Any) -> Iterator[Row]:
    """Return the continuations of all prompts, in order."""
    for prompt in job.prompts:
        for sample in range(job.settings.samples):
            text = None if tokenizer is None else Text(tokenizer, prompt, job.settings.stops())
            yield Row(prompt, sample, text, show)


def _output(job: Job, tokenizer: Tokenizer | None, world: World) -> Output:
    if not world.is_rank0:
        return NoOutput()
    if job.settings.output is not None:
        return JsonLines(Path(job.settings.output).expanduser(), tokenizer)
    return Terminal(tokenizer, len(job.prompts) * job.settings.samples)
