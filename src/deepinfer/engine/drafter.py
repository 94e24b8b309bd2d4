"""Drafts from the model's own DSpark module."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.protocols import DraftBatch, DraftView
from deepinfer.core.registry import Registry
from deepinfer.engine.draft_graphs import DraftGraphs, PendingBlocks
from deepinfer.engine.part_checks import check_part, is_factory
from deepinfer.engine.parts import EngineDrafter
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.speculative.ngram import NgramDrafter

__all__ = ["DRAFTERS", "DSparkDrafter", "make_drafter"]

_MOST_DRAFTS = 2**20


class DSparkDrafter:
    """Proposes a block of tokens a row with the DSpark draft that came with the model.

    Args:
        model: A model with a draft.

    Raises:
        ConfigError: The model has none.
    """

    def __init__(self, model: Any) -> None:
        draft = getattr(model, "draft", None)
        if draft is None:
            raise ConfigError(
                f"this {type(model).__name__} has no DSpark draft; load a checkpoint that has one, or "
                "leave drafter out.",
                field="drafter",
                value="dspark",
            )
        self._model, self._draft = model, draft
        self._cache: Any = None
        self._graphs: DraftGraphs | None = None
        self._draft_length = int(model.config.dspark_block_size)

    @property
    def draft_length(self) -> int:
        """Drafts of one block."""
        return self._draft_length

    def bind(self, cache: Any) -> None:
        """Takes the cache that holds the draft's windows; a drafter serves one runner at a time.

        Args:
            cache: The runner's cache.
        """
        self._cache = cache
        self.drop_graphs()
        if isinstance(cache, SlotCache) and cache.device.type == "cuda":
            self.record()

    @property
    def write_context(self) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """Takes features within a recorded step, see `DraftStep.write_context`; None where the draft cannot."""
        return None if self._graphs is None else self._graphs.write_context

    def is_ready(self, slot: int, position: int) -> bool:
        """Whether the draft has seen the token before a position, so that it can propose there.

        Without recordings it has seen them all.

        Args:
            slot: The slot.
            position: Position of an anchor.
        """
        if self._graphs is None:
            return True
        first, end = self._cache.draft_spans[slot]
        return bool(first < end == position)

    def start_blocks(
        self,
        anchors: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        words: NDArray[np.int64] | None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64], PendingBlocks | None] | None:
        """`propose` of columns, for the rows of them that `is_ready`; nothing waits for the device.

        Args:
            anchors: Newest token of each request, shape [rows], int64.
            positions: Its position, shape [rows], int64.
            slots: Shape [rows], int64.
            words: As in `DraftGraphs.start`, of all rows, shape [3, rows], int64; None takes the likeliest tokens.

        Returns:
            Which rows are ready, shape [rows], bool, the lowest position of each whose features the draft has seen without a
            gap, shape [rows], int64, and the blocks of those that are ready, or None when none is; None when it has to be
            done row by row.
        """
        graphs = self._graphs
        if graphs is None or graphs.unsupported:
            return None
        spans = self._cache.draft_spans
        flat = itertools.chain.from_iterable([spans[slot] for slot in slots.tolist()])
        seen = np.fromiter(flat, np.int64, 2 * len(slots))
        firsts, ends = seen[::2], seen[1::2]
        ready = (firsts < ends) & (ends == positions)
        values = np.array([anchors, positions, slots, firsts])
        if not ready.all():
            values = values[:, ready]
            words = None if words is None else words[:, ready]
            if not values.shape[1]:
                return ready, firsts, None
        found = graphs.start(values, words)
        return None if found is None else (ready, firsts, found)

    def start_known(
        self,
        anchors: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        firsts: NDArray[np.int64],
        words: NDArray[np.int64] | None,
    ) -> PendingBlocks | None:
        """`start_blocks` of rows that are ready as soon as `settle` was told of the tokens before them.

        Args:
            anchors: As in `start_blocks`, shape [rows], int64.
            positions: As in `start_blocks`, shape [rows], int64.
            slots: As in `start_blocks`, shape [rows], int64.
            firsts: Lowest position of each whose features the draft has seen without a gap, shape [rows], int64.
            words: As in `start_blocks`, shape [3, rows], int64, or None.

        Returns:
            The blocks; None when they cannot be recorded.
        """
        if self._graphs is None:
            return None
        return self._graphs.start(np.array([anchors, positions, slots, firsts]), words)

    def settle(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Notes tokens that stay, of steps that fed the draft themselves.

        Args:
            slots: Their slots.
            starts: First position of each.
            ends: Position behind the last of each.
        """
        spans = self._cache.draft_spans
        for slot, low, high in zip(slots, starts, ends, strict=True):
            first, end = spans[slot]
            spans[slot] = (first if first < end and first <= low <= end else low, high)

    def record(self) -> None:
        """Proposes from recordings from now on, where the draft can; done for caches on a CUDA device."""
        with contextlib.suppress(ConfigError):
            self._graphs = DraftGraphs(self._model, self._cache)

    def drop_graphs(self) -> None:
        """Gives the recordings up; blocks run as they are from now on."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None

    def unbind(self, cache: Any) -> None:
        """Lets go of a cache.

        Args:
            cache: The cache; one that is not bound any more is ignored.
        """
        if self._cache is cache:
            self._cache = None
            self.drop_graphs()

    def observe(self, features: Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Extends the draft's context.

        Args:
            features: Target features of settled rows, shape [tokens, features].
            positions: Their positions, one a token.
            slots: Their slots, one a token.
        """
        self._draft.extend_context(features, positions, slots, self._cache)

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes the likeliest tokens, each given those before it.

        Rows with a temperature get tokens drawn with the noise that the sampler will draw theirs with, where the draft
        can: these agree with it more often.

        Args:
            view: The rows.
            max_drafts: Most drafts a row.

        Returns:
            One block a row, cut to `max_drafts`, its confidences and, where the draft tells them, its margins.
        """
        rows = view.anchor_ids, view.positions, view.slots
        draws: dict[str, Any] = {}
        if view.temperatures and hasattr(self._draft, "draft_coupled"):
            draws = {"temperatures": view.temperatures, "seeds": view.seeds}
        found: Sequence[Tensor] | None = None
        if self._graphs is not None:
            found = self._graphs.draft(*rows, **draws)
        if found is None and hasattr(self._draft, "draft_blocks"):
            found = self._draft.draft_blocks(*rows, self._cache, **draws)
        if found is None:
            found = self._draft.draft_greedy(*rows, self._cache)
        # One copy to the host: ids are exact in fp64.
        packed = torch.stack([part[:, :max_drafts].double() for part in found], 1).tolist()
        return DraftBatch(
            token_ids=tuple([tuple(map(int, parts[0])) for parts in packed]),
            confidences=tuple([tuple(parts[1]) for parts in packed]),
            margins=tuple([tuple(parts[2]) for parts in packed]) if len(found) > 2 else (),
        )


DRAFTERS: Registry[EngineDrafter] = Registry("drafter", group="deepinfer.drafters")
"""Drafters by name; a factory is called with the model."""
DRAFTERS.register("dspark", DSparkDrafter)
DRAFTERS.register("ngram", lambda model: NgramDrafter())


def make_drafter(drafter: Any, model: Any) -> EngineDrafter | None:
    """The drafter that an engine's `drafter` stands for.

    Args:
        drafter: A drafter, its registered name, something called with the model that returns one, or None.
        model: The model.

    Returns:
        The drafter, or None.

    Raises:
        ConfigError: It is none of these, or its `draft_length` is out of range.
    """
    if drafter is None:
        return None
    if isinstance(drafter, str):
        drafter = DRAFTERS.create(drafter, model)
    elif is_factory(drafter, "propose"):
        drafter = drafter(model)
    check_part("drafter", drafter, EngineDrafter)
    checks.check_int("drafter.draft_length", drafter.draft_length, 0, _MOST_DRAFTS, ConfigError)
    return drafter
