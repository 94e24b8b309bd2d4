"""Figures from counts, probabilities and texts; no model, no torch."""

from __future__ import annotations

import ast
import json
import lzma
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LN2 = math.log(2)


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Bits a byte of text whose tokens cost `nats` in all."""
    return nats / LN2 / num_bytes


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits a byte of `xz -9e` over the texts, one behind the other."""
    data = b"".join(text.encode() for text in texts)
    packed = lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    return 8 * len(packed) / len(data)


@dataclass(frozen=True)
class Rate:
    """A share with its counts.

    Attributes:
        count: Successes.
        of: Attempts, at least 1.
    """

    count: int
    of: int

    @property
    def value(self) -> float:
        """Successes per attempt."""
        return self.count / self.of

    def interval(self, z: float = 1.959964) -> tuple[float, float]:
        """Wilson's score interval, by default of 95 %, for independent attempts."""
        p, n = self.value, self.of
        centre = p + z * z / (2 * n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def rate(outcomes: Iterable[bool]) -> Rate:
    """The rate of true outcomes."""
    values = list(outcomes)
    return Rate(sum(values), len(values))


# ---- drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One drafted block and what became of it.

    Attributes:
        accepted: Leading drafts that equal the output.
        confidences: One a draft.
    """

    accepted: int
    confidences: tuple[float, ...]


def accepted_drafts(drafts: Sequence[int], following: Sequence[int]) -> int | None:
    """Leading drafts equal to the tokens that followed; None when the output ended before that is known."""
    for count, draft in enumerate(drafts):
        if count == len(following):
            return None
        if draft != following[count]:
            return count
    return len(drafts)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def acceptance(blocks: Sequence[Block]) -> tuple[list[Rate | None], list[Rate]]:
    """Acceptance by position.

    Returns:
        Conditional (among the blocks whose earlier drafts were all accepted; None where there are none) and
        cumulative (among all blocks) rates, one a position.
    """
    size = len(blocks[0].confidences)
    reached = [sum(block.accepted >= i for block in blocks) for i in range(size + 1)]
    conditional = [Rate(reached[i + 1], reached[i]) if reached[i] else None for i in range(size)]
    return conditional, [Rate(reached[i + 1], len(blocks)) for i in range(size)]


def outcomes_at(blocks: Sequence[Block], position: int) -> tuple[list[float], list[bool]]:
    """Confidences and outcomes of one draft position, of the blocks that got there."""
    there = [block for block in blocks if block.accepted >= position]
    return (
        [block.confidences[position] for block in there],
        [block.accepted > position for block in there],
    )


def expected_calibration_error(
    confidences: Sequence[float], outcomes: Sequence[bool], bins: int = 10
) -> float:
    """Mean distance between confidence and outcome over equally wide bins, weighted by their size."""
    sums = [[0.0, 0.0] for _ in range(bins)]
    for confidence, outcome in zip(confidences, outcomes, strict=True):
        cell = sums[min(bins - 1, int(confidence * bins))]
        cell[0] += confidence
        cell[1] += outcome
    return sum(abs(expected - seen) for expected, seen in sums) / len(outcomes)


def brier_score(confidences: Sequence[float], outcomes: Sequence[bool]) -> float:
    """Mean squared distance between confidence and outcome."""
    pairs = zip(confidences, outcomes, strict=True)
    return sum((confidence - outcome) ** 2 for confidence, outcome in pairs) / len(outcomes)


def auroc(confidences: Sequence[float], outcomes: Sequence[bool]) -> float | None:
    """Chance that a success has the higher confidence than a failure, ties half; None without both kinds."""
    order = sorted(zip(confidences, outcomes, strict=True))
    positives = sum(outcomes)
    negatives = len(order) - positives
    if not positives or not negatives:
        return None
    wins, below, at = 0.0, 0, 0
    while at < len(order):
        end = at
        while end < len(order) and order[end][0] == order[at][0]:
            end += 1
        right = sum(outcome for _, outcome in order[at:end])
        wrong = end - at - right
        wins += right * (below + wrong / 2)
        below += wrong
        at = end
    return wins / (positives * negatives)


# ---- texts ----------------------------------------------------------------------------------


def parse_json(text: str) -> tuple[bool, Any]:
    """Whether a text is one valid JSON value, and the value; NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return True, json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False, None


def is_object_with(text: str, keys: Collection[str]) -> bool:
    """Whether a text is a JSON object with exactly these keys."""
    valid, value = parse_json(text)
    return valid and isinstance(value, dict) and set(value) == set(keys)


def function_source(prompt: str, completion: str, *, ended: bool) -> str | None:
    """A top-level function up to where the next top-level text begins.

    Args:
        prompt: The function's beginning.
        completion: What follows; a comment or a closing bracket at the margin still belongs to the function.
        ended: Whether the completion's end is the function's end.

    Returns:
        The function, or None when it does not end.
    """
    lines = completion.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if line and not line[0].isspace() and line[0] not in "#)]}":
            lines, ended = lines[:number], True
            break
    return prompt + "\n".join(lines).rstrip() + "\n" if ended else None


def is_function(source: str, name: str) -> bool:
    """Whether a source is one function of this name with a statement besides its docstring."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != name:
        return False
    return len(body[0].body) > (ast.get_docstring(body[0], clean=False) is not None)
