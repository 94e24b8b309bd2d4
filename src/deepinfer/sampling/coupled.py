"""Draws with the noise that the sampler uses, for drafters whose drafts are to agree with what the target will draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core.errors import ShapeError
from deepinfer.sampling.rng import SeedWords, gumbel_noise

__all__ = ["CoupledDraw"]


@dataclass(frozen=True, slots=True)
class CoupledDraw:
    """Draws tokens of several requests, each with the noise of its own sampler.

    The sampler takes the highest sum of log probability and noise, the noise a function of seed, position and token id.
    A drafter that adds the same noise to its own log probabilities proposes a sample of its law that is the target's
    sample wherever both laws are close: it agrees with probability (1 - d) / (1 + d) at least, d the total variation
    between the laws, and always where they are equal. Filters (top-k, top-p, min-p) are left out: they belong to the
    target, and a draft outside of them is refused.

    Attributes:
        temperatures: Shape [rows], float64; a row at 0 takes its likeliest token.
        seeds: Seeds of the rows.

    Examples:
        >>> draw = CoupledDraw.of([0.0, 1.0], [0, 7])
        >>> draw(torch.tensor([[0.0, 3.0], [0.0, -200.0]]), torch.tensor([5, 5])).tolist()
        [1, 0]
    """

    temperatures: Tensor
    seeds: SeedWords

    @classmethod
    def of(
        cls,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> CoupledDraw:
        """Of plain numbers.

        Args:
            temperatures: One a row, from 0.
            seeds: One a row, from 0 to 2**64 - 1.
            device: Where logits will be.

        Raises:
            ShapeError: There is not one seed a temperature.
        """
        if len(temperatures) != len(seeds):
            raise ShapeError(
                f"there are {len(temperatures)} temperatures and {len(seeds)} seeds; give one of each a row.",
                argument="seeds",
                expected=(len(temperatures),),
                found=(len(seeds),),
            )
        device = torch.device(device)
        column = torch.tensor(temperatures, dtype=torch.float64).to(device, non_blocking=True)
        return cls(column, SeedWords.of(seeds, device))

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draws one token a row.

        Args:
            logits: Shape [rows, vocab], fp32.
            positions: Position of the token that is drawn, shape [rows], int64.

        Returns:
            Shape [rows], int64.
        """
        drawn = (self.temperatures > 0).unsqueeze(-1)
        scale = torch.where(drawn, self.temperatures.unsqueeze(-1), 1.0)
        scores = logits.to(torch.float64)
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / scale
        noise = gumbel_noise(
            self.seeds, positions, vocab_size=logits.shape[-1], device=logits.device
        )
        return torch.where(drawn, scores + noise, scores).max(dim=-1).indices
