"""Training rows: windows of text, with copying tasks laid over some of them.

Recall is learned from spans of random tokens: nothing but the earlier occurrence can predict them.
Distances start short and grow, since the heads that match and copy form on short ones first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    """Draws (ids [B,T+1], loss weights [B,T]) from token streams on the device.

    Args:
        streams: Token ids by domain ("code", "docs", "tasks"), int32 on the device.
        context: Tokens a row.
        first_token: Lowest id used for random spans; special ids lie below.
        vocab_size: One past the highest id.
        seed: Fixes every draw.
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
        self.streams, self.T = streams, context
        self.low, self.high = first_token, vocab_size
        self.mixture = mixture or Mixture()
        self.device = streams["code"].device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def random_tokens(self, *shape: int) -> Tensor:
        return torch.randint(
            self.low, self.high, shape, generator=self.generator, device=self.device
        )

    def log_uniform(self, low: float, high: Tensor | float, size: int) -> Tensor:
        return (
            low * (torch.as_tensor(high, device=self.device) / low) ** self.uniform(size)
        ).long()

    def text(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows of text and whether each came from the generated tasks."""
        m = self.mixture
        shares = torch.tensor([m.code, m.docs, m.tasks], device=self.device)
        domain = torch.multinomial(shares, size, replacement=True, generator=self.generator)
        rows = torch.empty(size, self.T + 1, dtype=torch.long, device=self.device)
        offsets = torch.arange(self.T + 1, device=self.device)
        draws = self.uniform(size, 1)
        for number, name in enumerate(("code", "docs", "tasks")):
            stream = self.streams[name]
            start = (draws * (len(stream) - self.T - 1)).long()
            rows = torch.where((domain == number)[:, None], stream[start + offsets].long(), rows)
        return rows, domain == 2

    def draw(self, size: int, longest: int) -> tuple[Tensor, Tensor]:
        """One batch; copies lie at most `longest` tokens from their originals."""
        x, is_task = self.text(size)
        weight = torch.ones_like(x, dtype=torch.float)
        kind = self.uniform(size)
        repeat = kind < self.mixture.repeat
        spans = ~repeat & ~is_task & (self.uniform(size) < self.mixture.spans)
        for _ in range(3):
            x, weight = self.copy_span(x, weight, spans & (self.uniform(size) < 0.7), longest)
        return self.repetition(x, weight, repeat, longest)

    def copy_span(
        self, x: Tensor, weight: Tensor, on: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Puts a span of random tokens in and repeats it later."""
        size, T = x.shape[0], self.T
        length = 16 + int(torch.randint(0, 33, (), generator=self.generator, device=self.device))
        distance = self.log_uniform(length, float(min(longest, T - length)), size).clamp(
            length, T - length
        )
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

    def repetition(
        self, x: Tensor, weight: Tensor, on: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Replaces whole rows by one random period repeated to the end."""
        size, width = x.shape
        period = self.log_uniform(
            SHORTEST, float(max(SHORTEST + 1, min(longest, self.T // 2))), size
        )[:, None]
        places = torch.arange(width, device=self.device)[None]
        rows = self.random_tokens(size, width).gather(1, places % period)
        x = torch.where(on[:, None], rows, x)
        weight = torch.where(on[:, None], (places >= period + CUE).float(), weight)
        return x, weight[:, 1:]


def copy_distance(progress: float, context: int) -> int:
    """Longest copy distance after a share `progress` of training: 96 at first, the context at 40 %."""
    share = min(1.0, progress / 0.4)
    return int(math.exp(math.log(96) + share * (math.log(context) - math.log(96))))
