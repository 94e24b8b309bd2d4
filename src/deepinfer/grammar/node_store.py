"""Makes the nodes of an automaton: smart constructors, one object for each normal form."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.grammar.joins import join, join_tails, one_byte
from deepinfer.grammar.leaf_store import LeafStore
from deepinfer.grammar.nodes import (
    ALT,
    AND,
    CONS,
    EMPTY,
    EPS,
    LIT,
    NOT,
    REP,
    SET,
    TRIE,
    Node,
    TrieNode,
)

__all__ = ["NodeStore"]

_PIECE = 32


class NodeStore(LeafStore):
    """Makes nodes in normal form and keeps each once."""

    def literal(self, text: bytes) -> Node:
        """The byte string. A long one is a chain of pieces, so that its rests stay short."""
        if not text:
            return self.eps
        if len(text) > _PIECE:
            chain = self.eps
            for start in range((len(text) - 1) // _PIECE * _PIECE, -1, -_PIECE):
                chain = self.cons(self.literal(text[start : start + _PIECE]), chain)
            return chain
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
            result = join_tails(self, [self.append(part, tail) for part in upper.parts])
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
            parts = join(self, list(flat.values()))
            found = parts[0] if len(parts) == 1 else self.plain_alt(parts, joined=True)
        self._alts[key] = found
        return found

    def plain_alt(self, parts: list[Node], *, joined: bool) -> Node:
        """Union of two parts or more as they are.

        Args:
            parts: Distinct nodes, none of them a union or empty; sorted in place.
            joined: Whether they are in normal form.
        """
        known = self._alts if joined else self._unions
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
        if len(flat) > 1:
            flat = self._counted_once(flat)
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

    def _counted_once(self, flat: dict[int, Node]) -> dict[int, Node]:
        """Parts of an intersection, where some count the same bytes: such as a pattern and a length."""
        for part in [part for part in flat.values() if part.kind == REP and part.a.kind == SET]:
            low, high = part.low, part.high
            for other in list(flat.values()):
                if other is not part and other.kind == REP and one_byte(other.a, part.a.mask):
                    del flat[other.uid]
                    low = max(low, other.low)
                    if other.high >= 0:
                        high = other.high if high < 0 else min(high, other.high)
            if (low, high) != (part.low, part.high):
                del flat[part.uid]
                if 0 <= high < low:
                    return {self.empty.uid: self.empty}
                both = self.rep(part.a, low, high)
                flat[both.uid] = both
                break
        return flat

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


def _both_live(head: Node, tail: Node) -> bool | None:
    return False if head.live is False or tail.live is False else None


def _uid(node: Node) -> int:
    return node.uid
