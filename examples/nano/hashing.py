"""Engram table rows for whole batches of windows, on the device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def table_primes(c: SimpleNamespace) -> list[list[int]]:
    """Primes per Engram layer, n-gram sizes outermost: the next unused prime from the table size on."""
    used: set[int] = set()
    layers = []
    for _ in c.engram_layer_ids:
        primes = []
        for _ in range(c.engram_max_ngram_size - 1):
            candidate = c.engram_vocab_size - 1
            for _ in range(c.engram_n_heads):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        layers.append(primes)
    return layers


def table_rows(c: SimpleNamespace) -> list[int]:
    """Rows of each Engram table."""
    return [sum(primes) for primes in table_primes(c)]


def multipliers(c: SimpleNamespace, layer: int) -> np.ndarray:
    """Odd hash multipliers of a layer, one per position of the n-gram, int64."""
    bound = (2**63 - 1) // c.engram_compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * layer).integers(
        0, bound, size=c.engram_max_ngram_size, dtype=np.int64
    )
    return draws * 2 + 1


class EngramHash:
    """Maps ids [B, T] to rows [B, T, columns] of each table; positions before the row are pads."""

    def __init__(self, c: SimpleNamespace, token_map: np.ndarray, device: torch.device) -> None:
        def tensor(x: object) -> Tensor:
            return torch.as_tensor(np.asarray(x, dtype=np.int64), device=device)

        self.c = c
        self.token_map = tensor(token_map)
        self.pad = int(token_map[c.engram_pad_token_id])
        primes = table_primes(c)
        self.primes = [tensor(p).view(-1, c.engram_n_heads) for p in primes]
        self.offsets = [tensor(np.cumsum([0, *p[:-1]])).view(-1, c.engram_n_heads) for p in primes]
        self.multipliers = [tensor(multipliers(c, layer)) for layer in c.engram_layer_ids]

    def __call__(self, ids: Tensor) -> list[Tensor]:
        T = ids.shape[1]
        folded = self.token_map[ids]
        grams = [
            torch.nn.functional.pad(folded, (k, 0), value=self.pad)[:, :T]
            for k in range(self.c.engram_max_ngram_size)
        ]
        tables = []
        for primes, offsets, factors in zip(
            self.primes, self.offsets, self.multipliers, strict=True
        ):
            mixed, columns = grams[0] * factors[0], []
            for k in range(1, len(grams)):
                mixed = mixed ^ (grams[k] * factors[k])
                columns.append(mixed[..., None] % primes[k - 1] + offsets[k - 1])
            tables.append(torch.cat(columns, -1))
        return tables
