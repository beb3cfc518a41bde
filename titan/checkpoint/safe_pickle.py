"""Parse a pickle as data: nothing that it names is imported or called. Free of torch.

A pickle is a program for a stack machine. Python's unpickler calls what the program names, and one restricted to some
classes still calls them and sets their attributes. This parser supports the opcodes that `pickle.dump` writes for plain
values and objects since protocol 4; instead of calling a class or function it creates a `PickledObject` with the name,
the arguments and the state. Everything else is rejected.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from titan.files.untrusted import truncate_text

Name = tuple[str, str]
"""A module and a name in it."""
_STOP, _MEMOIZE, _BININT1 = pickle.STOP[0], pickle.MEMOIZE[0], pickle.BININT1[0]
_BINGET, _LONG_BINGET = pickle.BINGET[0], pickle.LONG_BINGET[0]


@dataclass(eq=False, slots=True)
class Global:
    """A class, a function or a constant that the file names."""

    name: Name


@dataclass(eq=False, slots=True)
class PickledObject:
    """The result of a call that was not made: the callee's name, the arguments, and the object's state."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


def parse_pickle(content: bytes, allowed: Container[Name]) -> Any:
    """Parse a pickle.

    Args:
        allowed: the allowed names.

    Raises:
        ValueError: when it has another name, or is not in the form that `pickle.dump` writes.
    """
    machine = _Machine(content, allowed)
    try:
        return machine.run()
    except UnknownNameError:
        raise
    except (ValueError, IndexError, TypeError, MemoryError, OverflowError, RecursionError) as error:
        raise ValueError(f"byte {machine.position:,} is invalid ({error})") from error


class UnknownNameError(ValueError):
    """A pickle has a name that is not allowed."""


class _Machine:
    """The stack machine: its stack, the stack's marks, and the memo."""

    def __init__(self, content: bytes, allowed: Container[Name]) -> None:
        self.content, self.allowed, self.position = content, allowed, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        """Run the program and return its value. The most frequent opcodes are inlined for speed."""
        if self.content[:1] != pickle.PROTO or self.content[1:2] not in (b"\4", b"\5"):
            raise ValueError("it is of another protocol than 4 or 5")
        position, content, stack, memo, codes, number = 2, self.content, self.stack, self.memo, _CODES, int.from_bytes
        while (code := content[position]) != _STOP:
            position += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[content[position]])
                position += 1
            elif code == _LONG_BINGET:
                stack.append(memo[number(content[position : position + 4], "little")])
                position += 4
            elif code == _BININT1:
                stack.append(content[position])
                position += 1
            else:
                self.position = position
                codes[code](self)
                position = self.position
        (value,) = stack
        return value

    def reject_opcode(self) -> None:
        """Reject an opcode."""
        raise ValueError(f"opcode {self.content[self.position - 1]:#04x}")

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes."""
        self.position += size
        if self.position > len(self.content):
            raise ValueError("it is truncated")
        return self.content[self.position - size : self.position]

    def read_number(self, size: int) -> int:
        """Return the next bytes as an unsigned integer."""
        return int.from_bytes(self.read_bytes(size), "little")

    def skip_frame(self) -> None:
        """Skip the length of a frame, which is not needed."""
        self.read_bytes(8)

    def push_signed(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.read_bytes(size), "little", signed=True))

    def push_unsigned(self, size: int) -> None:
        self.stack.append(self.read_number(size))

    def push_text(self, size: int) -> None:
        self.stack.append(self.read_bytes(self.read_number(size)).decode("utf-8", "surrogatepass"))

    def push_mark(self) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        """Pop the values since the last mark."""
        first = self.marks.pop()
        values = self.stack[first:]
        del self.stack[first:]
        return values

    def push_tuple(self, count: int) -> None:
        values = self.stack[-count:]
        if len(values) < count:
            raise ValueError("its stack is empty")
        self.stack[-count:] = [tuple(values)]

    def push_marked_tuple(self) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def append_values(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("something is added to what is no list")
        target.extend(values)

    def put_items(self, pairs: list[Any]) -> None:
        """Set keys of a dictionary: only text and objects, because hashing a deep tuple crashes the process."""
        target, keys = self.stack[-1], pairs[::2]
        if type(target) is not dict or len(pairs) % 2 or not {*map(type, keys)} <= {str, PickledObject}:
            raise ValueError("something is put into what is no dictionary, or under no key")
        target.update(zip(keys, pairs[1::2], strict=True))

    def push_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        if (module, name) not in self.allowed:
            raise UnknownNameError(
                f"it names {truncate_text(module)}.{truncate_text(name)}, which doesn't occur in checkpoints"
            )
        self.stack.append(Global((module, name)))

    def push_object(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(called) is not Global:
            raise ValueError("it calls what is no name")
        self.stack.append(PickledObject(called.name, arguments))

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not PickledObject or target.state is not None or type(state) not in (dict, tuple):
            raise ValueError("it sets the state of what is no new object")
        target.state = state

    def pop_pair(self) -> list[Any]:
        value = self.stack.pop()
        return [self.stack.pop(), value]


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.FRAME: _Machine.skip_frame,
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: lambda m: m.push_signed(4),
    pickle.BININT2: lambda m: m.push_unsigned(2),
    pickle.LONG1: lambda m: m.push_signed(m.read_number(1)),
    pickle.SHORT_BINUNICODE: lambda m: m.push_text(1),
    pickle.BINUNICODE: lambda m: m.push_text(4),
    pickle.EMPTY_TUPLE: lambda m: m.stack.append(()),
    pickle.EMPTY_LIST: lambda m: m.stack.append([]),
    pickle.EMPTY_DICT: lambda m: m.stack.append({}),
    pickle.MARK: _Machine.push_mark,
    pickle.TUPLE: _Machine.push_marked_tuple,
    pickle.TUPLE1: lambda m: m.push_tuple(1),
    pickle.TUPLE2: lambda m: m.push_tuple(2),
    pickle.TUPLE3: lambda m: m.push_tuple(3),
    pickle.APPEND: lambda m: m.append_values([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.append_values(m.pop_to_mark()),
    pickle.SETITEM: lambda m: m.put_items(m.pop_pair()),
    pickle.SETITEMS: lambda m: m.put_items(m.pop_to_mark()),
    pickle.STACK_GLOBAL: _Machine.push_global,
    pickle.REDUCE: _Machine.push_object,
    pickle.NEWOBJ: _Machine.push_object,
    pickle.BUILD: _Machine.set_state,
}
_CODES = [_ACTIONS.get(bytes([code]), _Machine.reject_opcode) for code in range(256)]
"""The action of each opcode, except those inlined in `run`."""
