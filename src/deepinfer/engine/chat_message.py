"""What a completion says: message, tool calls, deltas, and how it deviates from the format."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from deepinfer.core.errors import DeepInferError

__all__ = [
    "ChatDelta",
    "ChatMessage",
    "ChatProblem",
    "MalformedCompletion",
    "ProblemKind",
    "ToolCall",
    "ToolCallDelta",
]


class ProblemKind(enum.StrEnum):
    """How a completion deviates from the format."""

    UNCLOSED_REASONING = "unclosed_reasoning"
    """The text ended inside the reasoning."""
    REPEATED_THINK_OPEN = "repeated_think_open"
    """The completion opens the reasoning that the prompt has opened; the tag is dropped."""
    UNEXPECTED_TAG = "unexpected_tag"
    """A tag stands where it has no meaning; outside a tool block it is kept as text."""
    UNEXPECTED_TEXT = "unexpected_text"
    """Text between the tags of a tool block, or after it; kept as content."""
    MISSING_NAME = "missing_name"
    """A tool call or parameter has no name; it is dropped."""
    BAD_VALUE = "bad_value"
    """A parameter marked as JSON is not JSON, or has no mark; taken as a string, or JSON if it parses."""
    REPEATED_PARAMETER = "repeated_parameter"
    """A parameter is given twice; the first counts."""
    MISSING_CLOSE = "missing_close"
    """A tag inside a tool block is not closed where the next one begins."""
    UNCLOSED_CALLS = "unclosed_calls"
    """The text ended inside a tool block; the last call may be incomplete."""
    TEXT_AFTER_END = "text_after_end"
    """Text after the end-of-sentence token; dropped."""


@dataclass(frozen=True, slots=True)
class ChatProblem:
    """One deviation.

    Attributes:
        kind: What it is.
        position: Character of the completion near which it was seen.
        detail: What was found.
    """

    kind: ProblemKind
    position: int
    detail: str = ""


class MalformedCompletion(DeepInferError, ValueError):
    """A completion does not follow the chat format and the caller asked for strictness.

    Attributes:
        problems: The deviations.
    """

    def __init__(self, message: str, *, problems: tuple[ChatProblem, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call.

    Attributes:
        index: Its place among the calls of the message, from 0.
        name: Name of the tool.
        arguments_json: Arguments as JSON text; cut short, and then no valid JSON, when `complete` is False.
        complete: Whether the call was closed; do not execute one that is not.
    """

    index: int
    name: str
    arguments_json: str
    complete: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as a dict; empty when the call is not complete."""
        return dict(json.loads(self.arguments_json)) if self.complete else {}

    @property
    def call_id(self) -> str:
        """An id that is unique within the message."""
        return f"call_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """What was added to one tool call.

    Attributes:
        index: Which call.
        name: Name of the tool, on the call's first delta only.
        arguments: More characters of its JSON arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """What a piece of text added to the message.

    Attributes:
        reasoning: More reasoning.
        content: More content.
        tool_calls: More of tool calls, in order.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """An assistant's message.

    Attributes:
        content: The answer.
        reasoning: The reasoning, empty in chat mode.
        tool_calls: Tool calls in order.
        problems: Deviations from the format, empty for a well-formed completion.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[ChatProblem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The message in the form that `render_chat` takes; tool calls that are not complete are left out."""
        out: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if call.complete]
        if calls:
            out["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in calls
            ]
        return out
