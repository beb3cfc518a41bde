"""Which rank a run waits for, and why, from what its ranks do. Plain data in, a sentence out. Free of torch.

silent        a rank that does not write its state: stopped, dead, or its host is unreachable
different     ranks in different collectives of one group under the same number: those that have never
              entered this one before, else those that are in the minority
late          a rank that others wait for and that does not wait itself: it reads data, compiles, writes, computes
behind        of ranks that have all entered the same collectives, those that have completed fewer of them
crossed       ranks that all wait for each other, in different groups: those in a collective that is new to them
together      ranks that have all entered a collective, and none has completed it: no rank is named

A rank waits for those that have not entered its oldest collective. Later ones say nothing where a device computes them:
the host issues them ahead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan.debug import activity, rank_state
from titan.debug.flight import Operation
from titan.debug.rank_state import RankState

"""The phases of which each step has one, and what comes before the first."""
NAMES = {
    "shard": "fsdp",
    "replicate": "ddp",
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "world": "all ranks",
}
"""How a dimension of the layout is named in a sentence."""
MOST = 8
"""Ranks that a sentence lists."""


@dataclass(frozen=True)
class World:
    """What is known of all ranks.

    Attributes:
        size: how many there are.
        states: what each rank does; the last state of one that is silent.
        silent: ranks that do not write their state.
        processes: the state in /proc of each rank's process, as its node sees it.
    """

    size: int
    states: Mapping[int, RankState]
    silent: frozenset[int]
    processes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """What a run waits for.

    Attributes:
        ranks: those that it waits for; empty where they are not known.
        what: the sentence without its beginning, such as "waiting for rank 3 in the all-gather of layer 12 (fsdp), step
            118; rank 3: stopped (SIGSTOP), process 123 on n1".
        usual: whether every rank does the same slow thing, which is not an error: compile, save, evaluate, start.
        node: the name of the node of the first of these ranks; empty where it is not known.
        together: whether ranks wait in a collective that all of them have entered.
        saves: whether it is a checkpoint that waits.
    """

    ranks: tuple[int, ...]
    what: str
    usual: bool = False
    node: str = ""
    together: bool = False
    saves: bool = False


def diagnose(world: World) -> Diagnosis:
    """Return what a run waits for whose ranks make no progress."""
    live = {rank: state for rank, state in world.states.items() if rank not in world.silent}
    found = _culprits(world, live) if live else ()
    if not found:
        return _together(live) or _same(live)
    causes = "; ".join(_causes(world, found))
    first = world.states.get(found[0])
    return Diagnosis(found, f"waiting for {listed(found)}{_where(world, live, found)}; {causes}", node=_node(first))


def diagnose_save(world: World) -> Diagnosis:
    """Return what the checkpoint waits for that ranks are writing; its rounds go through rank 0."""
    live = {rank: state for rank, state in world.states.items() if rank not in world.silent}
    step = Counter(s.saving for s in live.values() if s.saving is not None).most_common(1)[0][0]
    late = sorted(world.silent) or [r for r, s in live.items() if s.saving != step or not s.saving_waits]
    if len(late) == world.size:
        return Diagnosis((), f"all ranks write the checkpoint of step {step}", usual=True, saves=True)
    if not late:
        return Diagnosis((), f"all ranks wait for messages about the checkpoint of step {step}", saves=True)
    causes = "; ".join(_causes(world, late, saving=True))
    first = world.states.get(late[0])
    sentence = f"the checkpoint of step {step} is waiting for {listed(late)}; {causes}"
    return Diagnosis(tuple(late), sentence, node=_node(first), saves=True)


def _culprits(world: World, live: Mapping[int, RankState]) -> tuple[int, ...]:
    if gone := world.silent | set(range(world.size)) - world.states.keys():
        return tuple(sorted(gone))
    if different := _different(world, live):
        return different
    absent = _Absent(world)
    waited_for = set[int]().union(*(_waits_for(absent, state) for state in live.values()))
    free = {rank for rank, state in live.items() if not _waits(state)}
    if late := sorted(waited_for & free or (free if len(free) < len(live) else set())):
        return tuple(late)
    return _crossed(live) if waited_for else _behind(world, live)


class _Absent:
    """Which ranks have not come to a collective; each is asked for by many ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._known: dict[tuple[str, int, Sequence[int]], frozenset[int]] = {}

    def ranks(self, state: RankState, op: Operation) -> frozenset[int]:
        """Return the ranks that have not come to a rank's collective."""
        key = op.group, op.number, _members(self.world, state, op)
        if key not in self._known:
            self._known[key] = frozenset(rank for rank in key[2] if _is_before(op, self.world.states.get(rank)))
        return self._known[key] - {state.rank}


def _members(world: World, state: RankState, op: Operation) -> Sequence[int]:
    """Return the ranks of a collective; the same value on each of them."""
    group = state.groups.get(op.group)
    return op.peers or (group.ranks if group else range(world.size))


def _awaited(state: RankState) -> list[Operation]:
    """Return the collectives in which a rank waits for others: those that have started.

    Where that is not known it is the oldest one, which is the first that the device has not computed.
    """
    known = [op for op in state.pending if op.started]
    return known or [op for op in state.pending[:1] if op.started is None]


def _waits(state: RankState) -> bool:
    """Whether a rank waits for other ranks; where it is not known what its device does, as long as that has work."""
    pending = any(op.started is not False for op in state.pending)
    return bool(pending or state.exchanges or state.joins or state.transfers)


def _waits_for(absent: _Absent, state: RankState) -> set[int]:
    """Return the ranks that have not entered a collective that this rank is in."""
    found = set[int]().union(*(absent.ranks(state, op) for op in _awaited(state)))
    if state.transfers and not found:
        groups = state.groups.values()
        found |= {rank for group in groups if group.dimension == "pipeline" for rank in group.ranks} - {state.rank}
    return found


def _is_before(op: Operation, other: RankState | None) -> bool:
    """Return whether another rank has not come to a collective: its host, or on a GPU its device."""
    if other is None or op.number < 0 or other.entered.get(op.group, 0) < op.number:
        return True
    return any(o.started is False for o in other.pending if (o.group, o.number) == (op.group, op.number))


def _behind(world: World, live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the ranks of which the device has not completed a collective that another rank of it has completed."""
    found = []
    for rank, state in live.items():
        for op in (op for op in state.pending[:1] if op.started is None and op.number >= 0):
            others = [live[other] for other in _members(world, state, op) if other in live]
            if any(other.completed.get(op.group, 0) >= op.number for other in others):
                found.append(rank)
    return tuple(sorted(found))


def _different(world: World, live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the ranks that are in another collective than the others of their group, under the same number."""
    met: dict[tuple[str, int, Sequence[int]], dict[int, Operation]] = {}
    for rank, state in live.items():
        for op in state.pending:
            if op.number >= 0:
                met.setdefault((op.group, op.number, _members(world, state, op)), {})[rank] = op
    for there in met.values():
        kinds = Counter(op.kind for op in there.values())
        if len(kinds) > 1:
            new = [rank for rank, op in there.items() if not op.familiar]
            common, count = kinds.most_common(1)[0]
            few = [rank for rank, op in there.items() if op.kind != common]
            return tuple(sorted(new if 0 < len(new) < len(there) else few if 2 * count > len(there) else there))
    return ()


def _crossed(live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return, of ranks that wait for each other, those in a collective that is new to them, else at another step."""
    new = sorted(rank for rank, state in live.items() if any(not op.familiar for op in state.pending))
    if 0 < len(new) < len(live):
        return tuple(new)
    where = {rank: (state.step, state.phase) for rank, state in live.items()}
    common, count = Counter(where.values()).most_common(1)[0]
    if len(live) / 2 < count < len(live):
        return tuple(sorted(rank for rank in where if where[rank] != common))
    return tuple(sorted(live))


def _where(world: World, live: Mapping[int, RankState], late: Sequence[int]) -> str:
    """Return in which collective the others wait, and at which step."""
    waiting = [state for rank, state in live.items() if rank not in late and state.pending]
    absent = _Absent(world)
    direct = [s for s in waiting if set(late) & _waits_for(absent, s)] or waiting
    step = Counter(s.step for s in direct or [s for r, s in live.items() if r not in late] or live.values())
    at = _at_step(step.most_common(1)[0][0] if step else 0)
    if not direct:
        return _without_collective([s for rank, s in live.items() if rank not in late]) + at
    ops = Counter(_in_words(s, op) for s in direct for op in s.pending[:1])
    return f" in the {ops.most_common(1)[0][0]}{at}"


def _without_collective(waiting: Sequence[RankState]) -> str:
    """Return what ranks do that wait outside of collectives."""
    if any(state.transfers for state in waiting):
        return " in a message between stages (pp)"
    if any(state.joins for state in waiting):
        return " while the ranks connect"
    phases = Counter(s.phase for s in waiting if s.phase in (activity.SAVING, activity.EVALUATING, activity.FINISHING))
    return f" while {phases.most_common(1)[0][0]}" if phases else ""


def _in_words(state: RankState, op: Operation) -> str:
    group = state.groups.get(op.group)
    name = NAMES.get(group.dimension, group.dimension) if group else "all ranks"
    of = layer(state.layer)
    return f"{op.kind}{f' of {of}' if of else ''} ({name})"


def layer(module: str | None) -> str:
    """Return a module of the model in words: "layer 12" for "model.layers.12.attention"; empty for None."""
    if not module:
        return ""
    block = re.search(r"layers\.(\d+)", module)
    return f"layer {block[1]}" if block else module.removeprefix("model.")


def _causes(world: World, ranks: Sequence[int], saving: bool = False) -> Iterable[str]:
    """Yield what each of the ranks does, the same words once for several of them."""
    said: dict[str, list[int]] = {}
    gone = _unreachable_hosts(world)
    for rank in ranks:
        said.setdefault(_cause(world, rank, gone, saving), []).append(rank)
    for words, those in list(said.items())[:MOST]:
        yield f"{listed(those)}: {words}"


def _unreachable_hosts(world: World) -> set[str]:
    """Return the hosts of which no rank writes its state, where other hosts have ranks that do."""
    live = {state.host for rank, state in world.states.items() if rank not in world.silent}
    return {state.host for state in world.states.values()} - live if live else set()


def _cause(world: World, rank: int, gone: set[str], saving: bool) -> str:
    state = world.states.get(rank)
    if state is None:
        return "not started"
    if rank in world.silent:
        if state.host in gone:
            return f"no answer from any rank on {state.host}: it may be down or unreachable"
        seen = rank_state.WORDS.get(world.processes.get(rank, "S"), "no answer")
        return f"{seen}, process {state.pid} on {state.host}"
    words = f"writing it ({state.saving_line})" if saving and state.saving is not None else _busy(state)
    return f"{words}, process {state.pid} on {state.host}"


def _busy(state: RankState) -> str:
    """Return what a rank does that others wait for."""
    if state.compiles:
        return f"compiling ({state.line})"
    if state.pending and state.pending[0].started is False:
        return f"its GPU is at work before the {state.pending[0].kind}{_at_step(state.step)}"
    if state.pending and state.pending[0].started is None and state.pending[0].familiar:
        return f"its GPU has not completed the {state.pending[0].kind}{_at_step(state.step)}"
    if state.pending:
        op = state.pending[0]
        called = f" called in {op.line}" if op.line else ""
        return f"in another collective, {_article(op.kind)}{called}{_at_step(state.step)}"
    if state.phase == activity.DATA:
        return f"waiting for data ({state.reads or state.line}){_at_step(state.step)}"
    if state.phase == activity.SAVING:
        return f"saving a checkpoint ({state.saving_line or state.line})"
    of = layer(state.layer)
    return f"{state.phase}{f' in {of}' if of else ''} ({state.line}){_at_step(state.step)}"


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _at_step(step: int) -> str:
    return f", step {step}" if step else ", before the first step"


def _together(live: Mapping[int, RankState]) -> Diagnosis | None:
    """Return in which collective ranks are that all of them have entered, and none has completed; None without one."""
    waiting = [state for state in live.values() if state.pending]
    if not waiting:
        return None
    names = Counter((_in_words(state, state.pending[0]), state.pending[0].started) for state in waiting)
    words, started = names.most_common(1)[0][0]
    cause = "the network between them, or a device"
    if started is None:
        cause += ": TORCH_NCCL_ENABLE_TIMING=1 records which of them have begun it"
    them = [state.rank for state in waiting if _in_words(state, state.pending[0]) == words]
    what = f"{listed(them)} have entered the {words}{_at_step(waiting[0].step)}, and none has completed it; {cause}"
    return Diagnosis((), what, together=True)


def _same(live: Mapping[int, RankState]) -> Diagnosis:
    """Return what all ranks do: slow, but none waits for another."""
    states = list(live.values())
    if states and all(state.compiles for state in states):
        return Diagnosis((), "all ranks are compiling", usual=True)
    phase = Counter(state.phase for state in states).most_common(1)[0][0] if states else activity.STARTING
    who = "all ranks are" if len(states) > 1 else "it is"
    slow = phase in (activity.EVALUATING, activity.SAVING, activity.STARTING, activity.FINISHING)
    lines = Counter(state.reads if phase == activity.DATA and state.reads else state.line for state in states)
    line = f" ({lines.most_common(1)[0][0]})" if lines else ""
    return Diagnosis((), f"{who} {phase}{line}{_at_step(states[0].step if states else 0)}", usual=slow)


def _node(state: RankState | None) -> str:
    return "" if state is None else state.node


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 3, 7", "ranks 0, 1, ... (16 in all)"."""
    shown = ", ".join(map(str, ranks[:MOST]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def table(world: World) -> str:
    """Return what each rank does, one line each."""
    lines = []
    for rank in range(world.size):
        state = world.states.get(rank)
        if state is None:
            lines.append(f"rank {rank}: not started")
            continue
        how = "SILENT, last seen " if rank in world.silent else ""
        ops = "; ".join(
            f"{_in_words(state, op)}, number {op.number}, sizes {op.sizes}"
            f"{'' if op.familiar else ', not entered before'}{f', called in {op.line}' if op.line else ''}"
            for op in state.pending
        )
        save = "" if state.saving is None else f"; checkpoint of step {state.saving}: {state.saving_line}"
        lines.append(
            f"rank {rank} on {state.host}, process {state.pid}: {how}{state.phase}, step {state.step}, "
            f"{state.line}{f'; in {ops}' if ops else ''}{save}"
        )
    return "\n".join(lines)
