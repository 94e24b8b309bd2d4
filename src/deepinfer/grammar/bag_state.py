"""What has occurred in a bag, and whether the bag can still be completed.

The state keeps only what the future depends on: which members are closed, what is still owed, which of the
undecided conditions' members were seen. Two histories with the same future have the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepinfer.grammar._ir_nodes import Bag
    from deepinfer.grammar.nodes import Node

__all__ = ["BagSpec", "BagState"]


class BagState(NamedTuple):
    """State of a bag.

    Attributes:
        closed: Bit m: member m may not occur any more.
        seen: Bit m: member m has occurred; kept for members that something still depends on.
        done: Bit c: condition c holds whatever comes.
        owed: For each counted member, occurrences still needed.
        left: For each counted member, occurrences still allowed; -1 for no bound.
        total_owed: Members still needed in all.
        total_left: Members still allowed in all; -1 for no bound.
    """

    closed: int
    seen: int
    done: int
    owed: tuple[int, ...]
    left: tuple[int, ...]
    total_owed: int
    total_left: int


def _bits(mask: int) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


_MAX_STEPS = 10_000


class BagSpec:
    """A bag with its members as nodes.

    Args:
        number: Number of the bag in its store.
        bag: The bag.
        members: Its members' expressions, in order. A member with an empty language never occurs.
        separator: Its separator. With an empty language, one member at most occurs.
    """

    def __init__(self, number: int, bag: Bag, members: list[Node], separator: Node) -> None:
        self.number = number
        self.members = members
        self.separator = separator
        self.ordered = bag.ordered
        self.recursive = separator.recursive or any(m.recursive for m in members)
        count = len(members)
        lows = [m.low for m in bag.members]
        highs = [m.high if m.group is None or m.high == 0 else 1 for m in bag.members]
        highs = [0 if n.live is False else h for n, h in zip(members, highs, strict=True)]
        # A member that occurs at most once needs no counter: it is closed when it has occurred.
        self._counted = [i for i in range(count) if highs[i] not in (0, 1)]
        self._counter = {member: place for place, member in enumerate(self._counted)}
        self._needed = sum(1 << i for i in range(count) if lows[i] and i not in self._counter)
        self._all = (1 << count) - 1
        groups: dict[int, int] = {}
        for index, member in enumerate(bag.members):
            if member.group is not None:
                groups[member.group] = groups.get(member.group, 0) | 1 << index
        self._groups = list(groups.values())
        self._group = [
            1 << i if m.group is None else groups[m.group] for i, m in enumerate(bag.members)
        ]
        self._clauses = [
            (sum(1 << i for i in c.positive), sum(1 << i for i in c.negative)) for c in bag.clauses
        ]
        self._impossible = any(
            high is not None and low > high for low, high in zip(lows, highs, strict=True)
        )
        self.trivial = not (self._clauses or self._needed or self._counted or bag.low)
        self._verdicts: dict[BagState, bool] = {}
        self._allowed: dict[BagState, int] = {}
        self._bounded = bool(bag.low) or bag.high is not None
        self._plain = not (self._clauses or groups or self._bounded or separator.live is False)
        self.union = separator
        self.start = self._reduce(
            BagState(
                sum(1 << i for i in range(count) if highs[i] == 0),
                0,
                0,
                tuple([lows[i] for i in self._counted]),
                tuple([-1 if highs[i] is None else int(highs[i] or 0) for i in self._counted]),
                bag.low,
                -1 if bag.high is None else bag.high,
            )
        )

    def _reduce(self, state: BagState) -> BagState:
        """Decide the conditions that can be decided, and forget members that only they needed."""
        if not self._clauses:
            return state
        closed, seen, done = state.closed, state.seen, state.done
        keep = self._needed
        for number, (positive, negative) in enumerate(self._clauses):
            if done >> number & 1:
                continue
            if positive & seen or negative & closed & ~seen:
                done |= 1 << number
            else:
                keep |= positive | negative
        return state._replace(seen=seen & keep, done=done)

    def advance(self, state: BagState, member: int) -> BagState | None:
        """The state after one more occurrence of a member; None when it may not occur."""
        closed, seen, done, owed, left, total_owed, total_left = state
        bit = 1 << member
        if closed & bit or total_left == 0:
            return None
        place = self._counter.get(member)
        if place is None:
            closed |= self._group[member]
        else:
            if owed[place]:
                owed = (*owed[:place], owed[place] - 1, *owed[place + 1 :])
            if left[place] > 0:
                left = (*left[:place], left[place] - 1, *left[place + 1 :])
                if left[place] == 0:
                    closed |= bit
        if self.ordered:
            closed |= bit - 1
        if self._clauses or self._needed:
            seen |= bit
        if total_owed:
            total_owed -= 1
        if total_left > 0:
            total_left -= 1
        return self._reduce(BagState(closed, seen, done, owed, left, total_owed, total_left))

    def allowed(self, state: BagState) -> int:
        """Members, as bits, that may come next with an end still in reach."""
        found = self._allowed.get(state)
        if found is None:
            found = 0
            if not (self._impossible or state.total_left == 0):
                found = self._all & ~state.closed
                if self._plain:
                    owing = self._owing(state)
                    if self.ordered and owing:
                        # Nothing behind the first member that must still come.
                        found &= ((owing & -owing) << 1) - 1
                elif not self.trivial:
                    found = self._viable(state, found)
            self._allowed[state] = found
        return found

    def _owing(self, state: BagState) -> int:
        """Members, as bits, that must still occur whatever the conditions say."""
        owing = self._needed & ~state.seen
        for place, member in enumerate(self._counted):
            if state.owed[place]:
                owing |= 1 << member
        return owing

    def _viable(self, state: BagState, members: int) -> int:
        """Those of some members after which the bag can be completed."""
        found = members
        single = self.separator.live is False
        # One way to complete the bag usually completes it after most members too.
        way = -1 if self._bounded or single else self._solution(state)
        for member in _bits(members):
            after = self.advance(state, member)
            if after is None:
                found ^= 1 << member
            elif way >= 0 and self._completes(after, way & ~(1 << member)):
                continue
            elif not self.completable(after):
                found ^= 1 << member
        return found

    def _completes(self, state: BagState, way: int) -> bool:
        """Whether the bag is complete after one more occurrence of each member of a set, as often as owed."""
        if way & state.closed or self._owing(state) & ~way:
            return False
        seen = state.seen | way
        for number, (positive, negative) in enumerate(self._clauses):
            if not (state.done >> number & 1 or positive & seen or negative & ~seen):
                return False
        return True

    def full(self, state: BagState) -> bool:
        """Whether no member may come any more, whatever the conditions say."""
        return state.total_left == 0 or not self._all & ~state.closed

    def complete(self, state: BagState) -> bool:
        """Whether the bag may end here."""
        if self.trivial:
            return True
        if self._impossible or state.total_owed or any(state.owed):
            return False
        if self._needed & ~state.seen:
            return False
        for number, (positive, negative) in enumerate(self._clauses):
            held = state.done >> number & 1 or positive & state.seen or negative & ~state.seen
            if not held:
                return False
        return True

    def completable(self, state: BagState) -> bool:
        """Whether the bag may end after a member that led to this state, or after more members."""
        if self.trivial or self.complete(state):
            return True
        if self._impossible or self.separator.live is False:
            return False
        if self._plain:
            return not self._owing(state) & state.closed
        verdict = self._verdicts.get(state)
        if verdict is None:
            verdict = self._verdicts[state] = self._solution(state) >= 0
        return verdict

    def _solution(self, state: BagState) -> int:
        """A set of further members, as bits, that completes the bag; -1 when there is none."""
        must = self._owing(state)
        for place in range(len(self._counted)):
            if 0 <= state.left[place] < state.owed[place]:
                return -1
        if must & state.closed:
            return -1
        for group in self._groups:
            if (must & group).bit_count() > 1:
                return -1
        clauses = []
        for number, (positive, negative) in enumerate(self._clauses):
            if state.done >> number & 1:
                continue
            # Positive members that can no longer occur, and negative ones that did, do not help.
            positive &= ~state.closed
            negative &= ~state.seen
            if not positive and not negative:
                return -1
            clauses.append((positive, negative))
        return self._solve(state, clauses, must)

    def _solve(self, state: BagState, clauses: list[tuple[int, int]], must: int) -> int:
        """Search for a set of further members; `yes` and `no` are the choices made so far."""
        stack = [(self._with_groups(must), 0, must)]
        steps = 0
        while stack:
            excluded, no, yes = stack.pop()
            steps += 1
            if steps > _MAX_STEPS:
                # Given up: taken for possible, as a search for dead ends does.
                return must
            no |= excluded
            if yes & no:
                continue
            # Of the conditions that are open the one with the fewest ways to hold: what is forced comes first.
            positive = negative = 0
            fewest = -1
            for p, n in clauses:
                if p & yes or n & no:
                    continue
                p, n = p & ~no, n & ~yes
                ways = p.bit_count() + n.bit_count()
                if fewest < 0 or ways < fewest:
                    positive, negative, fewest = p, n, ways
                    if ways < 2:
                        break
            if fewest < 0:
                if not self._bounded or self._countable(state, yes, no):
                    return yes
                continue
            for member in _bits(positive):
                chosen = yes | 1 << member
                stack.append((self._with_groups(1 << member), no, chosen))
            for member in _bits(negative):
                stack.append((1 << member, no, yes))
        return -1

    def _with_groups(self, chosen: int) -> int:
        """Members that a choice excludes: the other variants of the same keys."""
        out = 0
        for member in _bits(chosen):
            out |= self._group[member] & ~(1 << member)
        return out

    def _countable(self, state: BagState, yes: int, no: int) -> bool:
        """Whether numbers of occurrences exist: `yes` members at least once, `no` members never."""
        least = most = taken = 0
        for member in _bits(self._all & ~state.closed & ~no):
            bit = 1 << member
            place = self._counter.get(member)
            if yes & bit:
                least += max(1, 0 if place is None else state.owed[place])
            if taken & bit:
                continue
            taken |= self._group[member]
            left = 1 if place is None else state.left[place]
            most = -1 if most < 0 or left < 0 else most + left
        if state.total_left >= 0 and least > state.total_left:
            return False
        return most < 0 or most >= state.total_owed

    def counted(self, state: BagState, limit: int) -> bool:
        """Whether a counter of the state is above a limit."""
        return (
            state.total_owed > limit
            or state.total_left > limit
            or any(value > limit for value in state.owed)
            or any(value > limit for value in state.left)
        )

    def saturate(self, state: BagState, limit: int) -> BagState:
        """The state with counters above the limit replaced by "more than the limit".

        Only counters that leave room for everything that is still needed are touched, so that the state can be
        completed in the same ways.
        """
        while True:
            reduced = self._saturate_once(state, limit)
            if reduced == state:
                return state
            state = reduced

    def _saturate_once(self, state: BagState, limit: int) -> BagState:
        needs = self._needed.bit_count() + sum(state.owed) + state.total_owed
        room = limit + needs + len(self._clauses)
        left = tuple([-1 if value > room else value for value in state.left])
        total_left = -1 if state.total_left > room else state.total_left
        owed, total_owed = state.owed, state.total_owed
        if total_left < 0 and not self._clauses:
            owed = tuple(
                [min(o, limit + 1) if n < 0 else o for o, n in zip(owed, left, strict=True)]
            )
            if not self.ordered and any(value < 0 for value in left):
                total_owed = min(total_owed, limit + 1)
        return state._replace(owed=owed, left=left, total_owed=total_owed, total_left=total_left)
