"""Who gets the blocks that are left, and who gives way when there are too few."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deepinfer.scheduling.books import Books
from deepinfer.scheduling.ledger import Sequence
from deepinfer.scheduling.policies import VictimPolicy

__all__ = ["BlockSupply"]


@dataclass(slots=True)
class BlockSupply:
    """The blocks that one plan may give out, counted down while it is made.

    A request that cannot get its blocks takes them from requests that give way before it. Blocks that a step in flight
    may still touch come back only when that step was collected; they are counted as on their way, the request waits for
    them, and nobody else is preempted for what is on its way already.

    Attributes:
        books: The requests.
        policy: Who gives way first.
        free: Blocks free now.
        coming: Blocks on their way that nobody waits for yet.
        preempted: Requests that give way, in order.
        starved: Requests that miss this step.
    """

    books: Books
    policy: VictimPolicy
    free: int
    coming: int
    preempted: list[Sequence] = field(default_factory=list)
    starved: list[Sequence] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Whether anybody gave way or missed the step; then nobody is admitted."""
        return bool(self.preempted or self.starved)

    def grant(self, needs: Iterable[tuple[Sequence, int]]) -> None:
        """Gives running requests the blocks that they cannot go on without.

        Args:
            needs: Requests and the blocks that each needs.
        """
        needs = list(needs)
        total = sum(need for _, need in needs)
        if total <= self.free:
            self.free -= total
            return
        ranks = self.protection()
        candidates = sorted(ranks, key=ranks.__getitem__)  # those who give way first come first
        by_rid = self.books.running
        needs.sort(key=lambda item: ranks[item[0].rid], reverse=True)
        lost: set[str] = {sequence.rid for sequence in self.preempted}
        at = 0
        for sequence, need in needs:
            if sequence.rid in lost:
                continue
            while need > self.free + self.coming and at < len(candidates):
                rid = candidates[at]
                if rid == sequence.rid:
                    break
                at += 1
                if rid not in lost:
                    lost.add(rid)
                    self.preempt(by_rid[rid])
            if need <= self.free:
                self.free -= need
                continue
            self.starved.append(sequence)
            if need <= self.free + self.coming:
                self.coming -= need - self.free
                self.free = 0

    def preempt(self, sequence: Sequence) -> None:
        """Lets a request give way.

        Args:
            sequence: The request.
        """
        self.preempted.append(sequence)
        blocks = self.blocks_of(sequence)
        if self.books.is_flying(sequence):
            self.coming += blocks
        else:
            self.free += blocks

    def protection(self) -> dict[str, int]:
        """Place of each running request among those that give way, from 0 for the first, by id."""
        key = self.policy
        keyed = [
            (key(sequence, admitted), sequence.rid)
            for admitted, sequence in enumerate(self.books.running.values())
        ]
        return {rid: rank for rank, (_, rid) in enumerate(sorted(keyed))}

    def blocks_of(self, sequence: Sequence) -> int:
        """How many blocks come back when a request gives way, those that others share not counted."""
        return self.books.cache.freed_by(sequence.request)
