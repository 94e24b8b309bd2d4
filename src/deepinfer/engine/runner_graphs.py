"""The recordings of a runner: made, counted, dropped."""

from __future__ import annotations

from typing import Any

from deepinfer.core.plan import ROLES, RowRole, StepPlan
from deepinfer.engine.future_tokens import FutureTokens
from deepinfer.engine.graphs import DecodeGraphs

__all__ = ["VERIFY", "RecordsSteps"]

VERIFY = ROLES.index(RowRole.VERIFY)


class RecordsSteps:
    """What a runner with a model, a cache and future tokens can do about recordings of its decode steps."""

    cache: Any
    _model: Any
    _future: FutureTokens
    _drafter: Any
    _graphs: DecodeGraphs | None = None
    _seen: tuple[Any, Any, bool] = (None, None, False)  # columns looked at last, and what was found

    def make_graphs(self, *, on_demand: bool = False) -> DecodeGraphs:
        """Recordings for this runner, which it uses from now on; `warmup` records shapes before they are needed.

        Args:
            on_demand: Record other shapes when they first come; else such steps run eagerly.

        Returns:
            The recordings, empty so far.
        """
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = DecodeGraphs(
            self._model,
            self.cache,
            future=self._future.tokens,
            feed=getattr(self._drafter, "write_context", None),
            on_demand=on_demand,
        )
        return self._graphs

    def drop_graphs(self) -> None:
        """Gives the recordings up; every step runs as it is from now on."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None

    @property
    def graph_steps(self) -> int:
        """Steps whose decode rows came from a recording."""
        return 0 if self._graphs is None else self._graphs.stats.hits.total()

    def _feeds_drafter(self, plan: StepPlan) -> bool:
        """Whether the drafter learns of the decoding rows: always, but for recorded steps that verify nothing.

        A row without drafts behind one whose drafts are still open may have room for some again in the next step.
        """
        if not hasattr(self._drafter, "observe"):
            return False
        if self._graphs is None or self._graphs.feed is None:
            return True
        return self._is_open(plan)

    def _is_open(self, plan: StepPlan) -> bool:
        """Whether rows verify, or drafts of the step before are open."""
        rows, (roles, num_open, found) = plan.rows, self._seen
        if rows.roles is not roles or rows.num_open is not num_open:  # the same from step to step
            found = bool(rows.num_open.any() or (rows.roles == VERIFY).any())
            self._seen = rows.roles, rows.num_open, found
        return found
