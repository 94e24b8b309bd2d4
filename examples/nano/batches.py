"""Training rows: windows of text, with copying tasks laid over some of them.

Recall is learned from spans of random tokens: nothing but the earlier occurrence can predict them.
Distances start short and grow, since the heads that match and copy form on short ones first.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

SHORTEST = 24
CUE = 4
"""First tokens of a copy that carry no loss: they announce which span is being repeated."""


@dataclass
class Mixture:
    """Shares of the rows: text by domain, whole-row repetitions; and of text rows with copied spans."""

    code: float = 0.66
    docs: float = 0.10
    tasks: float = 0.18
    repeat: float = 0.06
    spans: float = 0.25

    def early(self, progress: float) -> Mixture:
        """More copying at first (three times as much), the stated shares from 40 % of training on."""
        extra = 2 * max(0.0, 1 - progress / 0.4)
        return replace(
            self, repeat=self.repeat * (1 + extra), spans=min(0.9, self.spans * (1 + extra))
        )


class Batches:
    """Draws rows from token streams on the device; nothing in a draw waits for the device.

    Args:
        streams: Token ids by domain ("code", "docs", "tasks"), int32 on the device.
        context: Tokens a row.
        first_token: Lowest id used for random spans; special ids lie below.
        vocab_size: One past the highest id.
        seed: Fixes every draw.
        mixture: Shares of the kinds of rows.
    """

    def __init__(
        self,
        streams: dict[str, Tensor],
        context: int,
        first_token: int,
        vocab_size: int,
        seed: int,
        mixture: Mixture | None = None,
    ) -> None:
        self.streams, self.context = streams, context
        self.low, self.high = first_token, vocab_size
        self.mixture = mixture or Mixture()
        self.device = streams["code"].device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self._host = random.Random(seed)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform draws from [0, 1), fp32."""
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def random_tokens(self, *shape: int) -> Tensor:
        """Uniform draws from the ids of text, int64."""
        return torch.randint(
            self.low, self.high, shape, generator=self.generator, device=self.device
        )

    def log_uniform(self, low: float, high: float, size: int) -> Tensor:
        """Whole numbers from `low` to `high` whose logarithms are uniform, shape [size]."""
        return (low * (high / low) ** self.uniform(size)).long()

    def text(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows of text, shape [size, context + 1], and whether each came from the generated tasks."""
        m = self.mixture
        ends = list(accumulate((m.code, m.docs, m.tasks)))
        place = self.uniform(size, 1) * ends[-1]
        rows = torch.empty(size, self.context + 1, dtype=torch.long, device=self.device)
        offsets = torch.arange(self.context + 1, device=self.device)
        draws = self.uniform(size, 1)
        first = 0.0
        for name, end in zip(("code", "docs", "tasks"), ends, strict=True):
            if end > first:
                stream = self.streams[name]
                start = (draws * (len(stream) - self.context - 1)).long()
                rows = torch.where(place >= first, stream[start + offsets].long(), rows)
            first = end
        return rows, place[:, 0] >= ends[1]

    def draw(self, size: int, longest: int) -> tuple[Tensor, Tensor]:
        """One batch.

        Args:
            size: Rows B.
            longest: Copies lie at most this many tokens from their originals.

        Returns:
            Ids, shape [B, context + 1], and the weight of each target in the loss, shape [B, context].
        """
        x, is_task = self.text(size)
        weight = torch.ones_like(x, dtype=torch.float)
        kind = self.uniform(size)
        repeat = kind < self.mixture.repeat
        spans = ~repeat & ~is_task & (self.uniform(size) < self.mixture.spans)
        for _ in range(3):
            x, weight = self._copy_span(x, weight, spans & (self.uniform(size) < 0.7), longest)
        x, weight = self._repetition(x, weight, repeat, longest)
        return x, weight[:, 1:]

    def _copy_span(
        self, x: Tensor, weight: Tensor, on: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Puts a span of random tokens in and repeats it later."""
        size, T = x.shape[0], self.context
        length = 16 + self._host.randrange(33)
        distance = self.log_uniform(length, max(length, min(longest, T - length)), size)
        distance = distance.clamp(length, T - length)
        first = (self.uniform(size) * (T + 1 - length - distance)).long()
        steps = torch.arange(length, device=self.device)
        source, target = first[:, None] + steps, (first + distance)[:, None] + steps
        span = self.random_tokens(size, length)
        chosen = on[:, None]
        for places in (source, target):
            x = x.scatter(1, places, torch.where(chosen, span, x.gather(1, places)))
        weight = weight.scatter(1, source, torch.where(chosen, 0.0, weight.gather(1, source)))
        learned = (steps >= CUE).float().expand(size, -1)
        return x, weight.scatter(1, target, torch.where(chosen, learned, weight.gather(1, target)))

    def _repetition(
        self, x: Tensor, weight: Tensor, on: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Replaces whole rows by one random period repeated to the end."""
        size, width = x.shape
        most = max(SHORTEST + 1, min(longest, self.context // 2))
        period = self.log_uniform(SHORTEST, most, size)[:, None]
        places = torch.arange(width, device=self.device)[None]
        rows = self.random_tokens(size, width).gather(1, places % period)
        x = torch.where(on[:, None], rows, x)
        return x, torch.where(on[:, None], (places >= period + CUE).float(), weight)


def copy_distance(progress: float, context: int) -> int:
    """Longest copy distance after a share `progress` of training: 96 at first, the context at 40 %."""
    share = min(1.0, progress / 0.4)
    return round(math.exp(math.log(96) + share * (math.log(context) - math.log(96))))
