"""Gives torch.distributed NCCL's backend: gloo on the device's memory (`device/collectives.h`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.rehearsal.cuda import state

TIMEOUT = timedelta(minutes=10)
"""NCCL's own default."""


class NcclOptions:
    """What torch sets on the options of a group."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, TIMEOUT
        self.split_from: Any = None
        self.split_color, self.global_ranks_in_group, self.group_name = 0, list[int](), ""


class _Backend(type):
    """Recognises the extension's backend, whose own class is not known to Python."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance).__name__ == "Backend"


class ProcessGroupNCCL(metaclass=_Backend):
    """Makes a backend: a stream, and a group of gloo."""

    Options = NcclOptions

    def __new__(cls, store: Any, rank: int, size: int, options: NcclOptions) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        return state.device.group(ProcessGroupGloo(store, rank, size, timeout=options._timeout), rank, size)


def define_names() -> None:
    """Define NCCL's names, before torch.distributed imports them."""
    from torch._C import _distributed_c10d

    module: Any = _distributed_c10d
    module.ProcessGroupNCCL, module._DEFAULT_PG_NCCL_TIMEOUT = ProcessGroupNCCL, TIMEOUT
    module.Backend._set_default_timeout = lambda backend, timeout: None  # gloo takes it from each operation
    state.names |= {f"torch._C._distributed_c10d.{name}" for name in ("ProcessGroupNCCL", "_DEFAULT_PG_NCCL_TIMEOUT")}


def replace_split(module: Any) -> None:
    """Replace the splitting of a communicator, which all ranks of the parent call, by a new group of gloo.

    Args:
        module: torch.distributed.distributed_c10d.
    """

    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        parent = parent_pg or module.group.WORLD
        if parent.bound_device_id is None:
            raise RuntimeError("No device associated with the default pg, not safe to split any process groups")
        members, own_rank = module.get_process_group_ranks(parent), module.get_rank(parent)
        own_indices = next((ranks for ranks in split_ranks or () if own_rank in ranks), None)
        if own_indices is None:
            return None
        ranks = [members[rank] for rank in own_indices]
        return module.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    module.split_group = split_group
