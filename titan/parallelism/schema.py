"""The parallelism axis: degrees and their arithmetic, and strategies of sharding. Free of torch until used."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from titan.config.kinds import get_kind
from titan.config.settings import format_value, setting
from titan.config.text_kinds import Label
from titan.console.numbers import format_plural
from titan.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

KEY_BITS = 31
"""Bits of each of the two numbers that the key of a row is stored as."""
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
"""The mesh's dimensions, outermost first: ranks that are adjacent along the last one are adjacent in a node."""


RULE_ORDER = ("tensor", "context", "pipeline", "replicate", "shard")
"""The order in which degrees that are "auto" take devices."""


@dataclass(frozen=True)
class DataShard:
    """Shard `rank` of the `ranks` equal shards that the rows of a step are divided into."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        """Raise ValueError when the rank is not in [0, ranks)."""
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")

    def count_slots(self, rows: int) -> int:
        """Return the number of rows that each rank computes in a step of `slice_rows` rows, padding included."""
        return -(-rows // self.ranks)

    def slice_rows(self, rows: int) -> range:
        """Return this rank's range of a step's `slice_rows` rows."""
        slots = self.count_slots(rows)
        return range(min(rows, self.rank * slots), min(rows, (self.rank + 1) * slots))


@dataclass(frozen=True)
class Layout:
    """All degrees together, as numbers; `expert` is that of ranks of shard, context and tensor."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Ranks in all."""
        return math.prod(self.degrees().values())

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.replicate * self.shard

    def degrees(self) -> dict[str, int]:
        """The degree of each dimension, outermost first; the ranks that share experts are among others'."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def expert_shards(self) -> int:
        """Parts that a rank's experts are sharded into; without expert parallelism as all weights are."""
        return self.sharded * self.tensor // self.expert if self.expert > 1 else self.sharded

    @property
    def sharded(self) -> int:
        """Parts that weights are sharded into, over shard and context together."""
        return self.shard * self.context

    @property
    def only_replicated(self) -> bool:
        """Whether every rank has a replica of the whole model (DDP)."""
        return self.replicate > 1 and self.replicate == self.devices

    def mesh_degrees(self) -> dict[str, int]:
        """Return the dimensions of the weights' mesh, outermost first: degrees above one, context as a part of shard.

        Replicas of tensor or pipeline parallel parts are kept by FSDP too, with a shard dimension of one.
        """
        sizes = {n: d for n, d in self.degrees().items() if n != "context"} | {"shard": self.sharded}
        keeps_shard = self.replicate > 1 and not self.only_replicated
        return {name: size for name, size in sizes.items() if size > 1 or (name == "shard" and keeps_shard)}

    def compute_coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along each dimension."""
        coordinates = {}
        for name, degree in reversed(self.degrees().items()):
            rank, coordinates[name] = divmod(rank, degree)
        return coordinates

    def list_groups(self, name: str) -> list[list[int]]:
        """Return the ranks that communicate along a dimension, or share experts, group by group."""
        neighbours = {"others": self.devices // self.expert, "expert": self.expert}
        return list_groups_along(neighbours if name == "expert" else self.degrees(), (name,))

    def __str__(self) -> str:
        degrees = self.degrees() | {"expert": self.expert}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        return " x ".join(parts) or "one device"


def list_groups_along(sizes: Mapping[str, int], names: Collection[str]) -> list[list[int]]:
    """Return the ranks of each group whose coordinates differ along `names` only.

    Args:
        sizes: the size of every dimension, outermost first.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(product(*map(range, sizes.values()))):
        others = tuple(at for name, at in zip(sizes, coordinates, strict=True) if name not in names)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


@dataclass(frozen=True)
class StagePlan:
    """The stages of a pipeline; without one there is a single stage.

    Attributes:
        schedule: its name.
        layers: first layer and end of each stage.
        owners: the pipeline rank of each stage.
        splits_backward: whether gradients of inputs and of weights are computed in two passes.
        idle: share of a step in which ranks wait for each other (the pipeline bubble).
    """

    schedule: str
    layers: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]
    splits_backward: bool = False
    idle: float = 0.0

    @property
    def count(self) -> int:
        """Stages in all."""
        return len(self.owners)

    def list_stages(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank."""
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]


class Sharding(NamedTuple):
    """A strategy and the ranks that it shards over."""

    strategy: Strategy
    mesh: DeviceMesh | None


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the modules of a group are sharded: the ranks (`mesh`), the dimension and the wrapper.

    Of nested modules that a group matches, the outermost one is wrapped.
    """

    match: tuple[Label, ...] = setting(help="patterns of module names, such as ['layers.*.feed_forward','head']")
    shard: int | None = setting(
        None,
        "ranks that each parameter is sharded over, with replicas on the other data-parallel ranks; 1: every rank has "
        "whole parameters; null: as parameters of no group",
        at_least=1,
    )

    _target_: str = field(init=False, default="")  # so that ids and run.yaml tell groups of equal settings apart

    def __post_init__(self) -> None:
        """Record which class this is."""
        object.__setattr__(self, "_target_", get_kind(type(self)))

    def build(self, world: Any) -> Sharding:
        """Return the strategy with its mesh in a `titan.parallelism.mesh.World`; all ranks call it, see `mesh`."""
        return Sharding(self, self.mesh(world))

    def shards(self, layout: Layout) -> int:
        """Return the number of ranks that a parameter is sharded over; it divides that of data-parallel ranks."""
        return self.shard or layout.sharded

    def mesh(self, world: Any) -> DeviceMesh:
        """Return the ranks: dimensions replicate (where it is above one) and shard.

        All ranks call it together, also those that have none of the group's modules, since it may create groups.
        """
        mesh: DeviceMesh = world.data_mesh(self.shards(world.layout))
        return mesh

    def dimension(self, name: str, shape: Sequence[int]) -> int:
        """Return the dimension along which a parameter is sharded; ranks must divide any but the first.

        Args:
            name: its name in the whole model.
            shape: its shape, of this tensor rank's part.
        """
        return 0

    def wrap(self, modules: list[nn.Module], mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
        """Wrap modules that are gathered together; their parameters are still on the meta device.

        Args:
            modules: one, or the embedding and the head where their weight is tied.
            mesh: of `mesh`.
            options: further arguments of `torch.distributed.fsdp.fully_shard`.
        """
        from torch.distributed.fsdp import fully_shard

        fully_shard(modules, mesh=mesh, **options)

    def describe(self, mesh: DeviceMesh) -> str:
        """Return in a few words how the group is sharded over its mesh."""
        class_prefix = f"{self._target_}, " if type(self) is not Strategy else ""
        replicas = f", {mesh.size(0)} replicas" if mesh.ndim == 2 and mesh.size(0) > 1 else ""
        return f"{class_prefix}sharded over {mesh.size(-1)} rank{'s' if mesh.size(-1) > 1 else ''}{replicas}"


@dataclass(frozen=True, kw_only=True)
class ModelSharding(Strategy):
    """A strategy that shards the whole model in another way than `fully_shard`, as the only group.

    `wrap` is called for each unit, the innermost first, and last for the stage, whose remaining parameters it shards
    too. Afterwards

    - every parameter is a DTensor with its former name, over `mesh` and, where it was a DTensor over tensor ranks, over
      both: the placements of `fully_shard`, so that any checkpoint resumes;
    - the backward pass of each micro-batch adds the sum over the ranks of the mesh to a parameter's gradient.

    Modules are compiled when they are called first, with what `wrap` did to them.
    """

    match: tuple[Label, ...] = setting(("*",), "patterns of module names: ['*'], all of them")

    def compiler_settings(self) -> dict[str, Any]:
        """Return the settings of `torch._inductor.config`, by name, with which a stage is compiled."""
        return {}

    def wrap(self, modules: list[nn.Module], mesh: DeviceMesh, options: Mapping[str, Any]) -> None:
        """Shard the parameters of modules; see the class.

        Args:
            modules: as in `Strategy.wrap`, or the stage.
            mesh: of `mesh`.
            options: `mp_policy` with the types in which weights are gathered and gradients reduced, and
                `reshard_after_forward`.
        """
        raise NotImplementedError(f"{type(self).__name__}.wrap")


DEFAULT = Strategy(match=())
"""The strategy of modules that no group matches."""


@dataclass(frozen=True, kw_only=True)
class ExpertExchange:
    """How tokens reach experts on other ranks; its methods do as titan does, and a class of one's own replaces some.

    Attributes:
        uses_threads: whether passes are started from other threads, which profiles record then.
    """

    uses_threads: ClassVar[bool] = False

    _target_: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Record which class this is."""
        object.__setattr__(self, "_target_", get_kind(type(self)))

    @property
    def is_own(self) -> bool:
        """Whether this is another exchange than titan's."""
        return type(self) is not ExpertExchange

    def build(self, group: Any) -> Any:
        """Return the `titan.model.experts.Dispatcher` of all layers of all stages; None: titan's.

        Args:
            group: the ranks that share experts, of which each has an equal number of consecutive ones.
        """
        return None

    def change_model(self, model: Any) -> None:
        """Change a stage's model on the meta device, before its blocks are checkpointed and compiled."""

    def configure_schedule(self, schedule: Any, device: Any) -> None:
        """Change one of torch's pipeline schedules before its first step on a rank's device."""


def _make_degree(help: str) -> int | str:
    help += "; -1: all devices that are left, auto: by rule"
    degree: int | str = setting(1, help, words=("auto",), at_least=-1)
    return degree


@dataclass(frozen=True)
class Parallelism:
    """The degree of each dimension."""

    replicate: int | str = _make_degree("replicas of the model (DDP; with shard: HSDP)")
    shard: int | str = _make_degree("ranks that weights, gradients and optimizer state are sharded over (FSDP)")
    context: int | str = _make_degree("ranks that each sequence is split over")
    tensor: int | str = _make_degree("ranks that each weight matrix is split over")
    pipeline: int | str = _make_degree("stages of the pipeline")
    expert: int | str = setting(
        1,
        "ranks of shard, context and tensor that share the experts of each layer; -1: all of them; auto: as many of a "
        "node as divide the experts",
        words=("auto",),
        at_least=-1,
    )
    exchange: ExpertExchange = setting(
        ExpertExchange(), "with expert: how tokens reach experts, in place of titan's all-to-all", later=True
    )
    dispatcher: Literal["alltoall", "deepep"] = setting(
        "alltoall", "deepep is an experiment: see parallelism.exchange and experiments/expert_exchange"
    )
    halves: bool = setting(False, "true is an experiment, as deepep of parallelism.dispatcher")
    pairs: bool = setting(False, "true is an experiment, as deepep of parallelism.dispatcher")
    microbatches: int | str = setting(
        "auto",
        "micro-batches that a rank's rows are split into; auto: as few as memory allows",
        words=("auto",),
        at_least=1,
    )
    reshard: int | str = setting(
        "auto",
        "free a block's gathered weights after the forward pass (FSDP): always, never, auto (unless there is a "
        "pipeline), or a number: reshard over this many ranks",
        words=("auto", "always", "never"),
        at_least=2,
    )
    accumulate: Literal["auto", "sharded", "whole"] = setting(
        "auto",
        "gradient accumulation (FSDP): sharded: reduce after each micro-batch, keep shards; whole: reduce once per "
        "step, keep the stage's gradients unsharded, in precision.accumulate; auto: sharded, with a pipeline whole",
    )
    prefetch: int | str = setting(
        "auto",
        "blocks that FSDP gathers ahead of the one that computes; 0: as torch does; auto: 1 where ranks share experts, "
        "else 0",
        words=("auto",),
        at_least=0,
    )
    reduce_buffers: int = setting(
        1,
        "reduce-scatters of gradients that FSDP may have in flight, each with the fp32 gradients of a block; more than "
        "1 helps where they take longer than a block's backward pass",
        at_least=1,
    )
    separate_reduce: bool = setting(
        False,
        "FSDP reduces gradients in process groups besides those that gather weights, so that both can be in flight "
        "(a second NCCL communicator)",
    )
    symmetric_memory: bool = setting(
        False, "FSDP's buffers are in symmetric memory, which NCCL gathers and reduces without copies (CUDA)"
    )
    sequence_parallel: bool = setting(True, "with tensor: split the sequence too, between matmuls")
    regather: bool | str = setting(
        "auto",
        "with tensor: save a rank's part of what matmuls gather, and gather it again in backward; auto: if blocks are "
        "not recomputed, with sequence_parallel",
        words=("auto",),
    )
    loss_parallel: bool = setting(True, "with tensor: compute the loss from split logits, never from whole ones")
    async_tensor: bool = setting(False, "with tensor: overlap matmuls with communication (CUDA, compile=block)")
    context_method: Literal["allgather", "ulysses", "ring"] = setting(
        "allgather", "how parts of a sequence attend to each other: allgather, ulysses or ring"
    )
    balance: bool = setting(True, "with context: give each rank a chunk of the row's head and one of its tail")
    schedule: Label = setting("auto", "pipeline schedule; auto: 1F1B, or GPipe where ranks have too few rows for it")
    stages: int | str = setting(
        "auto", "stages in all; auto: as few as the schedule can have", words=("auto",), at_least=1
    )
    split: Literal["balanced", "layers"] = setting(
        "balanced", "balanced: stages of equal cost, including the head; layers: equal numbers of layers"
    )
    starts: tuple[int, ...] = setting(
        (), "the first layer of each stage after the first, in place of split", at_least=1
    )
    idle: float = setting(0.15, "largest idle share of a pipeline for which micro-batches are chosen", above=0, below=1)
    groups: Mapping[str, Strategy] | None = setting(
        None,
        "modules that FSDP shards in another way, by names that you choose: {NAME: {match: [PATTERN,...], shard: 1}}; "
        "the first match applies",
        hashed=False,
    )

    def check(self) -> None:
        """Raise ConfigError when a degree is 0, or more than one is -1."""
        rest = [name for name in DIMENSIONS if getattr(self, name) == -1]
        if len(rest) > 1:
            raise ConfigError(f"parallelism.{rest[0]}=-1: parallelism.{rest[1]} is -1 too; only one can take the rest.")
        for name in DIMENSIONS:
            if getattr(self, name) == 0:
                raise ConfigError(f"parallelism.{name}=0: must be 1 or more, -1 for the rest, or auto.")
        if self.expert == 0:
            raise ConfigError(
                "parallelism.expert=0: must be 1 or more, or -1 for all ranks of shard, context and tensor."
            )
        for name, usual, choice in (("dispatcher", "alltoall", "deep_ep"), ("halves", False, ""), ("pairs", False, "")):
            if (value := getattr(self, name)) != usual:
                raise ConfigError(
                    f"parallelism.{name}={format_value(value)}: is an experiment now; give "
                    f"parallelism.{name}={format_value(usual)} +exchange@parallelism.exchange={choice or name}, with "
                    "experiments/expert_exchange/conf in hydra.searchpath."
                )

    @property
    def model_sharding(self) -> ModelSharding | None:
        """What shards the whole model in another way than FSDP; None: FSDP does."""
        return next((group for group in (self.groups or {}).values() if isinstance(group, ModelSharding)), None)

    def resolve_reshard(self, layout: Layout) -> bool | int:
        """Whether a block's gathered weights are freed after its forward pass; a number: reshard over so many ranks.

        Only FSDP's micro-batches share what is gathered, so that nothing else keeps it by default.
        """
        if self.reshard == "auto":
            return layout.pipeline == 1 or self.model_sharding is not None
        return self.reshard == "always" if isinstance(self.reshard, str) else self.reshard

    def resolve_prefetch(self, layout: Layout) -> int:
        """Return the number of blocks that are gathered ahead; 0: as torch does.

        torch gathers the next block when the host reaches it. Where ranks share experts the host waits for the device
        in each block, so that it comes there too late.
        """
        return int(layout.expert > 1) if self.prefetch == "auto" else int(self.prefetch)

    def accumulates_whole(self, layout: Layout) -> bool:
        """Whether gradients stay unsharded from micro-batch to micro-batch."""
        if self.model_sharding is not None:
            return False
        return layout.pipeline > 1 if self.accumulate == "auto" else self.accumulate == "whole"

    def compute_row_multiple(self, layout: Layout) -> int:
        """Return the number that the length of a row must be a multiple of."""
        head_and_tail = 2 if self.balance and layout.context > 1 else 1
        return layout.context * head_and_tail * (layout.tensor if self.sequence_parallel else 1)


def resolve_layout(parallelism: Parallelism, devices: int | None, limits: Mapping[str, int]) -> Layout:
    """Resolve -1 and "auto" to numbers.

    Args:
        devices: ranks in all; None where the layout decides (on a CPU): then each open degree is 2, so that any
            composition can be tried with the fewest ranks.
        limits: the largest useful degree of each dimension that is "auto" (default 2).

    Raises:
        ConfigError: when the degrees don't multiply to `devices`.
    """
    degrees: dict[str, int | str] = {name: getattr(parallelism, name) for name in DIMENSIONS}
    if devices is None:  # one that is "auto" is 1 where its limit is odd
        fewest = {name: math.gcd(2, limits.get(name, 2)) if d == "auto" else 2 for name, d in degrees.items()}
        layout = Layout(**{name: fewest[name] if d in (-1, "auto") else int(d) for name, d in degrees.items()})
    else:
        layout = _divide_devices(degrees, devices, limits)
    if devices is not None and layout.devices != devices:
        raise ConfigError(
            f"parallelism: {layout} makes {format_plural(layout.devices, 'rank')}, but there are "
            f"{format_plural(devices, 'device')}; choose parallelism=ddp or fsdp, change a degree, or give "
            f"cluster.devices={layout.devices}."
        )
    ranks = layout.sharded * layout.tensor
    replicates_tokens = layout.tensor > 1 and not parallelism.sequence_parallel
    auto = 1 if replicates_tokens else math.gcd(ranks, limits.get("expert", 1))
    resolved: dict[int | str, int] = {-1: ranks, "auto": auto}
    return replace(layout, expert=resolved.get(parallelism.expert) or int(parallelism.expert))


def _divide_devices(degrees: Mapping[str, int | str], devices: int, limits: Mapping[str, int]) -> Layout:
    """Return the layout whose open degrees divide what the others leave; its product may differ from `devices`."""
    resolved = dict(degrees)
    if resolved["shard"] == "auto" and -1 not in resolved.values():
        resolved["shard"] = -1
    remaining = devices // math.prod(int(d) for d in resolved.values() if d not in (-1, "auto"))
    open_count = sum(d in (-1, "auto") for d in resolved.values())
    for name in (name for name in RULE_ORDER if resolved[name] == "auto"):
        open_count -= 1
        largest = math.gcd(max(1, remaining), limits.get(name, 2))
        # the largest that leaves two for each of the others
        fitting = (d for d in range(largest, 0, -1) if largest % d == 0 and remaining // d >= 2**open_count)
        resolved[name] = next(fitting, 1)
        remaining //= int(resolved[name])
    return Layout(**{name: max(1, remaining) if d == -1 else int(d) for name, d in resolved.items()})


def count_key_repeats(heads: int, size: int) -> int:
    """Return the least number of times that key heads must be repeated, so that `size` ranks get equally many."""
    return size // math.gcd(heads, size)
