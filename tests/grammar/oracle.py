"""Languages by enumeration: the slow, plain meaning of expressions, against which the automaton is checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from deepinfer.grammar.ir import (
    Alt,
    And,
    Bag,
    Bytes,
    Eps,
    Expr,
    Literal,
    Not,
    Ref,
    Repeat,
    Rules,
    Seq,
)

Language = frozenset[bytes]


def all_strings(alphabet: bytes, longest: int) -> list[bytes]:
    return [
        bytes(letters)
        for length in range(longest + 1)
        for letters in itertools.product(alphabet, repeat=length)
    ]


class Oracle:
    """Strings of at most `longest` bytes over an alphabet that rules accept."""

    def __init__(self, rules: Rules, alphabet: bytes, longest: int) -> None:
        self.alphabet = alphabet
        self.longest = longest
        self.universe = frozenset(all_strings(alphabet, longest))
        self.rules: dict[str, Language] = {name: frozenset() for name in rules.rules}
        changed = True
        while changed:
            changed = False
            for name, expr in rules.rules.items():
                found = self.language(expr, self.rules)
                if found != self.rules[name]:
                    self.rules[name] = found
                    changed = True
        self.accepted = self.rules[rules.start]

    def _join(self, left: Language, right: Language) -> Language:
        return frozenset(a + b for a in left for b in right if len(a) + len(b) <= self.longest)

    def language(self, expr: Expr, rules: Mapping[str, Language]) -> Language:
        if isinstance(expr, Eps):
            return frozenset((b"",))
        if isinstance(expr, Bytes):
            return frozenset(bytes((b,)) for b in self.alphabet if expr.mask >> b & 1)
        if isinstance(expr, Literal):
            return frozenset((expr.text,)) & self.universe
        if isinstance(expr, Seq):
            out: Language = frozenset((b"",))
            for part in expr.parts:
                out = self._join(out, self.language(part, rules))
            return out
        if isinstance(expr, Alt):
            return frozenset().union(*[self.language(part, rules) for part in expr.parts])
        if isinstance(expr, And):
            return frozenset(self.universe).intersection(
                *[self.language(part, rules) for part in expr.parts]
            )
        if isinstance(expr, Not):
            return self.universe - self.language(expr.expr, rules)
        if isinstance(expr, Repeat):
            return self._repeat(expr, rules)
        if isinstance(expr, Ref):
            return rules[expr.name]
        if isinstance(expr, Bag):
            return self._bag(expr, rules)
        return frozenset()

    def _repeat(self, expr: Repeat, rules: Mapping[str, Language]) -> Language:
        one = self.language(expr.expr, rules)
        out: set[bytes] = set()
        power: Language = frozenset((b"",))
        high = expr.high if expr.high is not None else expr.low + self.longest
        for count in range(min(high, expr.low + self.longest) + 1):
            if count >= expr.low:
                out |= power
            power = self._join(power, one)
        return frozenset(out)

    def _bag(self, bag: Bag, rules: Mapping[str, Language]) -> Language:
        members = [self.language(m.expr, rules) for m in bag.members]
        separator = self.language(bag.separator, rules)
        out: set[bytes] = set()
        most = self.longest if bag.high is None else min(bag.high, self.longest)
        for total in range(bag.low, most + 1):
            for order in itertools.product(range(len(members)), repeat=total):
                if not _allowed(bag, order):
                    continue
                text: Language = frozenset((b"",))
                for place, index in enumerate(order):
                    if place:
                        text = self._join(text, separator)
                    text = self._join(text, members[index])
                    if not text:
                        break
                out |= text
        return frozenset(out)


def _allowed(bag: Bag, order: tuple[int, ...]) -> bool:
    if bag.ordered and list(order) != sorted(order):
        return False
    counts = [order.count(index) for index in range(len(bag.members))]
    groups: dict[int, int] = {}
    for member, count in zip(bag.members, counts, strict=True):
        if count < member.low or (member.high is not None and count > member.high):
            return False
        if member.group is not None:
            groups[member.group] = groups.get(member.group, 0) + count
    if any(count > 1 for count in groups.values()):
        return False
    return all(
        any(counts[i] for i in clause.positive) or any(not counts[i] for i in clause.negative)
        for clause in bag.clauses
    )
