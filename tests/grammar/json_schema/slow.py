"""A slow and plain recogniser of rules, bags included; the rules must not be left recursive."""

from __future__ import annotations

from deepinfer.grammar import ir

Ends = frozenset[int]


class Recogniser:
    """Where expressions can end in one byte string."""

    def __init__(self, rules: ir.Rules, text: bytes) -> None:
        self.rules = rules
        self.text = text
        self.known: dict[tuple[ir.Expr, int], Ends] = {}

    def accepts(self) -> bool:
        return len(self.text) in self.ends(ir.ref(self.rules.start), 0)

    def ends(self, expr: ir.Expr, at: int) -> Ends:
        key = (expr, at)
        if key not in self.known:
            self.known[key] = self.work(expr, at)
        return self.known[key]

    def after(self, expr: ir.Expr, places: Ends) -> Ends:
        return frozenset(end for place in places for end in self.ends(expr, place))

    def work(self, expr: ir.Expr, at: int) -> Ends:
        size = len(self.text)
        match expr:
            case ir.Eps():
                return frozenset([at])
            case ir.Bytes(mask=mask):
                return frozenset([at + 1] if at < size and mask >> self.text[at] & 1 else [])
            case ir.Literal(text=text):
                return frozenset([at + len(text)] if self.text.startswith(text, at) else [])
            case ir.Seq(parts=parts):
                places = frozenset([at])
                for part in parts:
                    places = self.after(part, places)
                return places
            case ir.Alt(parts=parts):
                return frozenset().union(*(self.ends(part, at) for part in parts))
            case ir.And(parts=parts):
                return frozenset.intersection(*(self.ends(part, at) for part in parts))
            case ir.Not(expr=inner):
                return frozenset(range(at, size + 1)) - self.ends(inner, at)
            case ir.Ref(name=name):
                return self.ends(self.rules.rules[name], at)
            case ir.Repeat(expr=inner, low=low, high=high):
                return self.repeated(inner, low, high, at)
            case ir.Bag():
                return self.bag(expr, at)
        return frozenset()

    def repeated(self, inner: ir.Expr, low: int, high: int | None, at: int) -> Ends:
        places, found, count = frozenset([at]), frozenset(), 0
        seen: set[Ends] = set()
        while places and (high is None or count <= high) and (count < low or places not in seen):
            if count >= low:
                found |= places
                seen.add(places)
            places, count = self.after(inner, places), count + 1
        return found

    def bag(self, bag: ir.Bag, at: int) -> Ends:
        """All ways to take members one after another."""
        found = set()
        stack: list[tuple[int, tuple[int, ...]]] = [(at, ())]
        seen = set(stack)
        while stack:
            place, taken = stack.pop()
            if self.complete(bag, taken):
                found.add(place)
            if bag.high is not None and len(taken) >= bag.high:
                continue
            begin = self.ends(bag.separator, place) if taken else frozenset([place])
            for index, member in enumerate(bag.members):
                if self.may_follow(bag, taken, index):
                    for end in self.after(member.expr, begin):
                        state = (end, (*taken, index))
                        if state not in seen:
                            seen.add(state)
                            stack.append(state)
        return frozenset(found)

    def may_follow(self, bag: ir.Bag, taken: tuple[int, ...], index: int) -> bool:
        member = bag.members[index]
        if member.high is not None and taken.count(index) >= member.high:
            return False
        if bag.ordered and taken and index < taken[-1]:
            return False
        group = member.group
        return group is None or all(bag.members[other].group != group for other in taken)

    def complete(self, bag: ir.Bag, taken: tuple[int, ...]) -> bool:
        present = set(taken)
        return (
            len(taken) >= bag.low
            and all(taken.count(i) >= m.low for i, m in enumerate(bag.members))
            and all(c.positive & present or c.negative - present for c in bag.clauses)
        )
