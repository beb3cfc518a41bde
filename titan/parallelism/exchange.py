"""Short messages between all ranks, outside of the process groups: to rank 0, and from rank 0 to all.

They use the rendezvous store. A process group would cost more: gloo connects every rank with every other one when a
group is created and gathers in a ring through all of them, and NCCL's group belongs to the thread that trains. Here a
round takes a few small requests per rank to one server, and any thread may make them.

    gather     every rank writes its message under a key; rank 0 reads and deletes them
    broadcast  rank 0 writes its message under one key; every other rank reads it
    scatter    rank 0 writes a message for each rank under a key, which that rank reads and deletes

A message above `MAX_PART_BYTES` bytes is split over further keys, because torch's TCPStore drops a connection that
sends a value of 8 MiB. The rounds are numbered, so all ranks have to make the same ones in the same order, each from
one thread at a time. A rank that leaves writes a mark in place of its next message, so that rank 0 (or all others
where it is rank 0) fails at once instead of waiting. A killed rank causes a timeout after `MESSAGE_TIMEOUT`; the
launcher ends the other ranks before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

MESSAGE_TIMEOUT = timedelta(hours=1)
"""The timeout of a message: another rank may have gigabytes to write first."""
TIMEOUT_MARGIN = timedelta(seconds=30)
"""How much longer than `cluster.timeout` a message may take: the watcher of a hang (`titan.debug.watch`) is first."""
DRAIN_TIMEOUT = timedelta(minutes=1)
"""The timeout at the end, while rank 0 waits until all ranks have read its last message."""
MAX_PART_BYTES = 7 * 2**20
"""The largest part of a message, in bytes."""
_MESSAGE, _ABORTED = b"+", b"-"
_COUNT_BYTES = 4
"""Bytes of a message's number of parts."""


class StoreExchange:
    """One rank's end of the messages between all ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = MESSAGE_TIMEOUT) -> None:
        """Open a separate connection to the store of `size` ranks; this one is `rank`.

        A request that waits blocks its connection, and training's requests must not wait for it.
        """
        self.store: Any = store.clone()
        self.store.set_timeout(timeout)
        self.timeout = timeout
        self.rank, self.size = rank, size
        self.gather_round = self.reply_round = 0
        self.broadcast_keys: list[str] = []  # of rank 0's messages to all since the last round of messages to it
        self.is_drained = False

    def gather(self, message: bytes) -> list[bytes] | None:
        """Send a message of each rank to rank 0; all ranks call it together.

        Returns:
            On rank 0 all messages in rank order, its own included; on the others None.

        Raises:
            ConnectionError: on rank 0, when a rank has left or sent no message in time.
        """
        round_number, self.gather_round, self.is_drained = self.gather_round, self.gather_round + 1, False
        if self.rank:
            self._write_message(_message_key(round_number, self.rank), message)
            return None
        messages = [
            message,
            *(self._pop_message(_message_key(round_number, rank), rank) for rank in range(1, self.size)),
        ]
        self._delete_keys(self.broadcast_keys)  # all ranks have read them, since each has started a later round
        self.broadcast_keys = []
        return messages

    def broadcast(self, message: bytes = b"") -> bytes:
        """Send rank 0's message to all ranks, and return it; all ranks call it together.

        Raises:
            ConnectionError: when rank 0 has left, or sent no message in time.
        """
        round_number, self.reply_round = self.reply_round, self.reply_round + 1
        if self.rank:
            return self._read_message(_message_key(round_number), 0)[0]
        self.broadcast_keys += self._write_message(_message_key(round_number), message)
        return message

    def scatter(self, messages: Sequence[bytes] = ()) -> bytes:
        """Send one of rank 0's messages to each rank, and return this rank's; all ranks call it together.

        Raises:
            ConnectionError: when rank 0 has left, or sent no message in time.
        """
        round_number, self.reply_round = self.reply_round, self.reply_round + 1
        if self.rank:
            return self._pop_message(_message_key(round_number, to=self.rank), 0)
        for rank in range(1, self.size):
            self._write_message(_message_key(round_number, to=rank), messages[rank])
        return messages[0]

    def drain(self) -> None:
        """Let rank 0 wait until all ranks have read its last message: the store may live in its process."""
        self.store.set_timeout(DRAIN_TIMEOUT)
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.gather(b"")
        self.store.set_timeout(self.timeout)
        self.is_drained = True

    def abort(self) -> None:
        """Mark that this rank has left, so that the others' next round fails; does nothing after `drain`."""
        if self.is_drained:
            return
        round_number = self.reply_round
        keys = [_message_key(round_number), *(_message_key(round_number, to=rank) for rank in range(1, self.size))]
        with contextlib.suppress(RuntimeError):  # the store may be gone already
            for key in [_message_key(self.gather_round, self.rank)] if self.rank else keys:
                self.store.set(key, _ABORTED)

    def _write_message(self, key: str, message: bytes) -> list[str]:
        """Write a message and return the keys of its parts; the first is written last, so that a reader finds all."""
        parts = [message[start : start + MAX_PART_BYTES] for start in range(0, len(message), MAX_PART_BYTES)] or [b""]
        keys = _list_part_keys(key, len(parts))
        for part_key, part in zip(keys[1:], parts[1:], strict=True):
            self.store.set(part_key, part)
        self.store.set(key, _MESSAGE + len(parts).to_bytes(_COUNT_BYTES, "little") + parts[0])
        return keys

    def _pop_message(self, key: str, rank: int) -> bytes:
        message, keys = self._read_message(key, rank)
        self._delete_keys(keys)
        return message

    def _read_message(self, key: str, rank: int) -> tuple[bytes, list[str]]:
        """Return a message and the keys of its parts."""
        try:
            first_part: bytes = self.store.get(key)
            if first_part[:1] == _ABORTED:
                raise ConnectionError(f"rank {rank} has left")
            keys = _list_part_keys(key, int.from_bytes(first_part[1 : 1 + _COUNT_BYTES], "little"))
            later_parts = [self.store.get(part_key) for part_key in keys[1:]]
        except RuntimeError as error:
            raise ConnectionError(f"rank {rank} sent no message ({' '.join(str(error).split())[:120]})") from error
        return b"".join([first_part[1 + _COUNT_BYTES :], *later_parts]), keys

    def _delete_keys(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.delete_key(key)


def _message_key(round_number: int, rank: int = 0, to: int | None = None) -> str:
    """Return the store's key of a rank's message in a round: to rank 0, or from rank 0 to all or to one rank."""
    return f"titan/exchange/{rank}/{round_number}{'' if to is None else f'/{to}'}"


def _list_part_keys(key: str, count: int) -> list[str]:
    """Return the keys of a message's parts."""
    return [key, *(f"{key}/part-{number}" for number in range(1, count))]
