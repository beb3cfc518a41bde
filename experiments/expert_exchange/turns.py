"""Two computations that take turns, so that each computes beside the exchanges of the other.

They are the forward pass of one micro-batch and the backward pass of another. Neither is a generator, as the halves of
a micro-batch are (`titan.model.steps`): autograd runs a backward pass as a whole, and a forward pass is inside of
FSDP's hooks, of the contexts of activation checkpointing and of a user's own modules. So each has a thread, and with it
a stack, a grad mode, hooks on saved tensors and dispatch modes for itself.

But the threads never run at once, unlike torchtitan's, which meet at barriers: one hands over where it is about to wait
for an exchange that it has started, and continues when the other one does so, or ends. The host issues all operations
and collectives in one order, which follows from both computations alone. It is the same on all ranks that run the same
pair, so their collectives can't block each other, and nothing that both use needs a lock.

    forward     attention, router | dispatch ->                    experts | combine ->                    attention...
    backward                        ... sum's gradient | combine' ->         experts' | dispatch' ->

What stands below an arrow runs beside that exchange; ' marks gradients. A recomputation does not hand over: it has as
many exchanges as the forward pass, which would be at its end before the gradients of half the blocks were exchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from titan.memory.kept_values import is_recomputing


class _Turns:
    """Which of two computations runs, 0 or 1.

    Attributes:
        running: the one that runs; the other one waits, or has ended.
        is_sending: whether each has started an exchange since it last handed over.
        has_ended: whether each has ended.
        error: what made one of them fail, after which the other one fails too.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.is_sending = [False, False]
        self.has_ended = [False, False]
        self.error: BaseException | None = None

    def run(self, number: int, compute: Callable[[], Any]) -> None:
        """Run a computation from its first turn on."""
        try:
            with self.changed:
                self._await_turn(number)
            compute()
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self.changed:
                self.has_ended[number], self.running = True, 1 - number
                self.changed.notify_all()

    def hand_over(self) -> None:
        """Let the other computation run until it hands over or ends."""
        number = self.running
        if self.has_ended[1 - number] or not self.is_sending[number]:
            return
        self.is_sending[number] = False
        with self.changed:
            self.running = 1 - number
            self.changed.notify_all()
            self._await_turn(number)

    def _await_turn(self, number: int) -> None:
        self.changed.wait_for(lambda: self.running == number or self.error is not None)
        if self.error is not None:
            raise RuntimeError("the computation that takes turns with this one has failed") from self.error


_ACTIVE: list[_Turns] = []
"""The turns of the two computations that run, if any do. Of the process: autograd runs a GPU's backward pass in a
thread that Python does not start."""


def take_turns(first: Callable[[], Any], second: Callable[[], Any], executor: Executor) -> None:
    """Run two computations in turns, the first one in this thread.

    Args:
        first: hands over where `experiments.expert_exchange.pairs.TurnedExchange` waits.
        second: likewise.
        executor: runs the second one in another thread.

    Raises:
        BaseException: what one of them raised first; both have ended then.
    """
    turns = _Turns()
    _ACTIVE.append(turns)
    try:
        future = executor.submit(turns.run, 1, second)
        turns.run(0, first)
        future.result()
    finally:
        _ACTIVE.remove(turns)
    if turns.error is not None:
        raise turns.error


def note_exchange() -> None:
    """Note that the computation that runs has started an exchange."""
    if _ACTIVE:
        _ACTIVE[-1].is_sending[_ACTIVE[-1].running] = True


def hand_over() -> None:
    """Let the other one of two computations run, if this one has started an exchange since it last did so."""
    if _ACTIVE and not is_recomputing():
        _ACTIVE[-1].hand_over()
