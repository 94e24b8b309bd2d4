"""Small automata written by hand, with the interface that masks need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np

Step = Callable[[Hashable, int], Hashable | None]


class LazyAutomaton:
    """States are any hashable values; a function gives the next one, None when dead. `step` may lead to live states only.

    `sets` are the byte sets that the function tells apart; None makes each byte a class of its own.
    """

    def __init__(
        self,
        start: Hashable,
        step: Step,
        accepting: Callable[[Hashable], bool],
        sets: Iterable[Iterable[int]] | None = None,
    ) -> None:
        self._step, self._accepting = step, accepting
        keys: dict[tuple[int, ...], int] = {}
        members = None if sets is None else [frozenset(s) for s in sets]
        classes = []
        for byte in range(256):
            key = (byte,) if members is None else tuple(byte in m for m in members)
            classes.append(keys.setdefault(key, len(keys)))
        self.byte_class = np.array(classes, dtype=np.uint8)
        self.num_classes = len(keys)
        self._example = [classes.index(c) for c in range(self.num_classes)]
        self._ids: dict[Hashable, int] = {}
        self._values: list[Hashable] = [None]
        self.table = np.zeros((1, self.num_classes), dtype=np.int32)
        self.start = self.intern(start)

    def intern(self, value: Hashable) -> int:
        index = self._ids.get(value)
        if index is None:
            index = self._ids[value] = len(self._values)
            self._values.append(value)
            if index >= len(self.table):
                rows = np.full((len(self.table) * 2, self.num_classes), -1, dtype=np.int32)
                rows[: len(self.table)] = self.table
                self.table = rows
        return index

    def expand(self, state: int) -> None:
        row = []
        for byte in self._example:
            after = self._step(self._values[state], byte)
            row.append(0 if after is None else self.intern(after))
        self.table[state] = row

    def step(self, state: int, byte: int) -> int:
        if state == 0:
            return 0
        if self.table[state, 0] < 0:
            self.expand(state)
        return int(self.table[state, self.byte_class[byte]])

    def run(self, state: int, data: bytes) -> int:
        for byte in data:
            state = self.step(state, byte)
        return state

    def accepting(self, state: int) -> bool:
        return state != 0 and self._accepting(self._values[state])

    def live(self, state: int) -> bool:
        return state != 0

    def depth(self, state: int) -> int:
        return 0

    def truncate(self, state: int, depth: int) -> int:
        return state

    def uncertain(self, state: int) -> bool:
        return False


class StackAutomaton(LazyAutomaton):
    """States are (mode, stack of frames, bottom cut off); the function gets and gives (mode, stack)."""

    def __init__(self, start: Hashable, step: Step, accepting, sets=None) -> None:
        def inner(value, byte):
            mode, stack, cut = value
            after = step((mode, stack), byte)
            return None if after is None else (*after, cut)

        super().__init__(
            (start, (), False),
            inner,
            lambda value: not value[2] and accepting((value[0], value[1])),
            sets,
        )

    def expand(self, state: int) -> None:
        assert not self.uncertain(state), "expanded a state whose stack is unknown"
        super().expand(state)

    def depth(self, state: int) -> int:
        return len(self._values[state][1])

    def truncate(self, state: int, depth: int) -> int:
        mode, stack, _ = self._values[state]
        if len(stack) <= depth:
            return state
        return self.intern((mode, stack[-depth:] if depth else (), True))

    def uncertain(self, state: int) -> bool:
        if state == 0:
            return False
        _, stack, cut = self._values[state]
        return cut and not stack


def finite(words: Iterable[bytes], **options) -> LazyAutomaton:
    """A finite set of words."""
    words = frozenset(words)
    prefixes = {w[:n] for w in words for n in range(len(w) + 1)}

    def step(value, byte):
        after = value + bytes([byte])
        return after if after in prefixes else None

    return LazyAutomaton(b"", step, lambda value: value in words, **options)


_TEXT = [b for b in range(0x20, 0x80) if b not in b'"\\']
JSON_SETS = [
    *([b] for b in b'"\\{}[],:-+.0utrfalsenbU/ \n\t\r'),
    b"0123456789",
    b"123456789",
    b"0123456789abcdefABCDEF",
    b"eE",
    _TEXT,
    *([b] for b in (0xE0, 0xED, 0xF0, 0xF4)),
    range(0xC2, 0xE0),
    range(0xE0, 0xF0),
    range(0xF0, 0xF5),
    range(0x80, 0x90),
    range(0x90, 0xA0),
    range(0xA0, 0xC0),
]


def _utf8(byte: int) -> str | None:
    """Continuation mode behind a lead byte."""
    if 0xC2 <= byte < 0xE0:
        return "c1"
    if 0xE0 <= byte < 0xF0:
        return {0xE0: "ce0", 0xED: "ced"}.get(byte, "c2")
    if 0xF0 <= byte < 0xF5:
        return {0xF0: "cf0", 0xF4: "cf4"}.get(byte, "c3")
    return None


_CONTINUE = {
    "c1": (0x80, 0xC0, "s"),
    "c2": (0x80, 0xC0, "c1"),
    "c3": (0x80, 0xC0, "c2"),
    "ce0": (0xA0, 0xC0, "c1"),
    "ced": (0x80, 0xA0, "c1"),
    "cf0": (0x90, 0xC0, "c2"),
    "cf4": (0x80, 0x90, "c2"),
}


def json_values(keys: tuple[bytes, ...] | None = None) -> StackAutomaton:
    """JSON values without white space but for one optional space behind `:` and `,`."""

    def value(stack, byte):
        if byte == ord("{"):
            return ("{", stack)
        if byte == ord("["):
            return ("[", stack)
        if byte == ord('"'):
            return ("s", (*stack, "v"))
        if byte == ord("-"):
            return ("n-", stack)
        if byte == ord("0"):
            return ("n0", stack)
        if byte in b"123456789":
            return ("n", stack)
        for word in (b"true", b"false", b"null"):
            if byte == word[0]:
                return ((word, 1), stack)
        return None

    def done(stack, byte):
        """Behind a whole value."""
        if not stack:
            return None
        top = stack[-1]
        if top == "[":
            if byte == ord(","):
                return ("v ", stack)
            return ("e", stack[:-1]) if byte == ord("]") else None
        if byte == ord(","):
            return ("k ", stack)
        return ("e", stack[:-1]) if byte == ord("}") else None

    def step(state, byte):
        mode, stack = state
        if isinstance(mode, tuple):
            word, at = mode
            if word[at] != byte:
                return None
            return ("e" if at + 1 == len(word) else (word, at + 1), stack)
        if mode in _CONTINUE:
            low, high, after = _CONTINUE[mode]
            return (after, stack) if low <= byte < high else None
        if mode == "s":
            if byte == ord('"'):
                return ("e" if stack[-1] == "v" else ":", stack[:-1])
            if byte == ord("\\"):
                return ("x", stack)
            after = "s" if byte in _TEXT or byte == 0x7F else _utf8(byte)
            return None if after is None or byte < 0x20 else (after, stack)
        if mode == "x":
            if byte in b'"\\/bfnrt':
                return ("s", stack)
            return ("u1", stack) if byte == ord("u") else None
        if mode in ("u1", "u2", "u3", "u4"):
            after = "s" if mode == "u4" else f"u{int(mode[1]) + 1}"
            return (after, stack) if byte in b"0123456789abcdefABCDEF" else None
        if mode in ("v", "v "):
            if mode == "v " and byte == ord(" "):
                return ("v", stack)
            return value(stack, byte)
        if mode == "[":
            return ("e", stack) if byte == ord("]") else value((*stack, "["), byte)
        if mode == "{":
            if byte == ord("}"):
                return ("e", stack)
            return ("s", (*stack, "{", "k")) if byte == ord('"') else None
        if mode in ("k", "k "):
            if mode == "k " and byte == ord(" "):
                return ("k", stack)
            return ("s", (*stack, "k")) if byte == ord('"') else None
        if mode == ":":
            return ("v ", stack) if byte == ord(":") else None
        if mode == "n-":
            return (
                ("n0", stack)
                if byte == ord("0")
                else ("n", stack)
                if byte in b"123456789"
                else None
            )
        if mode == "n" and byte in b"0123456789":
            return ("n", stack)
        return done(stack, byte)

    def accepting(state):
        mode, stack = state
        return not stack and mode in ("e", "n", "n0")

    return StackAutomaton("v", step, accepting, JSON_SETS)


def string_but(words: Iterable[bytes]) -> LazyAutomaton:
    """A JSON string (without escapes) that is none of `words`, then a colon."""
    words = frozenset(words)
    prefixes = {w[:n] for w in words for n in range(len(w) + 1)}

    def step(value, byte):
        if value == "start":
            return b"" if byte == ord('"') else None
        if value == "end":
            return "done" if byte == ord(":") else None
        if value == "done":
            return None
        if isinstance(value, tuple):
            low, high, after = _CONTINUE[value[0]]
            if not low <= byte < high:
                return None
            return "free" if after == "s" else (after,)
        if byte == ord('"'):
            return None if value in words else "end"
        if byte < 0x20 or byte == ord("\\"):
            return None
        if byte >= 0x80:
            after = _utf8(byte)
            return None if after is None else (after,)
        if value == "free":
            return "free"
        after = value + bytes([byte])
        return after if after in prefixes else "free"

    letters = [[b] for b in sorted({b for w in words for b in w})]
    return LazyAutomaton("start", step, lambda value: value == "done", [*JSON_SETS, *letters])
