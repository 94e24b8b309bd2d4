"""Conversations to DeepSeek-V4.1 prompts.

Source: the message encoding published with DeepSeek-V4.1. Differences, all on the side of safety: text from
messages cannot become a control token, a tool result cannot close its own block, and what the published encoder
passes over silently (unknown block types, tools on a user message) is an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer.core.errors import InvalidRequest
from deepinfer.engine import chat_format as fmt
from deepinfer.engine.chat_format import ChatPrompt as ChatPrompt
from deepinfer.engine.chat_format import PromptWriter
from deepinfer.engine.chat_turns import (
    Block,
    Image,
    ToolResult,
    Turn,
    bad_value,
    last_user_index,
    merge_tool_results,
    order_tool_results,
    read_messages,
    read_tools,
    with_options,
    without_old_reasoning,
)

__all__ = ["ChatPrompt", "encode_messages", "render_chat", "resolve_effort"]

_DEFAULT_EFFORT = "high"


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_mode: str = "chat",
    reasoning_effort: int | str | None = None,
    response_format: Any = None,
    drop_thinking: bool = True,
    add_bos: bool = True,
    special_text: str = "escape",
) -> str:
    """The prompt of a conversation as one string.

    A string cannot say which of its characters are control tokens; to encode a conversation with users in it,
    prefer `Tokenizer.encode_chat(render_chat(...))`.

    Args:
        messages: As in `render_chat`.
        tools: As in `render_chat`.
        thinking_mode: As in `render_chat`.
        reasoning_effort: As in `render_chat`.
        response_format: As in `render_chat`.
        drop_thinking: As in `render_chat`.
        add_bos: As in `render_chat`.
        special_text: As in `render_chat`.

    Returns:
        The prompt.

    Raises:
        InvalidRequest: As in `render_chat`.

    Examples:
        >>> encode_messages([{"role": "user", "content": "hello"}])
        '<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>'
    """
    return render_chat(
        messages,
        tools=tools,
        thinking_mode=thinking_mode,
        reasoning_effort=reasoning_effort,
        response_format=response_format,
        drop_thinking=drop_thinking,
        add_bos=add_bos,
        special_text=special_text,
    ).text


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking_mode: str = "chat",
    reasoning_effort: int | str | None = None,
    response_format: Any = None,
    drop_thinking: bool = True,
    add_bos: bool = True,
    special_text: str = "escape",
) -> ChatPrompt:
    """Renders a conversation into control tokens and text.

    Roles are system, developer, user, assistant, tool and latest_reminder. Content is a string, None, or a list of
    blocks {"type": "text", "text"}, {"type": "image_url", "image_url"}, {"type": "image", "source" or "url" or
    "data"} and, for a user, {"type": "tool_result", "tool_use_id", "content"}. An assistant message may hold
    `reasoning_content`, `tool_calls` in the OpenAI form, and `prefix: true` to be continued instead of ended.
    A system or developer message may hold `tools` and `response_format`; a user or developer message may hold
    `task`. Other keys are not looked at. A prompt whose last turn is a user's (or a system message that is not the
    first) ends with the opening of the assistant's turn.

    Args:
        messages: The conversation, oldest first.
        tools: Tool schemas in the OpenAI form, for the first message; an empty system message is put before a
            conversation that does not begin with system or developer.
        thinking_mode: "thinking" or "chat".
        reasoning_effort: From 1 to 100, or low (25), high (50), xhigh (75), max (100); None is high. Written in
            thinking mode only, checked always.
        response_format: A JSON schema that the reply must follow, for the first message, like `tools`.
        drop_thinking: Leave out reasoning, and developer messages, before the last user turn, as the model was
            trained; has no effect when there are tools.
        add_bos: Begin with the begin-of-sentence token.
        special_text: Strings of control tokens in the text of messages: "escape" writes them with ASCII bars (so a
            quoted role token stays readable), "reject" raises, "literal" leaves them as they are, which is safe
            only when the pieces are encoded, not the string.

    Returns:
        The prompt and its images.

    Raises:
        InvalidRequest: A message, option or tool is unusable; the message says which and why.
    """
    if thinking_mode not in ("chat", "thinking"):
        raise InvalidRequest(
            f"thinking_mode is {thinking_mode!r}; it must be 'chat' or 'thinking'.",
            field="thinking_mode",
            value=thinking_mode,
            limit="'chat' or 'thinking'",
        )
    thinking = thinking_mode == "thinking"
    effort = resolve_effort(reasoning_effort)
    out = PromptWriter(special_text)
    turns = read_messages(messages)
    turns = with_options(turns, read_tools(tools, "tools"), response_format)
    turns = order_tool_results(merge_tool_results(turns))
    keep_all = not drop_thinking or any(turn.tools for turn in turns)
    if thinking and not keep_all:
        turns = without_old_reasoning(turns)
    last_user = last_user_index(turns)
    if add_bos:
        out.control(fmt.BOS)
    for index, turn in enumerate(turns):
        if turn.role == "system" or (index == 0 and thinking):
            out.control(fmt.SYSTEM)
        if index == 0 and thinking:
            out.ours(fmt.EFFORT_LINE.format(effort=effort))
        after_task = index > 0 and turns[index - 1].task is not None
        with_reasoning = thinking and not after_task and (keep_all or index > last_user)
        _write_turn(out, turn, with_reasoning=with_reasoning)
        follows = turns[index + 1].role if index + 1 < len(turns) else "assistant"
        if follows in ("assistant", "latest_reminder"):
            opens = thinking and (keep_all or index >= last_user)
            _write_transition(out, turn, index, thinking=thinking, opens_thinking=opens)
    return out.finish()


def resolve_effort(effort: int | str | None) -> int:
    """Reasoning effort as a number.

    Args:
        effort: From 1 to 100, or low, high, xhigh, max; None is high.

    Returns:
        From 1 to 100.

    Raises:
        InvalidRequest: It is neither.

    Examples:
        >>> resolve_effort("xhigh"), resolve_effort(None), resolve_effort(7)
        (75, 50, 7)
    """
    effort = _DEFAULT_EFFORT if effort is None else effort
    if isinstance(effort, str) and effort in fmt.EFFORTS:
        return fmt.EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    names = ", ".join(fmt.EFFORTS)
    raise InvalidRequest(
        f"reasoning_effort is {effort!r} ({type(effort).__name__}); it must be an integer from 1 to 100 or one of "
        f"{names}. To switch reasoning off use thinking_mode='chat'.",
        field="reasoning_effort",
        value=effort,
        limit=f"1 to 100, {names}",
    )


def _to_json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_value(where, value, "JSON values only", str(error)) from error


def _write_turn(out: PromptWriter, turn: Turn, *, with_reasoning: bool) -> None:
    if turn.role in ("user", "developer"):
        out.control(fmt.USER)
    elif turn.role == "latest_reminder":
        out.control(fmt.LATEST_REMINDER)
    if turn.role == "assistant" and with_reasoning:
        out.theirs(turn.reasoning, f"{turn.where}.reasoning_content")
        out.control(fmt.THINK_CLOSE)
    _write_blocks(out, turn.blocks)
    if turn.tools:
        out.ours("\n\n" + fmt.TOOLS_HEAD)
        for index, tool in enumerate(turn.tools):
            out.ours("\n" if index else "")
            out.theirs(_to_json(tool, "tools"), f"tools[{index}]")
        out.ours(fmt.TOOLS_TAIL)
    if turn.response_format:
        out.ours("\n\n" + fmt.RESPONSE_FORMAT)
        out.theirs(_to_json(turn.response_format, "response_format"), "response_format")
    if turn.calls:
        _write_calls(out, turn)
    if turn.role == "assistant" and not turn.is_prefix:
        out.control(fmt.EOS)


def _write_blocks(out: PromptWriter, blocks: Sequence[Block], *, in_result: bool = False) -> None:
    for index, block in enumerate(blocks):
        if index:
            out.ours("\n\n")
        if isinstance(block, Image):
            out.image(block.source)
        elif isinstance(block, ToolResult):
            out.ours(fmt.TOOL_RESULT_OPEN)
            _write_blocks(out, block.blocks, in_result=True)
            out.ours(fmt.TOOL_RESULT_CLOSE)
        elif in_result:
            out.tool_result(block.text, block.field)
        else:
            out.theirs(block.text, block.field)


def _write_calls(out: PromptWriter, turn: Turn) -> None:
    out.ours(f"\n\n{fmt.CALLS_OPEN}\n")
    for index, (_, name, arguments) in enumerate(turn.calls):
        where = f"{turn.where}.tool_calls[{index}]"
        out.ours(f'<{fmt.DSML} invoke name="')
        out.theirs(name, f"{where}.name")
        out.ours('">\n')
        for number, (key, value) in enumerate(arguments.items()):
            out.ours("\n" if number else "")
            out.ours(f'<{fmt.DSML} parameter name="')
            out.theirs(str(key), f"{where}.arguments")
            is_text = isinstance(value, str)
            out.ours(f'" string="{"true" if is_text else "false"}">')
            out.theirs(value if is_text else _to_json(value, where), f"{where}.arguments.{key}")
            out.ours(fmt.PARAMETER_CLOSE)
        out.ours(f"\n{fmt.INVOKE_CLOSE}\n")
    out.ours(fmt.CALLS_CLOSE)


def _write_transition(
    out: PromptWriter, turn: Turn, index: int, *, thinking: bool, opens_thinking: bool
) -> None:
    """What stands between a turn and the assistant's."""
    if turn.task is not None:
        if turn.task == "action":
            out.control(fmt.ASSISTANT)
            out.control(fmt.THINK_OPEN if thinking else fmt.THINK_CLOSE)
        out.control(fmt.TASKS[turn.task])
    elif turn.role in ("user", "developer") or (turn.role == "system" and index > 0):
        out.control(fmt.ASSISTANT)
        out.control(fmt.THINK_OPEN if opens_thinking else fmt.THINK_CLOSE)
