"""Strings of the DeepSeek-V4.1 chat format, and the rendered prompt.

The format has no template language: a prompt is a sequence of control tokens and text, made by
`deepinfer.engine.chat` and read back by `deepinfer.engine.chat_parser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepinfer.core.errors import InvalidRequest

__all__ = [
    "ASSISTANT",
    "BOS",
    "DSML",
    "EFFORTS",
    "EOS",
    "IMAGE",
    "LATEST_REMINDER",
    "SYSTEM",
    "TASKS",
    "THINK_CLOSE",
    "THINK_OPEN",
    "USER",
    "ChatPrompt",
    "Piece",
    "PromptWriter",
]

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}
"""Control token that asks for a short side task instead of an answer, by task name."""
EFFORTS = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
"""Reasoning effort by name, on the scale from 1 to 100."""

EFFORT_LINE = "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
TOOL_RESULT_OPEN = "<tool_result>"
TOOL_RESULT_CLOSE = "</tool_result>"
CALLS_OPEN = f"<{DSML} calls>"
CALLS_CLOSE = f"</{DSML} calls>"
INVOKE_CLOSE = f"</{DSML} invoke>"
PARAMETER_CLOSE = f"</{DSML} parameter>"

TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "{CALLS_OPEN}" block like the following:

{CALLS_OPEN}
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_CLOSE}
...
{INVOKE_CLOSE}
<{DSML} invoke name="$TOOL_NAME2">
...
{INVOKE_CLOSE}
{CALLS_CLOSE}

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_OPEN}), you MUST output your complete reasoning inside \
{THINK_OPEN}...{THINK_CLOSE} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_CLOSE} with tool calls or final response.

### Available Tool Schemas

"""
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_MARKERS = re.compile("|".join(map(re.escape, (THINK_OPEN, THINK_CLOSE, DSML))))
_CONTROL_LIKE = re.compile(f"<｜([^｜<>]{{1,64}})｜>|{DSML}")


class Piece(NamedTuple):
    """A part of a prompt.

    Attributes:
        text: Its text.
        is_control: Whether it is the string of one control token.
    """

    text: str
    is_control: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        pieces: Control tokens and ordinary text in turn; ordinary text never becomes a control token when the
            pieces are encoded by `Tokenizer.encode_chat`.
        images: Image sources in the order of their placeholders, as they stood in the messages.
    """

    pieces: tuple[Piece, ...]
    images: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """The whole prompt as one string."""
        return "".join(piece.text for piece in self.pieces)


def _escaped(match: re.Match[str]) -> str:
    return match.group().replace("｜", "|")


class PromptWriter:
    """Collects pieces and treats text from outside as the policy says.

    Args:
        special_text: What to do with control-token strings in text from messages: "escape" writes them with ASCII
            bars, "reject" raises, "literal" leaves them.
    """

    def __init__(self, special_text: str) -> None:
        policies: dict[str, Callable[[str, str], str]] = {
            "escape": self._escape,
            "reject": self._reject,
            "literal": lambda text, field: text,
        }
        if special_text not in policies:
            raise InvalidRequest(
                f"special_text is {special_text!r}; it must be 'escape', 'reject' or 'literal'.",
                field="special_text",
                value=special_text,
                limit="'escape', 'reject' or 'literal'",
            )
        self._policy = policies[special_text]
        self._pieces: list[tuple[list[str], bool]] = []
        self._images: list[Any] = []

    def control(self, token: str) -> None:
        """Adds a control token.

        Args:
            token: Its string.
        """
        self._pieces.append(([token], True))

    def image(self, source: Any) -> None:
        """Adds an image placeholder.

        Args:
            source: Where the image is, or the image.
        """
        self.control(IMAGE)
        self._images.append(source)

    def ours(self, text: str) -> None:
        """Adds text of the format itself, whose markers are control tokens.

        Args:
            text: The text.
        """
        at = 0
        for match in _MARKERS.finditer(text):
            self._plain(text[at : match.start()])
            self.control(match.group())
            at = match.end()
        self._plain(text[at:])

    def theirs(self, text: str, field: str) -> None:
        """Adds text from a message.

        Args:
            text: The text.
            field: Where it stood, for the error message.

        Raises:
            InvalidRequest: It holds the string of a control token and the policy is "reject".
        """
        self._plain(self._policy(text, field))

    def tool_result(self, text: str, field: str) -> None:
        """Adds text of a tool result, which must not close its own block either.

        Args:
            text: The text.
            field: Where it stood, for the error message.

        Raises:
            InvalidRequest: As in `theirs`.
        """
        safe = self._policy(text, field)
        if TOOL_RESULT_CLOSE in safe and self._policy == self._reject:
            self._refuse(TOOL_RESULT_CLOSE, field)
        if self._policy == self._escape:
            safe = safe.replace(TOOL_RESULT_CLOSE, "<\\/tool_result>")
        self._plain(safe)

    def finish(self) -> ChatPrompt:
        """The prompt.

        Returns:
            All that was written.
        """
        pieces = tuple(Piece("".join(parts), control) for parts, control in self._pieces)
        return ChatPrompt(pieces=pieces, images=tuple(self._images))

    def _plain(self, text: str) -> None:
        if not text:
            return
        if not self._pieces or self._pieces[-1][1]:
            self._pieces.append(([], False))
        self._pieces[-1][0].append(text)

    def _escape(self, text: str, field: str) -> str:
        return _CONTROL_LIKE.sub(_escaped, text)

    def _reject(self, text: str, field: str) -> str:
        match = _CONTROL_LIKE.search(text)
        if match:
            self._refuse(match.group(), field)
        return text

    def _refuse(self, found: str, field: str) -> None:
        raise InvalidRequest(
            f"{field} holds {found!r}, a string of the chat format; remove it, or use special_text='escape'. Images "
            "are given as content blocks of their own.",
            field=field,
            value=found,
        )
