"""How much of a cached prefix is run again to rebuild the window rows before its end."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError

__all__ = ["REPLAY_MODES", "ReplayPolicy"]

REPLAY_MODES = ("bounded", "exact", "off")
"""One window, with other numbers than a full run; as many windows as layers; nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPolicy:
    """Rules for a hit that ends at position H of a prompt of N tokens, with a window of W tokens.

    "bounded" runs [H - W, H) again: every rebuilt row lacks what lies before H - W, so the numbers differ from a full
    run. "exact" starts so early that no rebuilt row that is read later lacks anything: each layer reaches W - 1
    tokens further back. Source: sliding-window bounded replay of the DeepSeek-V4.1 report.

    Attributes:
        mode: One of `REPLAY_MODES`.
        window: Width of the window in tokens; 0 for a model without windows, where every hit is exact.
        layers: Layers with windows that run for every token of a prompt.
        narrowed: Whether the other layers run for the last window of the prompt only, so that nothing of theirs
            before N - W is ever needed.
        stored_layers: Layers whose window rows a window slot keeps, or None for `layers`. Without `narrowed` a window
            slot is of use only when it keeps those of all layers.

    Raises:
        ConfigError: A value is out of range.

    Examples:
        >>> ReplayPolicy(mode="bounded", window=128, layers=20).start(1024, 4096)
        (896, True)
        >>> ReplayPolicy(mode="exact", window=128, layers=20).start(8192, 9000)
        (5651, False)
        >>> ReplayPolicy(mode="exact", window=128, layers=20).start(4096, 9000) is None
        True
    """

    mode: str = "bounded"
    window: int = 0
    layers: int = 1
    narrowed: bool = True
    stored_layers: int | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.check_choice("mode", self.mode, REPLAY_MODES, ConfigError)
        checks.check_int("window", self.window, 0, 2**31 - 1, ConfigError)
        checks.check_int("layers", self.layers, 1, 100_000, ConfigError)
        checks.check_bool("narrowed", self.narrowed, ConfigError)
        if self.stored_layers is not None:
            checks.check_int("stored_layers", self.stored_layers, 0, self.layers, ConfigError)

    @property
    def exact_tokens(self) -> int:
        """Tokens that make a replay exact."""
        return self.layers * (self.window - 1) + 1 if self.window else 0

    def start(self, hit_tokens: int, prompt_tokens: int) -> tuple[int, bool] | None:
        """Where the replay of a hit without stored window rows begins.

        Args:
            hit_tokens: H.
            prompt_tokens: N.

        Returns:
            The first position to run again and whether the numbers differ from a full run; None when the hit is not
            worth taking: it covers no more than a window, or less than twice what an exact replay costs.
        """
        if not self.window:
            return hit_tokens, False
        if self.mode == "bounded":
            return (hit_tokens - self.window, True) if hit_tokens > self.window else None
        if self.mode == "off":
            return None
        last = min(hit_tokens, prompt_tokens - self.window) if self.narrowed else hit_tokens
        start = last - self.exact_tokens
        if start <= 0 or hit_tokens < 2 * (hit_tokens - start):
            return None
        return start, False

    def restored(self, hit_tokens: int, prompt_tokens: int) -> bool | None:
        """Whether a hit with stored window rows is usable.

        Args:
            hit_tokens: H.
            prompt_tokens: N.

        Returns:
            False, since the numbers are those of a full run; None when such a hit is not allowed. Stored rows are those
            of the layers that run for every token; the others need the last window of the prompt, which must not
            reach back before H. There even one replayed window is nearer to a full run than stored rows.
        """
        if not self.window:
            return False
        if self.stored_layers is not None and self.stored_layers < self.layers:
            return None
        if not self.narrowed or prompt_tokens - hit_tokens >= self.window:
            return False
        return None
