"""The loader of a run's rows on one rank."""

from __future__ import annotations

from collections.abc import Callable

from titan.dataset.loader import BatchShape, Loader
from titan.dataset.mixture import RowMixture
from titan.parallelism.mesh import World
from titan.run.run import Run


def build_loader(
    run: Run, mix: RowMixture, world: World, step: int, show: Callable[[str], None], stopped: Callable[[], bool]
) -> Loader:
    """Return what yields the batches of the steps after `step`; see `Loader` for the arguments."""
    return Loader(
        mix,
        run.training,
        world.data_shard,
        BatchShape(run.microbatches, run.microbatch_rows, run.training.seq_len),
        step=step + 1,
        prefetch=run.dataset.prefetch,
        mask_documents=run.dataset.mask_documents,
        has_keys=run.model.uses_keys,
        is_reader=world.reads_data,
        patience=run.cluster.timeout,
        log=show,
        is_stopped=stopped,
    )
