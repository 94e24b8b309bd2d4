"""The states of the automaton: hash-consed residual expressions.

A `Node` is what may still follow. Two nodes of one `NodeStore` with the same normal form are the same object, so
"equal state" is identity and everything that was computed for a node is found again wherever it occurs: the inside of
a JSON string is one set of nodes for the whole grammar.

A stack is a chain of `CONS` nodes: the head is the innermost frame, the tail the frames below it. Tails are shared
between all the states that stand on them, and a union inside a tail joins several stacks under one head: together
this is a graph-structured stack. A call in tail position leaves no frame, because a tail of `EPS` is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.grammar.bag_state import BagSpec, BagState
    from deepinfer.grammar.cuts import Cut

__all__ = [
    "AFTER",
    "ALT",
    "AND",
    "BAG",
    "BagNode",
    "CHOICE",
    "CONS",
    "EMPTY",
    "EPS",
    "LIT",
    "NOT",
    "Node",
    "REF",
    "REP",
    "SET",
    "START",
    "TAG",
    "TRIE",
    "TrieNode",
    "UNKNOWN",
]

EMPTY, EPS, SET, LIT, CONS, ALT, AND, NOT, REP, REF, BAG, UNKNOWN, TAG, TRIE = range(14)
START, AFTER, CHOICE = range(3)


class Node:
    """A residual expression of one `NodeStore`; made by its methods only.

    Attributes:
        kind: One of the constants of this module.
        uid: Number of the node in its store, from 0.
        nullable: Whether the empty string is in the language.
        live: True: the language is not empty. False: it is. None: not decided yet.
        exposed: Whether the unknown rest below a cut stack is reached without another byte.
        recursive: Whether a recursive rule occurs in it.
        counted: Whether a counter above the saturation limit occurs on its spine.
        least: A lower bound of the length in bytes of the strings.
        depth: Frames of the deepest stack.
        tags: Members of a bag, as bits, whose end occurs in it (see `BagNode`).
        ends: Those of `tags` that are reached without another byte.
        cut: Byte sets of the outgoing moves once computed, else None. Other bytes lead to the empty language.
        targets: Where each set of `cut` leads.
        state: Number of the automaton's state, or -1.
    """

    __slots__ = (
        "a",
        "b",
        "counted",
        "cut",
        "depth",
        "ends",
        "exposed",
        "high",
        "kind",
        "least",
        "live",
        "low",
        "mask",
        "nullable",
        "parts",
        "recursive",
        "state",
        "tags",
        "targets",
        "text",
        "uid",
    )

    a: Node
    b: Node
    counted: bool
    cut: Cut | None
    depth: int
    ends: int
    exposed: bool
    high: int
    kind: int
    least: int
    live: bool | None
    low: int
    mask: int
    nullable: bool
    parts: tuple[Node, ...]
    recursive: bool
    state: int
    tags: int
    targets: tuple[Node, ...]
    text: bytes
    uid: int

    def __init__(
        self,
        kind: int,
        uid: int,
        nullable: bool,
        live: bool | None,
        least: int,
        depth: int = 1,
        exposed: bool = False,
        recursive: bool = False,
        counted: bool = False,
        tags: int = 0,
        ends: int = 0,
    ) -> None:
        self.kind = kind
        self.uid = uid
        self.nullable = nullable
        self.live = live
        self.least = least
        self.depth = depth
        self.exposed = exposed
        self.recursive = recursive
        self.counted = counted
        self.tags = tags
        self.ends = ends
        self.cut = None
        self.targets = ()
        self.state = -1


class TrieNode(Node):
    """Several literal strings.

    Attributes:
        strings: Distinct strings in ascending order.
        first: The strings from here ...
        last: ... up to here, excluded, share their first `skip` bytes, ...
        skip: ... which have been read.
    """

    __slots__ = ("first", "last", "skip", "strings")

    strings: list[bytes]
    first: int
    last: int
    skip: int


class BagNode(Node):
    """A bag in some state of its members.

    Before a member is known, the key it begins with is followed in a union of all members, each ended by a `TAG`
    node that says which one it was. That union does not depend on what has occurred, so its nodes are shared by all
    states of the bag; `bag` is what restricts it.

    Attributes:
        spec: The bag.
        bag: What has occurred.
        place: `START`: a member or the end may come; `AFTER`: a separator or the end; `CHOICE`: a member must come,
            or has begun.
        pick: For `CHOICE`, what is left of the union of all members.
    """

    __slots__ = ("bag", "body", "pick", "place", "spec")

    spec: BagSpec
    bag: BagState
    place: int
    pick: Node
    body: Node | None
