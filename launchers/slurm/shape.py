"""The resources that a trial requests from Slurm: nodes and ranks from its layout, the rest from the cluster axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.cluster.checks import parse_minutes
from titan.cluster.schema import Cluster
from titan.console.numbers import format_plural
from titan.errors import ConfigError
from titan.run.run import Run


@dataclass(frozen=True)
class JobShape:
    """The resources of a job; trials of the same shape are submitted as one array.

    Attributes:
        nodes: how many.
        ranks: on each of them.
        gpus: on each of them; 0 on CPUs.
        cluster: what else is requested.
        exclusive: whether the job has its nodes to itself.
    """

    nodes: int
    ranks: int
    gpus: int
    cluster: Cluster
    exclusive: bool = False

    @property
    def devices(self) -> int:
        """The number of ranks, which is the number of devices."""
        return self.nodes * self.ranks

    def compute_device_hours(self) -> float | None:
        """Return the device-hours that a trial's jobs may use, by their time limit; None where they have none."""
        limit = parse_minutes(self.cluster.time)
        return None if limit is None else max(1, self.cluster.chain) * self.devices * limit / 60

    def __str__(self) -> str:
        kind = "GPU" if self.gpus else "rank"
        return f"{format_plural(self.nodes, 'node')} x {format_plural(self.ranks, kind)}"


def derive_job_shape(run: Run) -> JobShape:
    """Return the resources of a run's layout: as few nodes as hold it, or `cluster.nodes` where it can be spread.

    Raises:
        ConfigError: when its ranks don't fill the nodes evenly.
    """
    devices, cluster = run.layout.devices, run.cluster
    per_node = cluster.devices_per_node
    max_ranks = int(per_node) if per_node != "auto" else run.machine.count if run.machine.device == "cuda" else devices
    nodes = max(math.ceil(devices / max_ranks), min(cluster.nodes, devices))
    if devices % nodes:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: {devices} ranks ({run.layout}) don't spread evenly over {nodes} nodes; "
            "change a degree, cluster.nodes or cluster.devices_per_node."
        )
    gpus = devices // nodes if run.machine.device == "cuda" else 0
    full = devices // nodes == max_ranks and (gpus > 0 or per_node != "auto")
    exclusive = full if cluster.exclusive == "auto" else bool(cluster.exclusive)
    return JobShape(nodes, devices // nodes, gpus, cluster, exclusive)
