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
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan.debug import activity, rank_state
from titan.debug.rank_state import PendingCollective, RankState

DIMENSION_NAMES = {
    "shard": "fsdp",
    "replicate": "ddp",
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "world": "all ranks",
}
"""How a dimension of the layout is named in a sentence."""
MAX_LISTED = 8  # ranks that a sentence lists


@dataclass(frozen=True)
class RunState:
    """What is known of all ranks."""

    size: int  # how many there are
    states: Mapping[int, RankState]  # what each rank does; the last state of one that is silent
    silent_ranks: frozenset[int]  # ranks that do not write their state
    processes: Mapping[int, str] = field(default_factory=dict)  # the state of each rank's process, as its node sees it
    _absent_ranks: dict[Any, frozenset[int]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def live(self) -> dict[int, RankState]:
        """The states of the ranks that write them, without those that have ended."""
        return {
            rank: state
            for rank, state in self.states.items()
            if rank not in self.silent_ranks and state.phase != activity.ENDED
        }

    def list_members(self, state: RankState, op: PendingCollective) -> Sequence[int]:
        """Return the ranks of a rank's collective; the same value on each of them."""
        group = state.groups.get(op.group)
        return op.peers or (group.ranks if group else range(self.size))

    def find_absent_ranks(self, state: RankState, op: PendingCollective) -> frozenset[int]:
        """Return the ranks that have not come to a rank's collective; many ranks ask for each."""
        key = op.group, op.number, self.list_members(state, op)
        if key not in self._absent_ranks:
            self._absent_ranks[key] = frozenset(rank for rank in key[2] if _is_before(op, self.states.get(rank)))
        return self._absent_ranks[key] - {state.rank}


@dataclass(frozen=True)
class Diagnosis:
    """What a run waits for."""

    ranks: tuple[int, ...]  # those that it waits for; empty where they are not known
    # the sentence without its beginning, such as "waiting for rank 3 in the all-gather of layer 12 (fsdp), step 118;
    # rank 3: stopped (SIGSTOP), process 123 on n1"
    sentence: str
    # whether every rank does the same slow thing, which is not an error: compile, save, evaluate, start
    is_expected: bool = False
    node: str = ""  # the name of the node of the first of these ranks; empty where it is not known
    all_entered: bool = False  # whether ranks wait in a collective that all of them have entered
    is_save: bool = False  # whether it is a checkpoint that waits
    is_hook: bool = False  # whether it waits for hooks of one's own


def diagnose(run_state: RunState) -> Diagnosis:
    """Return what a run waits for whose ranks make no progress."""
    live = run_state.live
    culprits = _find_culprits(run_state, live) if live else ()
    if not culprits:
        return _diagnose_common_collective(live) or _diagnose_common_work(live)
    causes = "; ".join(_list_causes(run_state, culprits))
    first = run_state.states.get(culprits[0])
    return Diagnosis(
        culprits,
        f"waiting for {format_ranks(culprits)}{_describe_wait(run_state, live, culprits)}; {causes}",
        node=_get_node(first),
        is_hook=all(r in live and live[r].phase == activity.HOOK and not _is_waiting(live[r]) for r in culprits),
    )


def diagnose_save(run_state: RunState) -> Diagnosis:
    """Return what the checkpoint waits for that ranks are writing; its rounds go through rank 0."""
    live = run_state.live
    step = Counter(s.saving for s in live.values() if s.saving is not None).most_common(1)[0][0]
    late_ranks = sorted(run_state.silent_ranks)
    late_ranks = late_ranks or [r for r, s in live.items() if s.saving != step or not s.saving_waits]
    if len(late_ranks) == run_state.size:
        return Diagnosis((), f"all ranks write the checkpoint of step {step}", is_expected=True, is_save=True)
    if not late_ranks:
        return Diagnosis((), f"all ranks wait for messages about the checkpoint of step {step}", is_save=True)
    causes = "; ".join(_list_causes(run_state, late_ranks, saving=True))
    first = run_state.states.get(late_ranks[0])
    sentence = f"the checkpoint of step {step} is waiting for {format_ranks(late_ranks)}; {causes}"
    return Diagnosis(tuple(late_ranks), sentence, node=_get_node(first), is_save=True)


def _find_culprits(run_state: RunState, live: Mapping[int, RankState]) -> tuple[int, ...]:
    if missing := run_state.silent_ranks | set(range(run_state.size)) - run_state.states.keys():
        return tuple(sorted(missing))
    if divergent := _find_different(run_state, live):
        return divergent
    waited_for = set[int]().union(*(_find_awaited_ranks(run_state, state) for state in live.values()))
    free = {rank for rank, state in live.items() if not _is_waiting(state)}
    ended = run_state.states.keys() - run_state.silent_ranks - live.keys()
    if late := sorted(waited_for & (free | ended) or (free if len(free) < len(live) else set())):
        return tuple(late)
    return _find_crossed(live) if waited_for else _find_behind(run_state, live)


def _is_waiting(state: RankState) -> bool:
    """Whether a rank waits for other ranks; where it is not known what its device does, as long as that has work."""
    pending = any(op.started is not False for op in state.pending)
    return bool(pending or state.exchanges or state.joins or state.transfers)


def _find_awaited_ranks(run_state: RunState, state: RankState) -> set[int]:
    """Return the ranks that have not entered a collective that this rank is in.

    It waits in those that have started. Where that is not known it is the oldest one, the first that the device has not
    computed.
    """
    started = [op for op in state.pending if op.started] or [op for op in state.pending[:1] if op.started is None]
    awaited = set[int]().union(*(run_state.find_absent_ranks(state, op) for op in started))
    if state.transfers and not awaited:
        groups = state.groups.values()
        awaited |= {rank for group in groups if group.dimension == "pipeline" for rank in group.ranks} - {state.rank}
    return awaited


def _is_before(op: PendingCollective, peer_state: RankState | None) -> bool:
    """Return whether another rank has not come to a collective: its host, or on a GPU its device."""
    if peer_state is None or op.number < 0 or peer_state.entered.get(op.group, 0) < op.number:
        return True
    return any(o.started is False for o in peer_state.pending if (o.group, o.number) == (op.group, op.number))


def _find_behind(run_state: RunState, live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the ranks of which the device has not completed a collective that another rank of it has completed."""
    behind = []
    for rank, state in live.items():
        for op in (op for op in state.pending[:1] if op.started is None and op.number >= 0):
            peers = [live[peer] for peer in run_state.list_members(state, op) if peer in live]
            if any(peer.completed.get(op.group, 0) >= op.number for peer in peers):
                behind.append(rank)
    return tuple(sorted(behind))


def _find_different(run_state: RunState, live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return the ranks that are in another collective than the others of their group, under the same number."""
    operations_by_number = defaultdict[tuple[str, int, Sequence[int]], dict[int, PendingCollective]](dict)
    for rank, state in live.items():
        for op in (op for op in state.pending if op.number >= 0):
            operations_by_number[op.group, op.number, run_state.list_members(state, op)][rank] = op
    for operations in operations_by_number.values():
        kinds = Counter(op.kind for op in operations.values())
        if len(kinds) > 1:
            newcomers = [rank for rank, op in operations.items() if not op.familiar]
            common, count = kinds.most_common(1)[0]
            minority = [rank for rank, op in operations.items() if op.kind != common]
            if 0 < len(newcomers) < len(operations):
                return tuple(sorted(newcomers))
            return tuple(sorted(minority if 2 * count > len(operations) else operations))
    return ()


def _find_crossed(live: Mapping[int, RankState]) -> tuple[int, ...]:
    """Return, of ranks that wait for each other, those in a collective that is new to them, else at another step."""
    newcomers = sorted(rank for rank, state in live.items() if any(not op.familiar for op in state.pending))
    if 0 < len(newcomers) < len(live):
        return tuple(newcomers)
    positions = {rank: (state.step, state.phase) for rank, state in live.items()}
    common, count = Counter(positions.values()).most_common(1)[0]
    if len(live) / 2 < count < len(live):
        return tuple(sorted(rank for rank in positions if positions[rank] != common))
    return tuple(sorted(live))


def _describe_wait(run_state: RunState, live: Mapping[int, RankState], late_ranks: Sequence[int]) -> str:
    """Return in which collective the others wait, and at which step."""
    waiting = [state for rank, state in live.items() if rank not in late_ranks and state.pending]
    direct = [s for s in waiting if set(late_ranks) & _find_awaited_ranks(run_state, s)] or waiting
    step = Counter(s.step for s in direct or [s for r, s in live.items() if r not in late_ranks] or live.values())
    step_text = _format_step(step.most_common(1)[0][0] if step else 0)
    if not direct:
        return _describe_wait_elsewhere([s for rank, s in live.items() if rank not in late_ranks]) + step_text
    ops = Counter(_describe_operation(s, op) for s in direct for op in s.pending[:1])
    return f" in the {ops.most_common(1)[0][0]}{step_text}"


def _describe_wait_elsewhere(waiting: Sequence[RankState]) -> str:
    """Return what ranks do that wait outside of collectives."""
    if any(state.transfers for state in waiting):
        return " in a message between stages (pp)"
    if any(state.joins for state in waiting):
        return " while the ranks connect"
    phases = Counter(s.phase for s in waiting if s.phase in (activity.SAVING, activity.EVALUATING, activity.FINISHING))
    return f" while {phases.most_common(1)[0][0]}" if phases else ""


def _describe_operation(state: RankState, op: PendingCollective) -> str:
    group = state.groups.get(op.group)
    name = DIMENSION_NAMES.get(group.dimension, group.dimension) if group else "all ranks"
    layer_name = describe_layer(state.layer)
    return f"{op.kind}{f' of {layer_name}' if layer_name else ''} ({name})"


def describe_layer(module: str | None) -> str:
    """Return a module of the model in words: "layer 12" for "model.layers.12.attention"; empty for None."""
    if not module:
        return ""
    block = re.search(r"layers\.(\d+)", module)
    return f"layer {block[1]}" if block else module.removeprefix("model.")


def _list_causes(run_state: RunState, ranks: Sequence[int], saving: bool = False) -> Iterable[str]:
    """Yield what each of the ranks does, the same words once for several of them."""
    ranks_by_cause = defaultdict[str, list[int]](list)
    live_hosts = {state.host for rank, state in run_state.states.items() if rank not in run_state.silent_ranks}
    unreachable = {state.host for state in run_state.states.values()} - live_hosts if live_hosts else set()
    for rank in ranks:
        ranks_by_cause[_describe_cause(run_state, rank, unreachable, saving)].append(rank)
    for words, cause_ranks in list(ranks_by_cause.items())[:MAX_LISTED]:
        yield f"{format_ranks(cause_ranks)}: {words}"


def _describe_cause(run_state: RunState, rank: int, unreachable: set[str], saving: bool) -> str:
    """Return what a rank does; hosts are `unreachable` of which no rank writes its state, where others have such."""
    state = run_state.states.get(rank)
    if state is None:
        return "not started"
    if rank in run_state.silent_ranks:
        if state.host in unreachable:
            return f"no answer from any rank on {state.host}: it may be down or unreachable"
        process_words = rank_state.PROCESS_WORDS.get(run_state.processes.get(rank, "S"), "no answer")
        return f"{process_words}, process {state.pid} on {state.host}"
    words = f"writing it ({state.saving_line})" if saving and state.saving is not None else _describe_work(state)
    return f"{words}, process {state.pid} on {state.host}"


def _describe_work(state: RankState) -> str:
    """Return what a rank does that others wait for."""
    step_text = _format_step(state.step)
    if state.compiles:
        return f"compiling ({state.line})"
    if state.pending:
        op = state.pending[0]
        if op.started is False:
            return f"its GPU is at work before the {op.kind}{step_text}"
        if op.started is None and op.familiar:
            return f"its GPU has not completed the {op.kind}{step_text}"
        article, call_line = "an" if op.kind[0] in "aeiou" else "a", f" called in {op.line}" if op.line else ""
        return f"in another collective, {article} {op.kind}{call_line}{step_text}"
    if state.phase == activity.DATA:
        return f"waiting for data ({state.reads or state.line}){step_text}"
    if state.phase == activity.SAVING:
        return f"saving a checkpoint ({state.saving_line or state.line})"
    layer_name = describe_layer(state.layer)
    return f"{state.phase}{f' in {layer_name}' if layer_name else ''} ({state.line}){step_text}"


def _format_step(step: int) -> str:
    return f", step {step}" if step else ", before the first step"


def _diagnose_common_collective(live: Mapping[int, RankState]) -> Diagnosis | None:
    """Return in which collective ranks are that all of them have entered, and none has completed; None without one."""
    waiting = [state for state in live.values() if state.pending]
    if not waiting:
        return None
    names = Counter((_describe_operation(state, state.pending[0]), state.pending[0].started) for state in waiting)
    words, started = names.most_common(1)[0][0]
    cause = "the network between them, or a device"
    if started is None:
        cause += ": TORCH_NCCL_ENABLE_TIMING=1 records which of them have begun it"
    waiting_ranks = [state.rank for state in waiting if _describe_operation(state, state.pending[0]) == words]
    operation = f"{words}{_format_step(waiting[0].step)}"
    sentence = f"{format_ranks(waiting_ranks)} have entered the {operation}, and none has completed it; {cause}"
    return Diagnosis((), sentence, all_entered=True)


def _diagnose_common_work(live: Mapping[int, RankState]) -> Diagnosis:
    """Return what all ranks do: slow, but none waits for another."""
    states = list(live.values())
    if states and all(state.compiles for state in states):
        return Diagnosis((), "all ranks are compiling", is_expected=True)
    phase = Counter(state.phase for state in states).most_common(1)[0][0] if states else activity.STARTING
    subject = "all ranks are" if len(states) > 1 else "it is"
    is_expected = phase in (activity.EVALUATING, activity.SAVING, activity.STARTING, activity.FINISHING, activity.HOOK)
    lines = Counter(state.reads if phase == activity.DATA and state.reads else state.line for state in states)
    line = f" ({lines.most_common(1)[0][0]})" if lines else ""
    sentence = f"{subject} {phase}{line}{_format_step(states[0].step if states else 0)}"
    return Diagnosis((), sentence, is_expected=is_expected)


def _get_node(state: RankState | None) -> str:
    return "" if state is None else state.node


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 3, 7", "ranks 0, 1, ... (16 in all)"."""
    numbers = ", ".join(map(str, ranks[:MAX_LISTED]))
    ellipsis = f", ... ({len(ranks)} in all)" if len(ranks) > MAX_LISTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{ellipsis}"


def format_table(run_state: RunState) -> str:
    """Return what each rank does, one line each."""
    lines = []
    for rank in range(run_state.size):
        state = run_state.states.get(rank)
        if state is None:
            lines.append(f"rank {rank}: not started")
            continue
        silence = "SILENT, last seen " if rank in run_state.silent_ranks else ""
        ops = "; ".join(
            f"{_describe_operation(state, op)}, number {op.number}, sizes {op.sizes}"
            f"{'' if op.familiar else ', not entered before'}{f', called in {op.line}' if op.line else ''}"
            for op in state.pending
        )
        save = "" if state.saving is None else f"; checkpoint of step {state.saving}: {state.saving_line}"
        lines.append(
            f"rank {rank} on {state.host}, process {state.pid}: {silence}{state.phase}, step {state.step}, "
            f"{state.line}{f'; in {ops}' if ops else ''}{save}"
        )
    return "\n".join(lines)
