"""Chats, JSON documents and functions for the model to finish, and what is asked of the result."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from deepinfer.core.types import FinishReason, Output
from deepinfer.engine.chat import render_chat
from deepinfer.engine.chat_parser import parse_completion
from deepinfer.engine.tokenizer import Tokenizer

from .held_out import Document, TaskWriter
from .metrics import function_source, is_function, is_object_with, parse_json

SEED = 20_011
"""Away from the seeds of training, so that no generated text is one that was trained on."""
CUT = 0.3
FUNCTION_STOPS = ("\n\n\n", "\ndef ", "\nclass ", "\n@")

SUM_FRAMES = ("What is {}?", "Compute {}.", "{} = ?", "How much is {}?")
JSON_FRAMES = (
    "Give me a JSON object with {}.",
    "Write JSON with the keys {}.",
    "Return a JSON object with the fields {}.",
)
REPEAT_FRAMES = ("Repeat after me: {}", "Repeat this text.\n{}", "Say: {}")
TALK = ("Hello!", "Who are you?", "What can you do?", "Thanks!", "What is Python?", "What is JSON?")


@dataclass(frozen=True)
class Task:
    """One prompt and what is asked of the answer.

    Attributes:
        part: "chat", "json" or "functions".
        kind: What kind within the part.
        prompt_ids: Token ids of the prompt.
        max_tokens: Most tokens of the answer.
        is_right: Whether an answer is right, from its text and whether it ended by itself; None where only the
            form is asked for.
        stop: Strings that end the answer.
    """

    part: str
    kind: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    is_right: Callable[[str, bool], bool] | None
    stop: tuple[str, ...] = ()

    def judge(self, output: Output) -> bool | None:
        """Whether the output is right, or None where only the form is asked for."""
        ended = output.finish_reason is FinishReason.STOP
        return None if self.is_right is None else self.is_right(output.text, ended)


def is_well_formed(output: Output, tokenizer: Tokenizer) -> bool:
    """Whether an answer ends with end-of-sequence and holds no other control token and no broken tag."""
    *body, last = output.token_ids
    if output.finish_reason is not FinishReason.STOP or last not in tokenizer.eos_token_ids:
        return False
    if not tokenizer.control_ids.isdisjoint(body):
        return False
    message = parse_completion(tokenizer.decode(output.token_ids, skip_special=False))
    return bool(message.content) and not message.problems and not message.tool_calls


def last_number(text: str) -> int | None:
    """The last integer in a text."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


class TaskMaker:
    """Makes tasks from held-out code and one seed.

    Args:
        tokenizer: Encodes the prompts.
        documents: Held-out code, for words, text and functions.
    """

    def __init__(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> None:
        self.tokenizer = tokenizer
        self.documents = documents
        self.writer = TaskWriter([document.text for document in documents], SEED)
        self.random = self.writer.random

    def tasks(self, limit: int | None = None) -> list[Task]:
        """All tasks, at most `limit` of a kind; what one kind draws does not depend on the others."""
        makers: dict[str, tuple[Callable[[], Iterator[Task]], int]] = {
            "sums of 1 digit": (partial(self.sums, 1), 32),
            "sums of 2 digits": (partial(self.sums, 2), 32),
            "sums of 3 digits": (partial(self.sums, 3), 32),
            "JSON": (self.json_requests, 48),
            "repeat": (self.repeats, 24),
            "password": (self.passwords, 24),
            "talk": (self.talk, len(TALK)),
            "documents": (self.json_documents, 48),
            "functions": (self.functions, 64),
        }
        out: list[Task] = []
        for name, (make, count) in makers.items():
            self.random = self.writer.random = random.Random(f"{SEED} {name}")
            out += itertools.islice(make(), min(count, limit or count))
        return out

    def sums(self, digits: int) -> Iterator[Task]:
        """Different sums of numbers with up to so many digits; products of one digit."""
        seen: set[str] = set()
        while True:
            a, b = self.random.randrange(10**digits), self.random.randrange(10**digits)
            operator = self.random.choice("+-*" if digits == 1 else "+-")
            answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
            question = f"{a} {operator} {b}"
            if question not in seen:
                seen.add(question)
                kind = f"sum of {digits} digit{'s' if digits > 1 else ''}"
                frame = self.random.choice(SUM_FRAMES)
                yield self._chat(kind, frame.format(question), 32, partial(_is_number, answer))

    def json_requests(self) -> Iterator[Task]:
        """JSON objects with asked keys."""
        while True:
            keys = list(self.writer.fields(self.random.randint(1, 5)))
            names = ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]
            question = self.random.choice(JSON_FRAMES).format(names)
            yield self._chat("JSON object", question, 256, partial(_has_keys, keys))

    def repeats(self) -> Iterator[Task]:
        """Held-out text to say again."""
        while True:
            text = self.writer.snippet(self.random.randint(20, 200)).strip()
            if text:
                question = self.random.choice(REPEAT_FRAMES).format(text)
                limit = len(self.tokenizer.encode(text)) + 32
                yield self._chat("repetition", question, limit, partial(_is_text, text))

    def passwords(self) -> Iterator[Task]:
        """One of several random strings, asked for by name."""
        while True:
            names = {self.writer.key() for _ in range(self.random.randint(1, 12))}
            table = {name: self.writer.secret() for name in sorted(names)}
            asked = self.random.choice(sorted(table))
            facts = "\n".join(f"The password of {k} is {v}." for k, v in table.items())
            question = f"{facts}\nWhat is the password of {asked}?"
            yield self._chat("password", question, 64, partial(_holds, table[asked]))

    def talk(self) -> Iterator[Task]:
        """Questions whose answers stand in the training text."""
        for question in TALK:
            yield self._chat("small talk", question, 96, None)

    def json_documents(self) -> Iterator[Task]:
        """Generated documents cut after 30 % of their characters."""
        while True:
            text = self.writer.json_document()
            if 60 <= len(text) <= 1200:
                start = text[: int(CUT * len(text))]
                ids = self.tokenizer.encode(start)
                limit = 64 + 2 * (len(self.tokenizer.encode(text)) - len(ids))
                right = partial(_completes, start)
                yield Task("json", "document", tuple(ids), limit, right)

    def functions(self) -> Iterator[Task]:
        """Short documented top-level functions, cut after their docstring."""
        found = list(documented_functions(self.documents))
        self.random.shuffle(found)
        for name, start in found:
            ids = tuple(self.tokenizer.encode(start))
            right = partial(_is_whole_function, start, name)
            yield Task("functions", "held-out function", ids, 320, right, FUNCTION_STOPS)

    def _chat(
        self, kind: str, question: str, limit: int, right: Callable[[str, bool], bool] | None
    ) -> Task:
        messages = [{"role": "user", "content": question}]
        ids = self.tokenizer.encode_chat(render_chat(messages, thinking_mode="chat"))
        return Task("chat", kind, tuple(ids), limit, right)


def documented_functions(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """(name, signature and docstring) of top-level functions of 60 to 1,200 characters that do something."""
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        lines = document.text.splitlines()
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            end = node.body[0].end_lineno or 0
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if ast.get_docstring(node) and 60 <= len(source) <= 1200:
                yield node.name, "\n".join(lines[node.lineno - 1 : end])


def _is_number(answer: int, text: str, ended: bool) -> bool:
    return ended and last_number(text) == answer


def _has_keys(keys: Sequence[str], text: str, ended: bool) -> bool:
    return ended and is_object_with(text, keys)


def _is_text(wanted: str, text: str, ended: bool) -> bool:
    return ended and text == wanted


def _holds(wanted: str, text: str, ended: bool) -> bool:
    return ended and wanted in text


def _completes(start: str, text: str, ended: bool) -> bool:
    return ended and parse_json(start + text)[0]


def _is_whole_function(start: str, name: str, text: str, ended: bool) -> bool:
    source = function_source(start, text, ended=ended)
    return source is not None and is_function(source, name)
