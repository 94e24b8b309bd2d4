"""Makes the nodes of an automaton: smart constructors, one object for each normal form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepinfer.grammar.cuts import CutStore
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    BAG,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REF,
    REP,
    SET,
    TAG,
    TRIE,
    UNKNOWN,
    BagNode,
    Node,
    TrieNode,
)

if TYPE_CHECKING:
    from deepinfer.grammar.bag_state import BagSpec, BagState
    from deepinfer.grammar.budget import Budget


_PIECE = 32
_JOINED_FRAMES = 64


class NodeStore:
    """Makes nodes in normal form and keeps each once.

    Args:
        budget: Bounds on the number of nodes and the time; None for none.
        counter_limit: Counters above it saturate in `truncate`.
    """

    def __init__(self, budget: Budget | None = None, counter_limit: int = 128) -> None:
        self.counter_limit = counter_limit
        self._sets: dict[int, Node] = {}
        self._literals: dict[bytes, Node] = {}
        self._tries: dict[tuple[int, int, int, int], Node] = {}
        self._kept: list[list[bytes]] = []
        self._cons: dict[int, Node] = {}
        self._alts: dict[tuple[int, ...], Node] = {}
        self._unions: dict[tuple[int, ...], Node] = {}
        self._ands: dict[tuple[int, ...], Node] = {}
        self._nots: dict[int, Node] = {}
        self._reps: dict[tuple[int, int, int], Node] = {}
        self._bags: dict[tuple[int, int, int, BagState], Node] = {}
        self._tags: dict[int, Node] = {}
        self.num_nodes = 0
        self._nesting = 0
        self._check = budget.check if budget is not None else _unbounded
        self.cuts = CutStore()
        self.empty = self._new(EMPTY, False, False, 1 << 30)
        self.eps = self._new(EPS, True, True, 0)
        self.eps.depth = 0
        self.eps.cut = self.empty.cut = self.cuts.nothing
        self.empty.depth = 0
        self.all = self._new(NOT, True, True, 0)
        self.all.a = self.empty
        self.all.cut = self.cuts.everything
        self.all.targets = (self.all,)
        self.unknown = self._new(UNKNOWN, False, True, 0)
        self.unknown.exposed = True
        self.unknown.cut = self.cuts.nothing
        self._nots[self.empty.uid] = self.all

    def _new(self, kind: int, nullable: bool, live: bool | None, least: int) -> Node:
        uid = self.num_nodes
        self.num_nodes = uid + 1
        if not uid & 1023:
            self._check(uid)
        return Node(kind, uid, nullable, live, least)

    @property
    def byte_sets(self) -> Iterable[int]:
        """Masks of all byte sets that nodes were made of."""
        return self._sets

    @property
    def literals(self) -> Iterable[bytes]:
        """All literal strings that nodes were made of."""
        for strings in self._kept:
            yield from strings
        yield from self._literals

    def byte_set(self, mask: int) -> Node:
        """One byte of a set; the mask is not 0."""
        node = self._sets.get(mask)
        if node is None:
            node = self._sets[mask] = self._new(SET, False, True, 1)
            node.mask = mask
            node.targets = (self.eps,)
            node.cut = self.cuts.cut((mask,))
        return node

    def literal(self, text: bytes) -> Node:
        """The byte string. A long one is a chain of pieces, so that its rests stay short."""
        if not text:
            return self.eps
        if len(text) > _PIECE:
            node = self.eps
            for start in range((len(text) - 1) // _PIECE * _PIECE, -1, -_PIECE):
                node = self.cons(self.literal(text[start : start + _PIECE]), node)
            return node
        node = self._literals.get(text)
        if node is None:
            node = self._literals[text] = self._new(LIT, False, True, len(text))
            node.text = text
        return node

    def choice(self, texts: Iterable[bytes]) -> Node:
        """Any of several byte strings, without a node for each."""
        strings = sorted(set(texts))
        self._kept.append(strings)
        return self.trie(strings, 0, len(strings), 0)

    def trie(self, strings: list[bytes], first: int, last: int, skip: int) -> Node:
        """The rests of a range of ascending strings after their first `skip` bytes."""
        if last == first:
            return self.empty
        if last == first + 1:
            return self.literal(strings[first][skip:])
        key = (id(strings), first, last, skip)
        found = self._tries.get(key)
        if found is None:
            uid = self.num_nodes
            self.num_nodes = uid + 1
            if not uid & 1023:
                self._check(uid)
            shortest = min([len(text) for text in strings[first:last]]) - skip
            node = TrieNode(TRIE, uid, shortest == 0, True, shortest)
            node.strings, node.first, node.last, node.skip = strings, first, last, skip
            found = self._tries[key] = node
        return found

    def cons(self, head: Node, tail: Node) -> Node:
        """`head` and then `tail`, as it is but for trivial cases and neighbouring counters of one body."""
        kind = head.kind
        if kind == EPS:
            return tail
        tail_kind = tail.kind
        if tail_kind == EPS:
            return head
        if kind == EMPTY or tail_kind == EMPTY:
            return self.empty
        if kind == REP:
            if tail_kind == REP and tail.a is head.a:
                return self._joined(head, tail)
            if tail_kind == CONS and tail.a.kind == REP and tail.a.a is head.a:
                return self.cons(self._joined(head, tail.a), tail.b)
        key = head.uid << 40 | tail.uid
        node = self._cons.get(key)
        if node is None:
            uid = self.num_nodes
            self.num_nodes = uid + 1
            if not uid & 1023:
                self._check(uid)
            nullable = head.nullable
            node = self._cons[key] = Node(
                CONS,
                uid,
                nullable and tail.nullable,
                _both_live(head, tail) if not (head.live and tail.live) else True,
                head.least + tail.least,
                tail.depth + 1,
                nullable and tail.exposed,
                head.recursive or tail.recursive,
                head.counted or tail.counted,
                tail.tags,
                tail.ends if nullable else 0,
            )
            node.a = head
            node.b = tail
        return node

    def _joined(self, left: Node, right: Node) -> Node:
        high = -1 if left.high < 0 or right.high < 0 else left.high + right.high
        return self.rep(left.a, left.low + right.low, high)

    def push(self, head: Node, tail: Node) -> Node:
        """`head` and then `tail`, with the first frame of `head` on top: the normal form of a state.

        Unions that hold recursive rules are distributed, so that each of their stacks stands on its own.
        """
        kind = head.kind
        if kind == CONS:
            return self.cons(head.a, self.append(head.b, tail))
        if kind == EPS and tail.kind == ALT:
            return self.alt(tail.parts)
        if kind == ALT and head.recursive:
            plain = [part for part in head.parts if not part.recursive]
            parts = [self.push(part, tail) for part in head.parts if part.recursive]
            if plain:
                parts.append(self.cons(self.alt(plain), tail))
            return self.alt(parts)
        return self.cons(head, tail)

    def append(self, upper: Node, tail: Node) -> Node:
        """Frames and then `tail`, as a tail.

        Frames with recursive rules become frames of the result, each on its own: were they kept together as one
        frame, stacks with the same frames would differ. Others stay together, which is less work.
        """
        if not upper.recursive:
            return self.cons(upper, tail)
        frames = []
        while upper.kind == CONS:
            frames.append(upper.a)
            upper = upper.b
        if upper.kind == ALT and upper.recursive:
            result = self._union([self.append(part, tail) for part in upper.parts])
        else:
            result = self.cons(upper, tail)
        for frame in reversed(frames):
            result = self.cons(frame, result)
        return result

    def push_all(self, heads: tuple[Node, ...], tail: Node) -> tuple[Node, ...]:
        """`push` of several heads on one tail."""
        if tail.kind == EPS:
            return heads
        known, cons, below = self._cons, self.cons, tail.uid
        out = []
        for head in heads:
            kind = head.kind
            if kind == CONS:
                rest = head.b
                if rest.recursive:
                    rest = self.append(rest, tail)
                else:
                    rest = known.get(rest.uid << 40 | below) or cons(rest, tail)
                out.append(known.get(head.a.uid << 40 | rest.uid) or cons(head.a, rest))
            elif kind in (EPS, ALT):
                out.append(self.push(head, tail))
            else:
                out.append(known.get(head.uid << 40 | below) or cons(head, tail))
        return tuple(out)

    def rep(self, body: Node, low: int, high: int) -> Node:
        """Between `low` and `high` copies of `body`; `high` -1 for no bound."""
        if high == 0 or body.kind == EPS:
            return self.eps
        if body.kind == EMPTY:
            return self.eps if low == 0 else self.empty
        if body.nullable:
            low = 0
            if body.kind == REP:
                high = -1 if high < 0 or body.high < 0 else high * body.high
                body = body.a
            elif body.kind == ALT:
                body = self._without_eps(body)
        if low == 1 and high == 1:
            return body
        key = (body.uid, low, high)
        node = self._reps.get(key)
        if node is None:
            node = self._reps[key] = self._new(
                REP, low == 0 or body.nullable, True if low == 0 else body.live, low * body.least
            )
            node.a = body
            node.low = low
            node.high = high
            node.recursive = body.recursive
            limit = self.counter_limit
            node.counted = low > limit or high > limit
        return node

    def _without_eps(self, body: Node) -> Node:
        if self.eps in body.parts:
            return self.alt([part for part in body.parts if part.kind != EPS])
        return body

    def alt(self, nodes: Iterable[Node]) -> Node:
        """Union, in normal form: stacks with the same rest or the same top are joined."""
        flat: dict[int, Node] = {}
        for node in nodes:
            kind = node.kind
            if kind == ALT:
                for part in node.parts:
                    flat[part.uid] = part
            elif kind != EMPTY:
                flat[node.uid] = node
        if len(flat) < 2:
            return next(iter(flat.values())) if flat else self.empty
        key = tuple(sorted(flat))
        found = self._alts.get(key)
        if found is not None:
            return found
        if self.all.uid in flat:
            found = self.all
        else:
            parts = self._join(list(flat.values()))
            found = parts[0] if len(parts) == 1 else self._alt(parts, self._alts)
        self._alts[key] = found
        return found

    def _alt(self, parts: list[Node], known: dict[tuple[int, ...], Node]) -> Node:
        parts.sort(key=_uid)
        key = tuple([part.uid for part in parts])
        found = known.get(key)
        if found is not None:
            return found
        live: bool | None = False
        least = 1 << 30
        depth = 0
        nullable = exposed = recursive = counted = False
        tags = ends = 0
        for part in parts:
            if part.live:
                live = True
            elif part.live is None and not live:
                live = None
            least = min(least, part.least)
            depth = max(depth, part.depth)
            nullable = nullable or part.nullable
            exposed = exposed or part.exposed
            recursive = recursive or part.recursive
            counted = counted or part.counted
            tags |= part.tags
            ends |= part.ends
        uid = self.num_nodes
        self.num_nodes = uid + 1
        if not uid & 1023:
            self._check(uid)
        found = known[key] = Node(
            ALT, uid, nullable, live, least, depth, exposed, recursive, counted, tags, ends
        )
        found.parts = tuple(parts)
        return found

    def _join(self, parts: list[Node]) -> list[Node]:
        """Merge byte sets, counters of one body, and stacks with one rest or one top."""
        kinds = {part.kind for part in parts}
        if SET in kinds:
            parts = self._merge_sets(parts)
        if REP in kinds:
            parts = self._merge_counters(parts)
        if CONS in kinds:
            parts = self._merge_stacks(parts)
        if EPS in kinds and len(parts) > 1:
            others = [part for part in parts if part.kind != EPS]
            if any(part.nullable for part in others):
                parts = others
        return parts

    def _merge_sets(self, parts: list[Node]) -> list[Node]:
        mask = 0
        rest = []
        for part in parts:
            if part.kind == SET:
                mask |= part.mask
            else:
                rest.append(part)
        return [*rest, self.byte_set(mask)]

    def _merge_counters(self, parts: list[Node]) -> list[Node]:
        bodies: dict[int, list[Node]] = {}
        rest = []
        for part in parts:
            if part.kind == REP:
                bodies.setdefault(part.a.uid, []).append(part)
            else:
                rest.append(part)
        for same in bodies.values():
            if len(same) == 1:
                rest.append(same[0])
                continue
            same.sort(key=_low)
            body, low, high = same[0].a, same[0].low, same[0].high
            for part in same[1:]:
                if high < 0 or part.low <= high + 1:
                    high = -1 if high < 0 or part.high < 0 else max(high, part.high)
                else:
                    rest.append(self.rep(body, low, high))
                    low, high = part.low, part.high
            rest.append(self.rep(body, low, high))
        return rest

    def _merge_stacks(self, parts: list[Node]) -> list[Node]:
        # Tops first: it keeps the number of different tops small, which bounds the work of ambiguous grammars.
        heads: dict[int, list[Node]] = {}
        for part in parts:
            if part.kind == CONS:
                heads.setdefault(part.a.uid, []).append(part)
        out = []
        for part in parts:
            if part.kind != CONS:
                same = heads.get(part.uid)
                if same is None:
                    out.append(part)
                else:
                    same.append(part)
        tails: dict[int, list[Node]] = {}
        for same in heads.values():
            if len(same) > 1:
                rests = [part.b if part.kind == CONS else self.eps for part in same]
                out.append(self.cons(same[0].a, self._union(rests)))
            elif same[0].a.recursive:
                out.append(same[0])
            else:
                tails.setdefault(same[0].b.uid, []).append(same[0])
        for same in tails.values():
            if len(same) == 1:
                out.append(same[0])
            else:
                out.append(self.cons(self.alt([part.a for part in same]), same[0].b))
        return out

    def _union(self, nodes: list[Node]) -> Node:
        """Union of tails, joined in their upper frames only: bounded work however deep the stacks are."""
        if self._nesting < _JOINED_FRAMES:
            self._nesting += 1
            try:
                return self.alt(nodes)
            finally:
                self._nesting -= 1
        flat: dict[int, Node] = {}
        for node in nodes:
            for part in node.parts if node.kind == ALT else (node,):
                flat[part.uid] = part
        if len(flat) == 1:
            return next(iter(flat.values()))
        return self._alt(list(flat.values()), self._unions)

    def conj(self, nodes: Iterable[Node]) -> Node:
        """Intersection."""
        flat: dict[int, Node] = {}
        negative: list[Node] = []
        for node in nodes:
            for part in node.parts if node.kind == AND else (node,):
                if part.kind == NOT:
                    negative.append(part.a)
                elif part.kind == EMPTY:
                    return self.empty
                else:
                    flat[part.uid] = part
        if self.eps.uid in flat:
            ok = all(part.nullable for part in flat.values())
            return self.eps if ok and not any(part.nullable for part in negative) else self.empty
        if negative:
            outside = self.neg(self.alt(negative))
            if outside.kind == EMPTY or outside.a.uid in flat:
                return self.empty
            if outside is not self.all:
                flat[outside.uid] = outside
        if len(flat) < 2:
            return next(iter(flat.values())) if flat else self.all
        key = tuple(sorted(flat))
        node_ = self._ands.get(key)
        if node_ is None:
            parts = tuple([flat[uid] for uid in key])
            nullable = all(part.nullable for part in parts)
            live = True if nullable else None
            if any(part.live is False for part in parts):
                live = False
            node_ = self._ands[key] = self._new(
                AND, nullable, live, max(part.least for part in parts)
            )
            node_.parts = parts
        return node_

    def neg(self, node: Node) -> Node:
        """Complement over all byte strings."""
        if node.kind == NOT:
            return node.a
        found = self._nots.get(node.uid)
        if found is None:
            nullable = not node.nullable
            found = self._nots[node.uid] = self._new(
                NOT, nullable, True if nullable else None, 0 if nullable else 1
            )
            found.a = node
        return found

    def reference(self, nullable: bool) -> Node:
        """A recursive rule whose body is set later as attribute `a`."""
        node = self._new(REF, nullable, True, 0 if nullable else 1)
        node.recursive = True
        return node

    def tag(self, member: int) -> Node:
        """The end of a member of a bag."""
        node = self._tags.get(member)
        if node is None:
            node = self._tags[member] = self._new(TAG, False, True, 0)
            node.tags = node.ends = 1 << member
            node.cut = self.cuts.nothing
        return node

    def bag_node(
        self, spec: BagSpec, bag: BagState, place: int, pick: Node, nullable: bool
    ) -> Node:
        """The node of a bag in a state; see `deepinfer.grammar.bag_nodes` for when to make one."""
        key = (spec.number, place, pick.uid, bag)
        found = self._bags.get(key)
        if found is None:
            uid = self.num_nodes
            self.num_nodes = uid + 1
            if not uid & 1023:
                self._check(uid)
            node = BagNode(BAG, uid, nullable, True, 0 if nullable else 1)
            node.spec = spec
            node.bag = bag
            node.place = place
            node.pick = pick
            node.body = None
            node.recursive = spec.recursive
            node.counted = spec.counted(bag, self.counter_limit)
            found = self._bags[key] = node
        return found


def _unbounded(num_states: int) -> None:
    """Stands for a budget where there is none."""


def _both_live(head: Node, tail: Node) -> bool | None:
    return False if head.live is False or tail.live is False else None


def _uid(node: Node) -> int:
    return node.uid


def _low(node: Node) -> int:
    return node.low
