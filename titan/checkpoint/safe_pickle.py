"""Parse a pickle as data: nothing that it names is imported or called. Free of torch.

A pickle is a program for a stack machine. Python's unpickler calls what the program names, and one restricted to some
classes still calls them and sets their attributes. This parser supports the opcodes that `pickle.dump` writes for plain
values and objects since protocol 4; instead of calling a class or function it creates a `Made` with the name, the
arguments and the state. Everything else is rejected.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from titan.files.untrusted import word

Name = tuple[str, str]
"""A module and a name in it."""
_STOP, _MEMOIZE, _BININT1 = pickle.STOP[0], pickle.MEMOIZE[0], pickle.BININT1[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]


@dataclass(eq=False, slots=True)
class Global:
    """A class, a function or a constant that the file names."""

    name: Name


@dataclass(eq=False, slots=True)
class Made:
    """The result of a call that was not made: the callee's name, the arguments, and the object's state."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


def load(content: bytes, known: Container[Name]) -> Any:
    """Parse a pickle.

    Args:
        content: the pickle.
        known: the allowed names.

    Raises:
        ValueError: when it has another name, or is not in the form that `pickle.dump` writes.
    """
    machine = _Machine(content, known)
    try:
        return machine.run()
    except UnknownName:
        raise
    except (ValueError, IndexError, TypeError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"byte {machine.at:,} is invalid ({error})") from error


class UnknownName(ValueError):
    """A pickle has a name that is not allowed."""


class _Machine:
    """The stack machine: its stack, the stack's marks, and the memo."""

    def __init__(self, content: bytes, known: Container[Name]) -> None:
        self.content, self.known, self.at = content, known, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Run the program and return its value. The most frequent opcodes are inlined for speed."""
        if self.content[:1] != pickle.PROTO or self.content[1:2] not in (b"\4", b"\5"):
            raise ValueError("it is of another protocol than 4 or 5")
        at, content, stack, memo, codes, number = 2, self.content, self.stack, self.memo, _CODES, int.from_bytes
        while (code := content[at]) != _STOP:
            at += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[content[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[number(content[at : at + 4], "little")])
                at += 4
            elif code == _BININT1:
                stack.append(content[at])
                at += 1
            else:
                self.at = at
                codes[code](self)
                at = self.at
        (value,) = stack
        return value

    def unknown(self) -> None:
        """Reject an opcode."""
        raise ValueError(f"opcode {self.content[self.at - 1]:#04x}")

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        self.at += size
        if self.at > len(self.content):
            raise ValueError("it is truncated")
        return self.content[self.at - size : self.at]

    def number(self, size: int) -> int:
        """Return the next bytes as an unsigned integer."""
        return int.from_bytes(self.take(size), "little")

    def frame(self) -> None:
        """Skip the length of a frame, which is not needed."""
        self.take(8)

    def signed(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def unsigned(self, size: int) -> None:
        self.stack.append(self.number(size))

    def text(self, size: int) -> None:
        self.stack.append(self.take(self.number(size)).decode("utf-8", "surrogatepass"))

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Pop the values since the last mark."""
        first = self.marks.pop()
        values = self.stack[first:]
        del self.stack[first:]
        return values

    def tuple_of(self, count: int) -> None:
        values = self.stack[-count:]
        if len(values) < count:
            raise ValueError("its stack is empty")
        self.stack[-count:] = [tuple(values)]

    def tuple_since_mark(self) -> None:
        self.stack.append(tuple(self.since_mark()))

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("something is added to what is no list")
        target.extend(values)

    def put(self, pairs: list[Any]) -> None:
        """Set keys of a dictionary: only text and objects, because hashing a deep tuple crashes the process."""
        target, keys = self.stack[-1], pairs[::2]
        if type(target) is not dict or len(pairs) % 2 or not {*map(type, keys)} <= {str, Made}:
            raise ValueError("something is put into what is no dictionary, or under no key")
        target.update(zip(keys, pairs[1::2], strict=True))

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        if (module, name) not in self.known:
            raise UnknownName(f"it names {word(module)}.{word(name)}, which doesn't occur in checkpoints")
        self.stack.append(Global((module, name)))

    def make(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(called) is not Global:
            raise ValueError("it calls what is no name")
        self.stack.append(Made(called.name, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Made or made.state is not None or type(state) not in (dict, tuple):
            raise ValueError("it sets the state of what is no new object")
        made.state = state

    def pop_pair(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.FRAME: _Machine.frame,
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: lambda m: m.signed(4),
    pickle.BININT2: lambda m: m.unsigned(2),
    pickle.LONG1: lambda m: m.signed(m.number(1)),
    pickle.SHORT_BINUNICODE: lambda m: m.text(1),
    pickle.BINUNICODE: lambda m: m.text(4),
    pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]),
    pickle.EMPTY_DICT: lambda m: m.stack.append({}),
    pickle.MARK: _Machine.mark,
    pickle.TUPLE: _Machine.tuple_since_mark,
    pickle.TUPLE1: lambda m: m.tuple_of(1),
    pickle.TUPLE2: lambda m: m.tuple_of(2),
    pickle.TUPLE3: lambda m: m.tuple_of(3),
    pickle.APPEND: lambda m: m.append([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.append(m.since_mark()),
    pickle.SETITEM: lambda m: m.put(m.pop_pair()),
    pickle.SETITEMS: lambda m: m.put(m.since_mark()),
    pickle.STACK_GLOBAL: _Machine.name,
    pickle.REDUCE: _Machine.make,
    pickle.NEWOBJ: _Machine.make,
    pickle.BUILD: _Machine.build,
}
_CODES = [_ACTIONS.get(bytes([code]), _Machine.unknown) for code in range(256)]
"""The action of each opcode, except those inlined in `run`."""
