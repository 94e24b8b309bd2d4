"""Steps in which every row decodes or verifies, as columns: what drafting costs then hardly depends on the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.core.params import SamplingParams
from deepinfer.core.plan import ROLES, PlanRows, RowRole
from deepinfer.core.protocols import SampleRows
from deepinfer.core.types import Request
from deepinfer.engine.decode_lane import Company, DecodeLanes
from deepinfer.engine.draft_graphs import PendingBlocks
from deepinfer.engine.graph_steps import StepColumns
from deepinfer.engine.layout import Layout
from deepinfer.engine.sample_batch import RowsOfLogits
from deepinfer.engine.step_state import RunningRow

__all__ = ["BlockConfidences", "BlocksAhead", "Shared", "VerifyLane", "VerifyLanes"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_DECODE = ROLES.index(RowRole.DECODE)


class BlockConfidences(Mapping[int, tuple[float, ...]]):
    """Confidences of drafts by row of the plan, made when somebody looks.

    Args:
        values: Shape [rows, block], float64.
        lengths: How many of them each row has, shape [rows], int64; a row without any is left out.
    """

    __slots__ = ("_made", "_values", "lengths")

    def __init__(self, values: Floats, lengths: Ints) -> None:
        self._values, self.lengths = values, lengths
        self._made: dict[int, tuple[float, ...]] | None = None

    def _all(self) -> dict[int, tuple[float, ...]]:
        if self._made is None:
            rows = zip(self._values.tolist(), self.lengths.tolist(), strict=True)
            self._made = {at: tuple(row[:n]) for at, (row, n) in enumerate(rows) if n}
        return self._made

    def __getitem__(self, row: int) -> tuple[float, ...]:
        """Confidences of one row."""
        return self._all()[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.lengths))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._all(),)


@dataclass(slots=True)
class VerifyLane:
    """All rows of a step, each of which runs the newest token of one request, and drafts behind it.

    Attributes:
        company: What these rows share with those of other steps.
        shared: What follows from the company.
        rows: The rows of the plan.
        starts: Their true first positions, shape [rows], int64.
        anchors: Newest token of each request, shape [rows], int64.
        lengths: Drafts that are run, shape [rows], int64.
        drafts: Drafts that were proposed, shape [rows, block], int64; block is 0 before there are any.
        confidences: Their confidences, shape [rows, block], float64.
        margins: Their margins, shape [rows, block], float64.
        known: Drafts of each block that can be chosen, and so have a confidence, shape [rows], int64.
        pending: The blocks while only the device knows them, all of them whole; drafts, confidences and margins are
            filled in later.
        known_s: When the host knew the blocks, in seconds of `time.perf_counter`; 0 when it did not wait for them.
        firsts: Lowest position whose features the draft has seen without a gap, of each row, shape [rows], int64; None when
            not all rows drafted.
        is_taught: Whether the policy that chose the lengths wants to know how the drafts fared.
        layout: Where tokens and logits lie, once the lengths are known.
        tokens: Chosen tokens that are kept, one row behind the other, once they are known, shape [tokens], int64.
        used: How many each row has of them, shape [rows], int64.
        last: The last of them of each row, 0 for one that failed, shape [rows], int64.
    """

    company: Company
    shared: Shared
    rows: PlanRows
    starts: Ints
    anchors: Ints
    lengths: Ints
    drafts: Ints
    confidences: Floats
    margins: Floats
    known: Ints
    pending: PendingBlocks | None = None
    known_s: float = 0.0
    firsts: Ints | None = None
    is_taught: bool = False
    layout: Layout | None = None
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    used: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    last: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return 0 if self.layout is None else self.layout.total

    def lay_out(self) -> Layout:
        """Fixes the lengths; tells where everything lies."""
        self.layout = self.shared.layout(self.lengths + 1)
        return self.layout

    def input_ids(self) -> Ints:
        """Ids of all tokens, shape [tokens], int64."""
        layout, width = self.lay_out() if self.layout is None else self.layout, self.drafts.shape[1]
        ids = np.empty((len(self.starts), width + 1), np.int64)
        ids[:, 0] = self.anchors
        ids[:, 1:] = self.drafts
        if layout.total == ids.size:
            return ids.reshape(-1)
        return ids[layout.owner, layout.step]

    def columns(self) -> StepColumns:
        """The rows as recordings take them."""
        rows, company = self.rows, self.company
        return StepColumns(
            company.slots, company.host_slots, self.starts, rows.window_starts, rows.pool_starts,
            rows.full_starts, self.lengths + 1,
        )  # fmt: skip

    def sample_rows(self) -> SampleRows:
        """What the sampler needs to know of the rows of logits."""
        layout = self.lay_out() if self.layout is None else self.layout
        requests, seeds, outputs = self.shared.repeated(layout)
        positions = self.starts[layout.owner] + layout.step + 1
        return SampleRows(
            requests=requests,
            positions=tuple(positions.tolist()),
            seeds=seeds,
            output_token_ids=outputs,
            plan_rows=RowsOfLogits(self.rows, layout.owner),  # type: ignore[arg-type]
        )

    def running_rows(self) -> list[RunningRow]:
        """The same rows one by one, for steps that have to be run that way."""
        drafts, confidences, margins = [
            part.tolist() for part in (self.drafts, self.confidences, self.margins)
        ]
        known, lengths = self.known.tolist(), self.lengths.tolist()
        out = []
        for at, (row, start) in enumerate(zip(self.rows, self.starts.tolist(), strict=True)):
            draft = tuple(drafts[at][: lengths[at]])
            running = RunningRow(
                at, row, self.company.states[at], start, row.token_ids, draft, num_tokens=1 + len(draft)
            )  # fmt: skip
            if known[at]:
                running.confidences = tuple(confidences[at][: known[at]])
                running.margins = tuple(margins[at])
            out.append(running)
        return out


@dataclass(frozen=True, slots=True)
class BlocksAhead:
    """Blocks that were started before the step that they are for was looked at.

    Attributes:
        company: Whose they are.
        starts: Positions of the anchors, shape [rows], int64.
        anchors: The anchors, shape [rows], int64.
        firsts: As in `VerifyLane`.
        pending: The blocks.
    """

    company: Company
    starts: Ints
    anchors: Ints
    firsts: Ints
    pending: PendingBlocks

    def of(self, lane: VerifyLane) -> PendingBlocks | None:
        """The blocks, if they are those of a lane."""
        same = self.company is lane.company and np.array_equal(self.starts, lane.starts)
        return self.pending if same and np.array_equal(self.anchors, lane.anchors) else None


class Shared:
    """What follows from a company for steps that verify, made once.

    Args:
        company: The company.
        may_draft: Which requests feed the drafter.

    Attributes:
        company: As given.
        is_plain: Whether rows need nothing but their logits, seed and position: no penalties and no grammar.
        seed_words: Low and high words of seeds, and the bits of temperatures, shape [3, rows], int64; None when all are
            greedy.
        temperatures: One a row; empty when all are greedy.
        feeds: Which rows feed the drafter, shape [rows], bool; None for all.
    """

    def __init__(self, company: Company, may_draft: Callable[[SamplingParams], bool]) -> None:
        self.company = company
        params = [request.params for request in company.requests]
        has_grammar = any(request.grammar is not None for request in company.requests)
        self.is_plain = not (company.with_outputs or has_grammar)
        self.seed_words: Ints | None = None
        self.temperatures: tuple[float, ...] = ()
        if any(not one.is_greedy for one in params):
            self.temperatures = tuple([one.temperature for one in params])
            seeds = np.array(company.seeds, np.uint64)
            columns = [seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)]
            columns.append(np.array(self.temperatures, np.float64).view(np.uint64))
            self.seed_words = np.array(columns).view(np.int64)
        feeds = np.array([bool(may_draft(one)) for one in params])
        self.feeds = None if feeds.all() else feeds
        self._layouts: dict[int, Layout] = {}
        self._repeated: dict[int, tuple[Any, Any, Any]] = {}

    def layout(self, counts: Ints) -> Layout:
        """The layout of rows, an old one where it is the same."""
        first = int(counts[0])
        old = self._layouts.get(first)
        if old is not None and np.array_equal(old.counts, counts):
            return old
        made = Layout.of(counts)
        if made.is_even:
            self._layouts[first] = made
        return made

    def repeated(
        self, layout: Layout
    ) -> tuple[tuple[Request, ...], tuple[int, ...], tuple[Any, ...]]:
        """Request, seed and empty output of each token; the same objects for an even layout."""
        first = int(layout.counts[0])
        if layout.is_even and first in self._repeated:
            return self._repeated[first]
        counts = layout.counts.tolist()
        company, chain, repeat = self.company, itertools.chain.from_iterable, itertools.repeat
        requests = tuple(chain(map(repeat, company.requests, counts)))
        seeds = tuple(chain(map(repeat, company.seeds, counts)))
        found = requests, seeds, ((),) * layout.total
        if layout.is_even:
            self._repeated[first] = found
        return found


class VerifyLanes:
    """Finds steps in which every row decodes or verifies.

    Args:
        lanes: Knows the companies.
        may_draft: Which requests feed the drafter.
    """

    def __init__(self, lanes: DecodeLanes, may_draft: Callable[[SamplingParams], bool]) -> None:
        self._lanes = lanes
        self._may_draft = may_draft
        self._shared: Shared | None = None

    def enter(self, rows: PlanRows, requests: Mapping[str, Request]) -> VerifyLane | None:
        """Takes all rows of a plan; the results of the step before are known.

        Args:
            rows: The rows.
            requests: Their requests by id.

        Returns:
            The rows; None when one of them does something else, needs more than its logits to be sampled, or does not
            continue what its slot holds, which is for others to find out about.
        """
        plain = (rows.roles >= _DECODE) & (rows.num_tokens - rows.num_drafts == 1)
        if not plain.all():
            return None
        company = self._lanes.company(rows, requests)
        if company is None:
            return None
        shared = self._shared
        if shared is None or shared.company is not company:
            self._shared = shared = Shared(company, self._may_draft)
        if not shared.is_plain:
            return None
        lists = company.token_ids
        starts = np.fromiter(map(len, lists), np.int64, len(lists)) - 1
        anchors = np.fromiter([ids[-1] for ids in lists], np.int64, len(lists))
        upper = rows.first_positions
        if bool(((starts > upper) | (starts < upper - rows.num_open)).any()):
            return None
        given = rows.token_ids
        if len(given):
            is_known = rows.num_known > 0
            if int(rows.num_known.max()) > 1 or not np.array_equal(anchors[is_known], given):
                return None
        count = len(lists)
        nothing: Any = np.zeros((count, 0))
        zeros = np.zeros(count, np.int64)
        return VerifyLane(
            company, shared, rows, starts, anchors, zeros, np.zeros((count, 0), np.int64), nothing, nothing, zeros
        )  # fmt: skip

    def clear(self) -> None:
        """Forgets what was seen."""
        self._shared = None
