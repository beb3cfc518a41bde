"""The settings of SimpleFSDP (arXiv:2411.00284), which replaces FSDP2 for the whole model. Free of torch until used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.config.settings import setting
from titan.parallelism.strategy import ModelSharding

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


PASSES = (
    "reorder_communication_preserving_peak_memory",
    "sink_waits_iterative",
    "reorder_communication_preserving_peak_memory",
)
"""Inductor's passes that move collectives and waits, in the order that torch recommends."""


class BucketLimit(NamedTuple):
    """Gives the size of a bucket; equal ones are equal, so that stages share graphs."""

    megabytes: int

    def __call__(self, bucket: int) -> float:
        """Return the size in MB of a bucket, by its number."""
        return float(self.megabytes)


@dataclass(frozen=True, kw_only=True)
class SimpleFSDP(ModelSharding):
    """Gathers each parameter where the model reads it, in operations that autograd and the compiler see."""

    bucket: int = setting(
        100, "MB of weights or gradients that compiled collectives join; 0: one collective per parameter", at_least=0
    )
    overlap: bool = setting(
        True, "compiled collectives start before and end after the computation of others' weights, as memory allows"
    )

    def compiler_settings(self) -> dict[str, Any]:
        """Return how Inductor joins collectives, and moves them away from where their results are used."""
        limit, joined = BucketLimit(self.bucket), "all" if self.bucket else "none"
        return {
            "bucket_all_gathers_fx": joined,
            "bucket_all_gathers_fx_bucket_size_determinator": limit,
            "bucket_reduce_scatters_fx": joined,
            "bucket_reduce_scatters_fx_bucket_size_determinator": limit,
            "reorder_for_compute_comm_overlap": self.overlap,
            "reorder_for_compute_comm_overlap_passes": PASSES,
        }

    def wrap(self, modules: list[nn.Module], mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
        """See `ModelSharding.wrap`."""
        from experiments.simple_fsdp.parametrisation import parametrise

        policy = options["mp_policy"]
        parametrise(modules, mesh, policy.param_dtype, policy.reduce_dtype, options["reshard_after_forward"])
