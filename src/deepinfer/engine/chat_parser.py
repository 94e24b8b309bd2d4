"""Completions of DeepSeek-V4.1 back to reasoning, content and tool calls, whole or piece by piece.

What a model writes is not under control, so nothing here raises unless `strict` asks for it: text that does not
fit the format is kept as content, and every deviation is listed in `problems`.
"""

from __future__ import annotations

import enum

from deepinfer.core.errors import InvalidRequest
from deepinfer.engine.chat_calls import CallBuilder
from deepinfer.engine.chat_format import EOS, THINK_CLOSE, THINK_OPEN
from deepinfer.engine.chat_message import ChatDelta as ChatDelta
from deepinfer.engine.chat_message import ChatMessage as ChatMessage
from deepinfer.engine.chat_message import ChatProblem as ChatProblem
from deepinfer.engine.chat_message import MalformedCompletion as MalformedCompletion
from deepinfer.engine.chat_message import ProblemKind as ProblemKind
from deepinfer.engine.chat_message import ToolCall as ToolCall
from deepinfer.engine.chat_message import ToolCallDelta as ToolCallDelta
from deepinfer.engine.chat_tags import TAG_STARTS, TagBuffer, read_tag

__all__ = [
    "ChatDelta",
    "ChatMessage",
    "ChatParser",
    "ChatProblem",
    "MalformedCompletion",
    "ProblemKind",
    "ToolCall",
    "ToolCallDelta",
    "parse_completion",
]

_CALLS, _INVOKE, _PARAMETER = "calls", "invoke", "parameter"


def parse_completion(
    text: str, *, thinking_mode: str = "chat", strict: bool = False
) -> ChatMessage:
    """Reads a whole completion.

    Args:
        text: What followed the prompt, with or without the end-of-sentence token; `<think>`, `</think>` and
            `｜DSML｜` must not have been stripped.
        thinking_mode: That of the prompt, "thinking" or "chat".
        strict: Raise when anything deviates from the format.

    Returns:
        The message.

    Raises:
        InvalidRequest: `thinking_mode` is neither.
        MalformedCompletion: `strict` is set and there are problems.

    Examples:
        >>> message = parse_completion("Two and two.</think>4", thinking_mode="thinking")
        >>> message.reasoning, message.content
        ('Two and two.', '4')
    """
    parser = ChatParser(thinking_mode=thinking_mode)
    parser.push(text)
    parser.finish()
    message = parser.message
    if strict and message.problems:
        first = message.problems[0]
        raise MalformedCompletion(
            f"the completion has {len(message.problems)} problem(s), the first {first.kind} near character "
            f"{first.position}: {first.detail!r}. Parse without strict=True to read what can be read.",
            problems=message.problems,
        )
    return message


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    IN_CALLS = enum.auto()
    IN_INVOKE = enum.auto()
    IN_VALUE = enum.auto()
    ENDED = enum.auto()


class ChatParser:
    """Reads a completion as it is generated.

    The deltas, joined, equal the message that `parse_completion` reads from the whole text, however the text is
    cut. Reasoning, content and string arguments are passed on as they come, except for an end that may still
    become a tag; arguments in JSON are passed on when they are complete.

    Args:
        thinking_mode: That of the prompt, "thinking" or "chat".

    Raises:
        InvalidRequest: `thinking_mode` is neither.

    Examples:
        >>> parser = ChatParser(thinking_mode="thinking")
        >>> parser.push("Easy.</th"), parser.push("ink>4")
        (ChatDelta(reasoning='Easy.', content='', tool_calls=()), ChatDelta(reasoning='', content='4', tool_calls=()))
    """

    def __init__(self, *, thinking_mode: str = "chat") -> None:
        if thinking_mode not in ("chat", "thinking"):
            raise InvalidRequest(
                f"thinking_mode is {thinking_mode!r}; it must be 'chat' or 'thinking'.",
                field="thinking_mode",
                value=thinking_mode,
                limit="'chat' or 'thinking'",
            )
        self._state = _State.REASONING if thinking_mode == "thinking" else _State.CONTENT
        self._buffer = TagBuffer()
        self._at_start = True
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._problems: list[ChatProblem] = []
        self._calls = CallBuilder(self._note)
        self._skip_space = False  # white space next to tags of a tool block is no content
        self._noted_end = False
        self._new_reasoning: list[str] = []
        self._new_content: list[str] = []

    def push(self, text: str) -> ChatDelta:
        """Takes more text.

        Args:
            text: Any piece.

        Returns:
            What it added.
        """
        self._buffer.text += text
        self._run()
        return self._take()

    def finish(self) -> ChatDelta:
        """Ends the completion: what was held back because it might become a tag is text after all.

        Returns:
            What that added; nothing when called again.
        """
        self._buffer.close()
        self._run()
        if self._state is _State.REASONING:
            self._note(ProblemKind.UNCLOSED_REASONING)
        elif self._state in (_State.IN_CALLS, _State.IN_INVOKE, _State.IN_VALUE):
            self._note(ProblemKind.UNCLOSED_CALLS)
        self._state = _State.ENDED
        return self._take()

    @property
    def message(self) -> ChatMessage:
        """The message so far."""
        return ChatMessage(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=self._calls.calls(),
            problems=tuple(self._problems),
        )

    def _run(self) -> None:
        steps = {
            _State.REASONING: self._read_reasoning,
            _State.CONTENT: self._read_content,
            _State.IN_CALLS: self._read_tags,
            _State.IN_INVOKE: self._read_tags,
            _State.IN_VALUE: self._read_value,
            _State.ENDED: self._read_end,
        }
        while steps[self._state]():
            pass

    # Each reader consumes from the buffer and returns whether another step may get further.

    def _read_reasoning(self) -> bool:
        if self._at_start:
            if self._buffer.text.startswith(THINK_OPEN):
                self._note(ProblemKind.REPEATED_THINK_OPEN, THINK_OPEN)
                self._buffer.consume(len(THINK_OPEN))
            elif not self._buffer.closed and THINK_OPEN.startswith(self._buffer.text):
                return False
            self._at_start = False
        at, marker = self._buffer.find((THINK_CLOSE, EOS))
        self._add_reasoning(self._buffer.consume(at))
        if not marker:
            return False
        self._buffer.consume(len(marker))
        if marker == EOS:
            self._note(ProblemKind.UNCLOSED_REASONING)
        self._state = _State.ENDED if marker == EOS else _State.CONTENT
        return True

    def _read_content(self) -> bool:
        at, marker = self._buffer.find((*TAG_STARTS, EOS))
        if not marker:
            self._add_content(self._buffer.consume(self._buffer.before_newlines(at)))
            return False
        if marker == EOS:
            self._add_content(self._buffer.consume(at))
            self._buffer.consume(len(EOS))
            self._state = _State.ENDED
            return True
        tag = self._buffer.tag_at(at)
        if tag is None and self._buffer.closed:
            tag = marker
        if tag is None:
            self._add_content(self._buffer.consume(self._buffer.before_newlines(at)))
            return False
        closing, name, _ = read_tag(tag)
        if name == _CALLS and not closing:
            self._add_content(self._buffer.consume(self._buffer.before_newlines(at)))
            self._buffer.consume(len(self._buffer.text) - len(self._buffer.text.lstrip("\n")))
            self._buffer.consume(len(tag))
            self._state = _State.IN_CALLS
            self._skip_space = True
            return True
        self._add_content(self._buffer.consume(at))
        self._note(ProblemKind.UNEXPECTED_TAG, tag)
        self._add_content(self._buffer.consume(len(tag)))
        return True

    def _read_tags(self) -> bool:
        """Between the tags of a tool block."""
        at, marker = self._buffer.find((*TAG_STARTS, EOS))
        if marker == EOS or self._buffer.closed:
            safe = self._buffer.safe_length(TAG_STARTS, at)  # what is after it is a tag cut off
            self._add_content(self._buffer.consume(safe))
            self._buffer.consume(at - safe)
        else:  # what may be a tag cut off by an end that is still coming waits
            safe = at if marker else self._buffer.safe_length(TAG_STARTS, at)
            self._add_content(self._buffer.consume(safe))
        tag, advanced = self._tag_of(marker)
        if tag is None:
            return advanced
        self._skip_space = True
        self._on_tag(tag)
        return True

    def _tag_of(self, marker: str) -> tuple[str | None, bool]:
        """The whole tag that the marker begins; without one, whether anything was read past."""
        if not marker:
            return None, False
        if marker == EOS:
            self._note(ProblemKind.UNCLOSED_CALLS)
            self._buffer.consume(len(EOS))
            self._state = _State.ENDED
            return None, True
        tag = self._buffer.tag_at(0)
        if (tag is None or tag in TAG_STARTS) and self._buffer.drop_cut_tag():
            return None, True
        return tag, False

    def _on_tag(self, tag: str) -> None:
        closing, name, attributes = read_tag(tag)
        in_invoke = self._state is _State.IN_INVOKE
        if name == _PARAMETER and not closing and in_invoke:
            self._buffer.consume(len(tag))
            self._calls.open_argument(attributes)
            self._state = _State.IN_VALUE
        elif name == _INVOKE and closing and in_invoke:
            self._buffer.consume(len(tag))
            self._calls.close_call()
            self._state = _State.IN_CALLS
        elif name == _INVOKE and not closing:
            if in_invoke:
                self._note(ProblemKind.MISSING_CLOSE, "invoke")
                self._calls.close_call()
            self._buffer.consume(len(tag))
            self._calls.open_call(attributes)
            self._state = _State.IN_INVOKE
        elif name == _CALLS and closing:
            if in_invoke:
                self._note(ProblemKind.MISSING_CLOSE, "invoke")
                self._calls.close_call()
            self._buffer.consume(len(tag))
            self._state = _State.CONTENT
        else:
            self._note(ProblemKind.UNEXPECTED_TAG, tag)
            self._buffer.consume(len(tag))

    def _read_value(self) -> bool:
        at, marker = self._buffer.find((*TAG_STARTS, EOS))
        self._calls.add_value(self._buffer.consume(at))
        tag, advanced = self._tag_of(marker)
        if tag is None:
            return advanced
        closing, name, _ = read_tag(tag)
        if name not in (_CALLS, _INVOKE, _PARAMETER):
            self._note(ProblemKind.UNEXPECTED_TAG, tag)
            self._calls.add_value(self._buffer.consume(len(tag)))
            return True
        if closing and name == _PARAMETER:
            self._buffer.consume(len(tag))
        else:
            self._note(ProblemKind.MISSING_CLOSE, "parameter")
        self._calls.close_argument()
        self._state = _State.IN_INVOKE
        return True

    def _read_end(self) -> bool:
        self._buffer.skip_space()
        if self._buffer.text and not self._noted_end:
            self._note(ProblemKind.TEXT_AFTER_END)
            self._noted_end = True
        self._buffer.consume(len(self._buffer.text))
        return False

    # Text.

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._reasoning.append(text)
            self._new_reasoning.append(text)

    def _add_content(self, text: str) -> None:
        if self._skip_space:
            kept = text.lstrip()
            if kept:
                self._skip_space = False
                self._problems.append(
                    ChatProblem(ProblemKind.UNEXPECTED_TEXT, self._buffer.position - len(kept))
                )
            text = kept
        if text:
            self._content.append(text)
            self._new_content.append(text)

    def _take(self) -> ChatDelta:
        out = ChatDelta(
            reasoning="".join(self._new_reasoning),
            content="".join(self._new_content),
            tool_calls=self._calls.take(),
        )
        self._new_reasoning.clear()
        self._new_content.clear()
        return out

    def _note(self, kind: ProblemKind, detail: str = "") -> None:
        self._problems.append(ChatProblem(kind, self._buffer.position, detail))
