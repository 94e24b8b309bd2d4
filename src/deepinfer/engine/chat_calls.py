"""Tool calls of a completion while they are written, as JSON arguments that grow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.engine.chat_message import ProblemKind, ToolCall, ToolCallDelta

__all__ = ["CallBuilder"]


class _Call:
    __slots__ = ("closed", "name", "parts", "seen")

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[str] = []
        self.seen: set[str] = set()
        self.closed = False


class CallBuilder:
    """Builds tool calls from the tags of a tool block.

    Args:
        note: Called with (kind, detail) for each deviation.
    """

    def __init__(self, note: Callable[[ProblemKind, str], None]) -> None:
        self._note = note
        self._calls: list[_Call] = []
        self._current: _Call | None = None
        # The argument being read: its name (None when dropped), whether it is text (None when unmarked), its value.
        self._key: str | None = None
        self._is_text: bool | None = None
        self._value: list[str] = []
        self._new: list[ToolCallDelta] = []

    def open_call(self, attributes: Mapping[str, str]) -> None:
        """Begins a call; one without a name is dropped with all that is in it.

        Args:
            attributes: Of its tag.
        """
        name = attributes.get("name", "").strip()
        if not name:
            self._note(ProblemKind.MISSING_NAME, "invoke")
            return
        self._current = _Call(name)
        self._calls.append(self._current)
        self._new.append(ToolCallDelta(index=len(self._calls) - 1, name=name))
        self._add("{")

    def close_call(self) -> None:
        """Ends the call."""
        if self._current is not None:
            self._add("}")
            self._current.closed = True
            self._current = None

    def open_argument(self, attributes: Mapping[str, str]) -> None:
        """Begins an argument; one without a name or given before is dropped.

        Args:
            attributes: Of its tag.
        """
        self._value = []
        self._key = attributes.get("name")
        self._is_text = {"true": True, "false": False}.get(attributes.get("string", ""))
        if self._current is None:
            self._key = None
        elif self._key is None:
            self._note(ProblemKind.MISSING_NAME, "parameter")
        elif self._key in self._current.seen:
            self._note(ProblemKind.REPEATED_PARAMETER, self._key)
            self._key = None
        if self._key is not None and self._is_text:
            self._add(f'{self._start_of(self._key)}"')

    def add_value(self, text: str) -> None:
        """Adds to the argument's value.

        Args:
            text: More of it; text is passed on at once, JSON when it is complete.
        """
        if not text or self._key is None:
            return
        if self._is_text:
            self._add(_quote(text)[1:-1])
        else:
            self._value.append(text)

    def close_argument(self) -> None:
        """Ends the argument."""
        if self._key is None:
            return
        if self._is_text:
            self._add('"')
            return
        text = "".join(self._value)
        try:
            json.loads(text, parse_constant=_refuse_constant)
            rendered = text.strip()
        except (ValueError, RecursionError):
            rendered = _quote(text)
            self._note(ProblemKind.BAD_VALUE, text[:80])
        else:
            if self._is_text is None:
                self._note(ProblemKind.BAD_VALUE, "no string attribute")
        self._add(self._start_of(self._key) + rendered)

    def calls(self) -> tuple[ToolCall, ...]:
        """All calls so far.

        Returns:
            The calls; those that were not closed are marked.
        """
        return tuple(
            ToolCall(
                index=index,
                name=call.name,
                arguments_json="".join(call.parts),
                complete=call.closed,
            )
            for index, call in enumerate(self._calls)
        )

    def take(self) -> tuple[ToolCallDelta, ...]:
        """What was added since the last time.

        Returns:
            Deltas, those of one call joined.
        """
        out: list[ToolCallDelta] = []
        for delta in self._new:
            if out and out[-1].index == delta.index and delta.name is None:
                joined = out[-1].arguments + delta.arguments
                out[-1] = ToolCallDelta(index=delta.index, name=out[-1].name, arguments=joined)
            else:
                out.append(delta)
        self._new.clear()
        return tuple(out)

    def _start_of(self, key: str) -> str:
        """Separator and key of a new argument."""
        seen = self._calls[-1].seen
        start = f"{', ' if seen else ''}{_quote(key)}: "
        seen.add(key)
        return start

    def _add(self, text: str) -> None:
        self._calls[-1].parts.append(text)
        self._new.append(ToolCallDelta(index=len(self._calls) - 1, arguments=text))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
