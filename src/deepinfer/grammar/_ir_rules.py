"""Named expressions with a start: a whole grammar."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from deepinfer.core.errors import GrammarSyntaxError
from deepinfer.grammar._ir_nodes import Clause, Expr, Ref
from deepinfer.grammar._ir_text import to_text
from deepinfer.grammar._ir_walk import flatten, unflatten, walk


class Rules:
    """A grammar: expressions by name, and the name to start from.

    Immutable, hashable by content, picklable. The same content has the same `digest` in every process.

    Attributes:
        start: Name of the start rule.
        rules: The expressions by name, read only, in the order given.
    """

    __slots__ = ("_digest", "rules", "start")

    start: str
    rules: Mapping[str, Expr]
    _digest: str | None

    def __init__(self, start: str, rules: Mapping[str, Expr]) -> None:
        put = object.__setattr__
        put(self, "start", start)
        put(self, "rules", MappingProxyType(dict(rules)))
        put(self, "_digest", None)

    @classmethod
    def of(cls, expr: Expr, rules: Mapping[str, Expr] | None = None) -> Rules:
        """Rules whose start is `expr`, under a name that `rules` do not use."""
        others = dict(rules or {})
        name = "root"
        while name in others:
            name += "_"
        return cls(name, {name: expr, **others})

    def check(self) -> None:
        """Refuse references to rules that do not exist.

        Raises:
            GrammarSyntaxError: The start or a referenced rule is not defined.
        """
        if self.start not in self.rules:
            raise GrammarSyntaxError(
                f"the start rule {self.start!r} is not defined; {self._known()}"
            )
        for node in walk(*self.rules.values()):
            if isinstance(node, Ref) and node.name not in self.rules:
                raise GrammarSyntaxError(f"rule {node.name!r} is not defined; {self._known()}")

    def _known(self) -> str:
        names = sorted(self.rules)
        more = "" if len(names) <= 10 else f" and {len(names) - 10} more"
        return f"defined are {', '.join(names[:10]) or 'none'}{more}"

    @property
    def digest(self) -> str:
        """Content hash: 32 hexadecimal digits, the same in every process and on every machine."""
        if self._digest is None:
            names = list(self.rules)
            hasher = hashlib.blake2b(digest_size=16)
            hasher.update(repr((self.start, names)).encode())
            for entry in flatten(*self.rules.values()):
                hasher.update(repr(_plain(entry)).encode())
            object.__setattr__(self, "_digest", hasher.hexdigest())
        return str(self._digest)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Rules are immutable; build another one for {name!r}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Rules):
            return NotImplemented
        return self.start == other.start and dict(self.rules) == dict(other.rules)

    def __hash__(self) -> int:
        return hash((self.start, frozenset(self.rules.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.start, tuple(self.rules), flatten(*self.rules.values()))

    def __repr__(self) -> str:
        return f"<Rules start={self.start!r}, {len(self.rules)} rules>"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, limit: int = 10_000) -> str:
        """One line a rule, `name ::= expression`, the start first."""
        order = [name for name in self.rules if name == self.start]
        order += [name for name in self.rules if name != self.start]
        return "\n".join(f"{name} ::= {to_text(self.rules[name], limit=limit)}" for name in order)


def _plain(value: Any) -> Any:
    """The value with sets as sorted lists, so that its repr is the same in every process."""
    if isinstance(value, Clause):
        return (sorted(value.positive), sorted(value.negative))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def _restore(start: str, names: tuple[str, ...], flat: tuple[tuple[Any, ...], ...]) -> Rules:
    return Rules(start, dict(zip(names, unflatten(flat), strict=True)))
