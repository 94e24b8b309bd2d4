"""Drafts without a model: what followed the last tokens when they occurred before in the same text."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.core.views import DraftBatch, DraftView

__all__ = ["NgramDrafter", "lookup"]


def lookup(
    tokens: Sequence[int], num_drafts: int, *, min_n: int = 2, max_n: int = 4, window: int = 8192
) -> tuple[tuple[int, ...], int]:
    """Finds the latest earlier place that ends like the text, and proposes what stood behind it.

    Args:
        tokens: The text so far.
        num_drafts: Most tokens to propose.
        min_n: Shortest end that counts.
        max_n: Longest end that is tried first.
        window: How many of the last tokens are searched.

    Returns:
        The proposal, empty when nothing matches, and the length of the matched end, or 0. A longer end wins over a
        later place; of equal ends the latest place wins that has anything behind it.
    """
    text = list(tokens[-window:]) if len(tokens) > window else list(tokens)
    count = len(text)
    if num_drafts < 1 or count <= min_n:
        return (), 0
    last = text[-1]
    best_at, best_n = -1, 0
    # One pass from the back over the places where the last token occurred: each is matched backwards.
    for at in range(count - 2, min_n - 2, -1):
        if text[at] != last:
            continue
        n = 1
        while n < max_n and n <= at and text[at - n] == text[count - 1 - n]:
            n += 1
        if n >= min_n and n > best_n:
            best_at, best_n = at, n
            if n == max_n:
                break
    if best_at < 0:
        return (), 0
    found = text[best_at + 1 : best_at + 1 + num_drafts]
    # A match that overlaps the end repeats itself: continue with what was just proposed.
    period = count - 1 - best_at
    while len(found) < num_drafts:
        found.append(
            found[len(found) - period] if len(found) >= period else text[best_at + 1 + len(found)]
        )
    return tuple(found), best_n


class NgramDrafter:
    """Proposes by `lookup` in each request's own prompt and output; good for edits, summaries and code.

    Drafts are chosen, not drawn: a verifier takes them as one-hot. They depend on the request's own text alone, so
    neither neighbours nor steps change them.

    Args:
        draft_length: Most drafts of a row.
        min_n: Shortest matched end.
        max_n: Longest matched end.
        window: How many of the last tokens are searched.

    Raises:
        ConfigError: A number is out of range.

    Examples:
        >>> from deepinfer.core.views import DraftView
        >>> text = (5, 6, 7, 8, 9, 5, 6, 7)
        >>> view = DraftView(rids=("r",), slots=(0,), anchor_ids=(7,), positions=(7,), token_ids=(text,))
        >>> NgramDrafter(3).propose(view, 3).token_ids
        ((8, 9, 5),)
    """

    def __init__(
        self, draft_length: int = 5, *, min_n: int = 2, max_n: int = 4, window: int = 8192
    ) -> None:
        self._draft_length = checks.check_int("draft_length", draft_length, 1, 256, ConfigError)
        self.min_n = checks.check_int("min_n", min_n, 1, 64, ConfigError)
        self.max_n = checks.check_int("max_n", max_n, self.min_n, 64, ConfigError)
        self.window = checks.check_int("window", window, 2, 2**31, ConfigError)

    @property
    def draft_length(self) -> int:
        """Most drafts of a row."""
        return self._draft_length

    def propose(self, view: DraftView, max_drafts: int) -> DraftBatch:
        """Proposes for each row.

        Args:
            view: The rows, with their tokens.
            max_drafts: Most drafts a row.

        Returns:
            Drafts, empty for rows without a match.

        Raises:
            ConfigError: The view holds no tokens.
        """
        if len(view.token_ids) != len(view.slots):
            checks.fail("view.token_ids", len(view.token_ids), "one text a row", ConfigError)
        count = min(max_drafts, self._draft_length)
        rows = [
            lookup(tokens, count, min_n=self.min_n, max_n=self.max_n, window=self.window)[0]
            for tokens in view.token_ids
        ]
        return DraftBatch(token_ids=tuple(rows))
