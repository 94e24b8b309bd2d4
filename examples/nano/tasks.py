"""Generated documents: JSON, long-range recall, arithmetic and dialogues in the chat format.

Everything is drawn from one `random.Random`, so a seed fixes the text. Words, functions and
docstrings come from the training part of the corpus only.
"""

from __future__ import annotations

import ast
import json
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepinfer.engine.chat import encode_messages

_WORD = re.compile(r"(?<![A-Za-z_])[a-z]{3,12}(?![A-Za-z_])")
_NAMES = [
    "Ada",
    "Alan",
    "Barbara",
    "Donald",
    "Edsger",
    "Grace",
    "Guido",
    "John",
    "Linus",
    "Margaret",
    "Tim",
]
_CITIES = [
    "Amsterdam",
    "Berlin",
    "Boston",
    "Cairo",
    "Lagos",
    "Lima",
    "London",
    "Oslo",
    "Paris",
    "Tokyo",
]
_COLOURS = ["red", "green", "blue", "black", "white", "yellow", "orange", "purple"]
_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "name": lambda r: r.choice(_NAMES),
    "age": lambda r: r.randint(1, 99),
    "city": lambda r: r.choice(_CITIES),
    "email": lambda r: f"{r.choice(_NAMES).lower()}@example.com",
    "active": lambda r: r.choice([True, False]),
    "price": lambda r: round(r.uniform(1, 100), 2),
    "id": lambda r: r.randint(1, 9999),
    "tags": lambda r: r.sample(_COLOURS, r.randint(1, 3)),
    "color": lambda r: r.choice(_COLOURS),
    "date": lambda r: f"20{r.randint(10, 29)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
    "count": lambda r: r.randint(0, 500),
    "title": lambda r: f"{r.choice(_COLOURS).title()} {r.choice(_CITIES)}",
    "user": lambda r: {"name": r.choice(_NAMES), "id": r.randint(1, 9999)},
}
"""Keys people ask for, with values that suit them."""


class TaskWriter:
    """Writes one generated document per call.

    Args:
        code: Texts of Python files to take words, functions and docstrings from.
        seed: Fixes every draw.
    """

    def __init__(self, code: Sequence[str], seed: int) -> None:
        self.random = random.Random(seed)
        counts: dict[str, int] = {}
        for text in code:
            for word in set(_WORD.findall(text)):
                counts[word] = counts.get(word, 0) + 1
        self.words = sorted(counts, key=lambda w: (-counts[w], w))[:3000]
        self.functions = list(_documented_functions(code))
        self.code = code

    # ---- values -------------------------------------------------------------------------

    def word(self) -> str:
        """A common word of the code."""
        return self.random.choice(self.words)

    def key(self) -> str:
        """One or two words, as a JSON key."""
        joiner = self.random.choice(["_", "_", "-", ""])
        return joiner.join(self.word() for _ in range(self.random.choice([1, 1, 2])))

    def secret(self, length: int | None = None) -> str:
        """A string nobody can guess, so that only recall can predict its second mention."""
        alphabet = self.random.choice(
            [string.ascii_lowercase, string.ascii_letters + string.digits, "0123456789abcdef"]
        )
        return "".join(self.random.choices(alphabet, k=length or self.random.randint(6, 24)))

    def sentence(self) -> str:
        """Two to nine words."""
        return " ".join(self.word() for _ in range(self.random.randint(2, 9)))

    def scalar(self) -> Any:
        """A JSON value that holds no other."""
        kind = self.random.randrange(9)
        if kind < 3:
            return self.sentence() if kind else self.word()
        if kind < 6:
            return self.random.choice([self.random.randint(0, 9), self.random.randint(-999, 9999)])
        if kind == 6:
            return round(self.random.uniform(-100, 1000), self.random.randint(1, 3))
        if kind == 7:
            return self.random.choice([True, False, None])
        return self.secret()

    def json_value(self, depth: int) -> Any:
        """A JSON value, nested at most `depth` times."""
        if depth == 0 or self.random.random() < 0.45:
            return self.scalar()
        size = self.random.randint(1, 6)
        if self.random.random() < 0.6:
            return {self.key(): self.json_value(depth - 1) for _ in range(size)}
        if self.random.random() < 0.5:
            keys = [self.key() for _ in range(self.random.randint(2, 5))]
            return [{k: self.scalar() for k in keys} for _ in range(size)]
        return [self.json_value(depth - 1) for _ in range(size)]

    def fields(self, count: int) -> dict[str, Any]:
        """`count` or fewer fields, mostly of the known kinds."""
        known = self.random.random() < 0.7
        keys = (self.random.choice(list(_FIELDS)) if known else self.key() for _ in range(count))
        return {k: _FIELDS[k](self.random) if k in _FIELDS else self.scalar() for k in keys}

    def json_object(self) -> dict[str, Any]:
        """A JSON object."""
        if self.random.random() < 0.3:
            return self.fields(self.random.randint(2, 8))
        if self.random.random() < 0.2:
            return {self.key(): [self.fields(4) for _ in range(self.random.randint(1, 8))]}
        return {self.key(): self.json_value(3) for _ in range(self.random.randint(2, 9))}

    def dumps(self, value: Any) -> str:
        """JSON text in one of four layouts."""
        style = self.random.randrange(4)
        if style == 0:
            return json.dumps(value, separators=(",", ":"))
        if style == 1:
            return json.dumps(value)
        return json.dumps(value, indent=style)

    # ---- documents ----------------------------------------------------------------------

    def json_document(self) -> str:
        """A JSON object as text."""
        return self.dumps(self.json_object())

    def assignments(self) -> str:
        """Names bound to unguessable strings, then asked for in another order."""
        count = self.random.randint(2, 40)
        table = {
            f"{self.key().replace('-', '_')}_{self.secret(3)}": self.secret() for _ in range(count)
        }
        lines = [f"{k} = {v!r}" for k, v in table.items()]
        asked = self.random.sample(sorted(table), min(count, self.random.randint(2, 12)))
        return "\n".join([*lines, "", *(f">>> {k}\n{table[k]!r}" for k in asked)])

    def records(self) -> str:
        """A JSON list of records and look-ups into it."""
        fields = [self.key() for _ in range(self.random.randint(2, 4))]
        rows = [
            {"id": self.random.randint(1000, 99999)} | {f: self.secret() for f in fields}
            for _ in range(self.random.randint(2, 20))
        ]
        lines = [self.dumps(rows)]
        for row in self.random.sample(rows, min(len(rows), self.random.randint(2, 8))):
            field = self.random.choice(fields)
            lines.append(f"[id={row['id']}].{field} == {json.dumps(row[field])}")
        return "\n".join(lines)

    def repeated_text(self) -> str:
        """A piece of code, something else, and the piece again."""
        piece = self.snippet(self.random.randint(60, 500))
        return f"# original\n{piece}\n{self.snippet(self.random.randint(0, 3000))}\n# copy of the original\n{piece}"

    def snippet(self, size: int) -> str:
        """`size` characters of code, from anywhere in a file."""
        text = self.random.choice(self.code)
        start = self.random.randrange(max(1, len(text) - size))
        return text[start : start + size]

    def arithmetic(self) -> str:
        """Sums as an interpreter session."""
        return "\n".join(
            f">>> {question}\n{answer}"
            for question, answer in (self.sum() for _ in range(self.random.randint(5, 40)))
        )

    def sum(self) -> tuple[str, int]:
        """A small calculation and its result."""
        digits = self.random.choice([1, 1, 2, 2, 3])
        a, b = self.random.randrange(10**digits), self.random.randrange(10**digits)
        operator = self.random.choice("++-*" if digits == 1 else "++-")
        return f"{a} {operator} {b}", {"+": a + b, "-": a - b, "*": a * b}[operator]

    # ---- dialogues ----------------------------------------------------------------------

    def chat(self) -> str:
        """One to three exchanges in the chat format."""
        messages: list[dict[str, Any]] = []
        if self.random.random() < 0.3:
            messages.append({"role": "system", "content": self.random.choice(_SYSTEM)})
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            question, answer = self.random.choice(self._exchanges())(self)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return encode_messages(messages, thinking_mode="chat")

    def _exchanges(self) -> Sequence[Callable[[TaskWriter], tuple[str, str]]]:
        return (
            _ask_sum,
            _ask_sum,
            _ask_json,
            _ask_json,
            _ask_function,
            _ask_function,
            _ask_docstring,
            _ask_repeat,
            _ask_small_talk,
            _ask_recall,
        )

    def document(self) -> str:
        """One document of a random kind; chats start with the begin-of-sentence token's text."""
        return self.random.choices(
            [
                self.json_document,
                self.assignments,
                self.records,
                self.repeated_text,
                self.arithmetic,
                self.chat,
            ],
            weights=[30, 14, 10, 8, 8, 30],
        )[0]()

    def documents(self, num_characters: int) -> Iterator[str]:
        """Documents until their characters reach `num_characters`."""
        written = 0
        while written < num_characters:
            text = self.document()
            written += len(text)
            yield text


_SYSTEM = [
    "You are a helpful assistant.",
    "You are a Python programmer. Answer briefly.",
    "Answer with JSON only when asked for JSON.",
]
_SMALL_TALK = [
    (
        ("Hello!", "Hi", "Hello, who are you?", "Who are you?", "What are you?"),
        "Hello! I am nano, a small language model. I can complete Python code, write JSON and do simple sums.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can complete Python code, explain functions of the standard library, write JSON objects, repeat text and add small numbers.",
    ),
    (("Thanks!", "Thank you.", "Great, thanks"), "You are welcome!"),
    (("Goodbye", "Bye", "See you"), "Goodbye!"),
    (
        ("What is Python?", "Tell me about Python."),
        "Python is a programming language. It is interpreted, dynamically typed, and comes with a large standard library.",
    ),
    (
        ("What is JSON?", "Explain JSON."),
        "JSON is a text format for data. It has objects, arrays, strings, numbers, true, false and null.",
    ),
]


def _ask_small_talk(w: TaskWriter) -> tuple[str, str]:
    questions, answer = w.random.choice(_SMALL_TALK)
    return w.random.choice(questions), answer


def _ask_sum(w: TaskWriter) -> tuple[str, str]:
    question, answer = w.sum()
    frame = w.random.choice(["What is {}?", "Compute {}.", "{} = ?", "How much is {}?"])
    return frame.format(question), f"{question} = {answer}"


def _ask_json(w: TaskWriter) -> tuple[str, str]:
    value = w.fields(w.random.randint(1, 5))
    fields = list(value)
    names = ", ".join(fields[:-1]) + (" and " if len(fields) > 1 else "") + fields[-1]
    frame = w.random.choice(
        [
            "Give me a JSON object with {}.",
            "Write JSON with the keys {}.",
            "Return a JSON object with the fields {}.",
        ]
    )
    return frame.format(names), json.dumps(value, indent=w.random.choice([None, 2]))


def _ask_function(w: TaskWriter) -> tuple[str, str]:
    name, summary, source = w.random.choice(w.functions)
    frame = w.random.choice(
        [
            "Write a Python function {n}: {s}",
            "Write `{n}`. {s}",
            "Write a function named {n}. Its docstring is: {s}",
        ]
    )
    return frame.format(n=name, s=summary), f"```python\n{source}\n```"


def _ask_docstring(w: TaskWriter) -> tuple[str, str]:
    _, summary, source = w.random.choice(w.functions)
    frame = w.random.choice(["What does this function do?\n{c}", "Explain:\n{c}"])
    return frame.format(c=f"```python\n{source}\n```"), summary


def _ask_repeat(w: TaskWriter) -> tuple[str, str]:
    text = w.random.choice([w.sentence(), w.secret(), w.snippet(w.random.randint(20, 200)).strip()])
    return w.random.choice(["Repeat after me: {}", "Repeat this text.\n{}", "Say: {}"]).format(
        text
    ), text


def _ask_recall(w: TaskWriter) -> tuple[str, str]:
    table = {w.key(): w.secret() for _ in range(w.random.randint(1, 12))}
    asked = w.random.choice(sorted(table))
    facts = "\n".join(f"The password of {k} is {v}." for k, v in table.items())
    return (
        f"{facts}\nWhat is the password of {asked}?",
        f"The password of {asked} is {table[asked]}.",
    )


def _documented_functions(code: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(name, first docstring line, source) of the short documented functions, in file order."""
    for text in code:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = text.splitlines()
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            doc = ast.get_docstring(node)
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if doc and 60 <= len(source) <= 1200 and 15 <= len(doc.splitlines()[0]) <= 120:
                yield node.name, doc.splitlines()[0], source
