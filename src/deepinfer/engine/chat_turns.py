"""Messages of a conversation, checked and rearranged into the turns that a DeepSeek-V4.1 prompt has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.core.errors import InvalidRequest
from deepinfer.engine.chat_format import TASKS

__all__ = [
    "Block",
    "Image",
    "Text",
    "ToolResult",
    "Turn",
    "bad_value",
    "last_user_index",
    "merge_tool_results",
    "order_tool_results",
    "read_messages",
    "read_tools",
    "with_options",
    "without_old_reasoning",
]

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_IMAGE_KEYS = ("source", "url", "data", "image", "path")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a message.

    Attributes:
        text: The text.
        field: Where it stood, for error messages.
    """

    text: str
    field: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a message.

    Attributes:
        source: Where it is, or the image itself, as given.
    """

    source: Any


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered.

    Attributes:
        call_id: Id of the call, or "".
        blocks: The answer.
    """

    call_id: str
    blocks: tuple[Text | Image, ...]


Block = Text | Image | ToolResult


@dataclass(frozen=True, slots=True)
class Turn:
    """One message after checks.

    Attributes:
        role: system, developer, user, assistant or latest_reminder.
        blocks: Its content.
        tools: Function schemas.
        response_format: JSON schema of the reply, or None.
        reasoning: Reasoning of an assistant.
        calls: Tool calls as (id, name, arguments).
        task: Side task asked for, or None.
        is_prefix: Whether the message is to be continued.
        where: Its place, for error messages.
    """

    role: str
    blocks: tuple[Block, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Any = None
    reasoning: str = ""
    calls: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    task: str | None = None
    is_prefix: bool = False
    where: str = ""


def bad_value(where: str, value: object, limit: str, hint: str = "") -> InvalidRequest:
    """The error for an unusable value.

    Args:
        where: Its place.
        value: The value.
        limit: What would have been accepted, in words.
        hint: One more sentence.

    Returns:
        The error, to be raised.
    """
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    message = f"{where} is {shown} ({type(value).__name__}); it must be {limit}."
    return InvalidRequest(f"{message} {hint}".rstrip(), field=where, value=value, limit=limit)


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Checks messages.

    Args:
        messages: As `render_chat` takes them.

    Returns:
        One turn a message; a tool's message is a user turn with its result.

    Raises:
        InvalidRequest: A message is malformed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise bad_value("messages", messages, "a list of messages")
    if not messages:
        raise bad_value("messages", messages, "at least one message")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise bad_value(where, message, "a mapping with 'role' and 'content'")
    role = message.get("role")
    if role not in _ROLES:
        raise bad_value(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    content = message.get("content_blocks") or message.get("content")
    blocks = _read_content(content, f"{where}.content", allow_results=role == "user")
    if role == "tool":
        result = ToolResult(str(message.get("tool_call_id") or ""), blocks)  # type: ignore[arg-type]
        return Turn("user", (result,), where=where)
    if role == "developer" and not any(isinstance(b, Image) or b.text for b in blocks):  # type: ignore[union-attr]
        raise bad_value(
            f"{where}.content", content, "non-empty text", "A developer message needs text."
        )
    tools = read_tools(message.get("tools"), f"{where}.tools")
    response_format = message.get("response_format") or None
    if role not in ("system", "developer"):
        for name, value in (("tools", tools), ("response_format", response_format)):
            if value:
                raise InvalidRequest(
                    f"{where}.{name} is on a {role} message; put it on a system or developer message, or pass it as "
                    f"the argument {name!r}.",
                    field=f"{where}.{name}",
                )
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise bad_value(f"{where}.reasoning_content", reasoning, "a string or None")
    return Turn(
        role,
        blocks,
        tools=tools,
        response_format=response_format,
        reasoning=reasoning or "" if role == "assistant" else "",
        calls=_read_calls(message.get("tool_calls"), where) if role == "assistant" else (),
        task=_read_task(message.get("task"), role, where),
        is_prefix=bool(message.get("prefix") or message.get("wo_eos")),
        where=where,
    )


def _read_task(task: object, role: str, where: str) -> str | None:
    if task is None:
        return None
    if task not in TASKS or role not in ("user", "developer", "system"):
        raise bad_value(f"{where}.task", task, f"one of {', '.join(TASKS)}, on a user message")
    return str(task)


def _read_content(
    content: object, where: str, *, allow_results: bool
) -> tuple[Text | Image | ToolResult, ...]:
    if content is None or isinstance(content, str):
        return (Text(content or "", where),)
    if isinstance(content, Mapping | bytes) or not isinstance(content, Sequence):
        raise bad_value(where, content, "a string, a list of content blocks, or None")
    blocks = [
        _read_block(block, f"{where}[{index}]", allow_results=allow_results)
        for index, block in enumerate(content)
    ]
    return tuple(blocks)


def _read_block(block: object, where: str, *, allow_results: bool) -> Text | Image | ToolResult:
    if isinstance(block, str):
        return Text(block, where)
    if not isinstance(block, Mapping):
        raise bad_value(where, block, "a content block with a 'type'")
    kind = block.get("type")
    if kind == "text":
        text = block.get("text")
        if text is not None and not isinstance(text, str):
            raise bad_value(f"{where}.text", text, "a string")
        return Text(text or "", f"{where}.text")
    if kind == "image_url":
        url = block.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not url:
            raise bad_value(f"{where}.image_url", url, "a URL, or a mapping with 'url'")
        return Image(url)
    if kind == "image":
        for key in _IMAGE_KEYS:
            if block.get(key) is not None:
                return Image(block[key])
        raise bad_value(where, dict(block), f"an image with one of {', '.join(_IMAGE_KEYS)}")
    if kind == "tool_result" and allow_results:
        inner = _read_content(block.get("content"), f"{where}.content", allow_results=False)
        return ToolResult(str(block.get("tool_use_id") or ""), inner)  # type: ignore[arg-type]
    kinds = "text, image_url, image" + (", tool_result" if allow_results else "")
    raise bad_value(f"{where}.type", kind, f"one of {kinds}")


def read_tools(tools: object, where: str) -> tuple[Mapping[str, Any], ...]:
    """Checks tool schemas.

    Args:
        tools: A list in the OpenAI form, or None.
        where: Its place.

    Returns:
        The function schemas, out of their wrapping.

    Raises:
        InvalidRequest: It is no such list.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise bad_value(where, tools, "a list of tools")
    out = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_value(
                f"{where}[{index}]",
                tool,
                "a tool such as {'type': 'function', 'function': {'name': ...}}",
            )
        out.append(function)
    return tuple(out)


def _read_calls(calls: object, where: str) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    """(id, name, arguments) of each tool call."""
    if not calls:
        return ()
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise bad_value(f"{where}.tool_calls", calls, "a list of tool calls")
    out = []
    for index, call in enumerate(calls):
        at = f"{where}.tool_calls[{index}]"
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
            raise bad_value(at, call, "a tool call with 'function' holding 'name' and 'arguments'")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise bad_value(f"{at}.arguments", arguments, "JSON text", str(error)) from error
        if not isinstance(arguments, Mapping):
            raise bad_value(f"{at}.arguments", arguments, "a JSON object")
        out.append((str(call.get("id") or function.get("id") or ""), str(name), arguments))
    return tuple(out)


def with_options(
    turns: list[Turn], tools: tuple[Mapping[str, Any], ...], response_format: Any
) -> list[Turn]:
    """Puts tools and response format on the first turn, made for them when it is no system or developer turn.

    Args:
        turns: The turns.
        tools: Function schemas.
        response_format: JSON schema, or None.

    Returns:
        The turns.

    Raises:
        InvalidRequest: The first turn has its own.
    """
    if not tools and not response_format:
        return turns
    if turns[0].role not in ("system", "developer"):
        turns = [Turn("system", (Text("", "system"),)), *turns]
    first = turns[0]
    for name, ours, theirs in (
        ("tools", tools, first.tools),
        ("response_format", response_format, first.response_format),
    ):
        if ours and theirs:
            raise InvalidRequest(
                f"{name} are given as an argument and on the first message too; give them once.",
                field=name,
            )
    return [
        replace(
            first,
            tools=tools or first.tools,
            response_format=response_format or first.response_format,
        ),
        *turns[1:],
    ]


def merge_tool_results(turns: list[Turn]) -> list[Turn]:
    """Joins neighbouring user turns: results of tools and the text after them are one turn.

    Args:
        turns: The turns.

    Returns:
        Fewer turns; one that asks for a side task is not added to.
    """
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if turn.role == "user" and last and last.role == "user" and last.task is None:
            merged[-1] = replace(last, blocks=last.blocks + turn.blocks, task=turn.task)
        else:
            merged.append(turn)
    return merged


def order_tool_results(turns: list[Turn]) -> list[Turn]:
    """Puts tool results into the order of the calls that they answer.

    Args:
        turns: Merged turns.

    Returns:
        The turns; results of unknown calls stand with those of the first call.
    """
    order: dict[str, int] = {}
    out: list[Turn] = []
    for turn in turns:
        if turn.calls:
            order = {call_id: index for index, (call_id, _, _) in enumerate(turn.calls) if call_id}
        results = [block for block in turn.blocks if isinstance(block, ToolResult)]
        if len(results) > 1 and order:
            in_order = iter(sorted(results, key=lambda result: order.get(result.call_id, 0)))
            blocks = tuple(
                next(in_order) if isinstance(block, ToolResult) else block for block in turn.blocks
            )
            turn = replace(turn, blocks=blocks)
        out.append(turn)
    return out


def last_user_index(turns: Sequence[Turn]) -> int:
    """Index of the last turn that asks for an answer; a system turn counts unless it is the first.

    Args:
        turns: The turns.

    Returns:
        The index, or -1.
    """
    for index in range(len(turns) - 1, -1, -1):
        role = turns[index].role
        if role in ("user", "developer") or (role == "system" and index > 0):
            return index
    return -1


def without_old_reasoning(turns: list[Turn]) -> list[Turn]:
    """Leaves out reasoning and developer turns before the last turn that asks for an answer.

    Args:
        turns: The turns.

    Returns:
        The turns that stay.
    """
    last_user = last_user_index(turns)
    return [
        replace(turn, reasoning="") if index < last_user else turn
        for index, turn in enumerate(turns)
        if index >= last_user or turn.role != "developer"
    ]
