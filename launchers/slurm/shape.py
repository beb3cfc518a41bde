"""What a point asks Slurm for: nodes and ranks from its layout, the rest from the cluster axis. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titan.cluster.schema import Cluster, minutes
from titan.errors import ConfigError
from titan.run.run import Run


@dataclass(frozen=True)
class Shape:
    """The resources of a job; points of equal shape go as one array.

    Attributes:
        nodes: how many.
        ranks: on each of them.
        gpus: on each of them; 0 on CPUs.
        cluster: what else is asked for.
        whole: whether its nodes are for it alone.
    """

    nodes: int
    ranks: int
    gpus: int
    cluster: Cluster
    whole: bool = False

    @property
    def devices(self) -> int:
        """Ranks in all, which is devices in all."""
        return self.nodes * self.ranks

    def hours(self) -> float | None:
        """Device-hours that a job may use up, by its time limit; None where it has none."""
        limit = minutes(self.cluster.time)
        return None if limit is None else self.devices * limit / 60

    def __str__(self) -> str:
        kind = "GPU" if self.gpus else "rank"
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.ranks} {kind}{'s' * (self.ranks > 1)}"


def shape(run: Run) -> Shape:
    """The resources that a run's layout takes: as few nodes as hold it, or `cluster.nodes` where it can be spread.

    Raises:
        ConfigError: when its ranks don't fill the nodes evenly.
    """
    devices, cluster = run.layout.devices, run.cluster
    per_node = cluster.devices_per_node
    most = int(per_node) if per_node != "auto" else run.machine.count if run.machine.device == "cuda" else devices
    nodes = max(math.ceil(devices / most), min(cluster.nodes, devices))
    if devices % nodes:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: {devices} ranks ({run.layout}) don't spread evenly over {nodes} nodes; "
            "change a degree, cluster.nodes or cluster.devices_per_node."
        )
    gpus = devices // nodes if run.machine.device == "cuda" else 0
    full = devices // nodes == most and (gpus > 0 or per_node != "auto")
    whole = full if cluster.exclusive == "auto" else bool(cluster.exclusive)
    return Shape(nodes, devices // nodes, gpus, cluster, whole)
