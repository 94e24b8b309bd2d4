"""Engram: hashed n-gram embeddings that are added to the residual streams through a gate.

A token's id is first folded (`engram_tokens`), then the folded n-grams that end at the token are hashed into
prime-sized tables, one table a (n-gram size, head) pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.core.errors import ConfigError
from deepinfer.kernels import batch_invariant
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.norm import Linear
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["Engram", "EngramHash"]

_SEED_STEP = 10007


class EngramHash:
    """Primes, offsets and multipliers of all Engram layers, and the token folding.

    Everything follows from the configuration, except the folding, which follows from the tokenizer. Nothing here
    is a parameter; device copies are made on first use.

    Attributes:
        layer_ids: Layers with an Engram.
        primes: Table size of each column, shape [layers, (n - 1) * heads], int64.
        offsets: First row of each column in its layer's table, same shape.
        multipliers: Odd factors of the current token and those before it, shape [layers, n], int64.
        token_map: Folded id of each token id, shape [vocab], int64; None until `set_token_map`.
    """

    def __init__(self, config: DeepseekV41Config) -> None:
        self.layer_ids = config.engram_layer_ids
        self.ngram = config.engram_max_ngram_size
        self.num_heads = config.engram_n_heads
        self._vocab_size = config.vocab_size
        self._folded_size = config.engram_compressed_vocab_size
        self._pad_token = config.engram_pad_token_id
        layers, sizes = len(self.layer_ids), self.ngram - 1
        primes = _primes_above(config.engram_vocab_size - 1, layers * sizes * self.num_heads)
        self.primes = _deal(primes, layers, sizes, self.num_heads)
        self.offsets = np.cumsum(self.primes, 1) - self.primes
        for layer, rows, found in zip(
            self.layer_ids, config.engram_num_embeddings, self.primes.sum(1), strict=True
        ):
            if rows != found:
                raise ConfigError(
                    f"engram_num_embeddings says {rows} rows for layer {layer}, but its hash primes sum to {found}; "
                    "correct engram_num_embeddings or engram_vocab_size.",
                    field="engram_num_embeddings", value=rows, limit=str(found),
                )  # fmt: skip
        half = (2**63 - 1) // self._folded_size // 2
        draws = [
            np.random.default_rng(_SEED_STEP * i).integers(0, half, self.ngram)
            for i in self.layer_ids
        ]
        self.multipliers = np.array(draws, dtype=np.int64).reshape(layers, self.ngram) * 2 + 1
        self.token_map: Tensor | None = None
        if self._folded_size == self._vocab_size:
            self.token_map = torch.arange(self._vocab_size)
        self._on_device: dict[torch.device, tuple[Tensor, ...]] = {}

    @staticmethod
    def table_rows(
        engram_layer_ids: Sequence[int],
        engram_vocab_size: int,
        engram_n_heads: int,
        engram_max_ngram_size: int = 4,
    ) -> tuple[int, ...]:
        """Rows of each layer's table, the `engram_num_embeddings` of a new configuration."""
        per_layer = (engram_max_ngram_size - 1) * engram_n_heads
        primes = _primes_above(engram_vocab_size - 1, per_layer * len(engram_layer_ids))
        return tuple(
            sum(primes[i * per_layer : (i + 1) * per_layer]) for i in range(len(engram_layer_ids))
        )

    def set_token_map(self, token_map: Sequence[int] | Tensor) -> None:
        """Sets the folding of token ids.

        Args:
            token_map: Folded id of every token id, shape [vocab], integers below
                `engram_compressed_vocab_size`.

        Raises:
            ConfigError: Wrong length or range.
        """
        table = torch.as_tensor(token_map, dtype=torch.int64, device="cpu")
        size = int(table.max()) + 1 if table.numel() else 0
        if table.shape != (self._vocab_size,) or size != self._folded_size or int(table.min()) < 0:
            raise ConfigError(
                f"The Engram token map has {tuple(table.shape)} entries and {size} folded ids; the configuration "
                f"says {self._vocab_size} and {self._folded_size}. Build it from the checkpoint's own tokenizer.",
                field="engram_token_map",
            )
        self.token_map = table
        self._on_device.clear()

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Token map, multipliers, primes, offsets on `device`, and the folded padding id.

        Raises:
            ConfigError: No token map was set.
        """
        if self.token_map is None:
            raise ConfigError(
                "The model has Engram layers but no token map; call model.set_engram_token_map(...) with the map "
                "stored beside the checkpoint, or built from its tokenizer by build_token_map.",
                field="engram_token_map",
            )
        if device not in self._on_device:
            arrays = (self.multipliers, self.primes, self.offsets)
            self._on_device[device] = tuple(
                t.to(device)
                for t in (
                    self.token_map,
                    *(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays),
                )
            )
        return (*self._on_device[device], int(self.token_map[self._pad_token]))

    def rows(self, history: Tensor) -> dict[int, Tensor]:
        """Table rows of n-grams.

        Args:
            history: Id of each token and of those before it, newest first, shape [tokens, n], int64; negative
                before the start and on images. From the newest negative one on, all older ones count as padding.

        Returns:
            Rows by layer id, each of shape [tokens, (n - 1) * heads], int64; column order is n-gram size, then
            head.
        """
        token_map, multipliers, primes, offsets, pad = self.tables(history.device)
        broken = (history < 0).cummax(-1).values
        ids = token_map[history.clamp_min(0)].masked_fill(broken, pad)
        mixed = ids.unsqueeze(0) * multipliers.unsqueeze(1)
        hashes, running = [], mixed[..., 0]
        for n in range(1, self.ngram):
            running = running ^ mixed[..., n]
            hashes.append(running)
        hashes = torch.stack(hashes, -1).repeat_interleave(self.num_heads, -1)
        rows = hashes % primes.unsqueeze(1) + offsets.unsqueeze(1)
        return dict(zip(self.layer_ids, rows, strict=True))


class Engram(nn.Module):
    """One layer's Engram.

    Attributes:
        embed: Table, weight [rows, engram_head_dim].
        wkv: Keys of every stream, then the value, weight [(streams + 1) * hidden, engram_width].
        q_weight: Gains of the streams in the gate, shape [streams, hidden], fp32.
        k_weight: Gains of the keys in the gate, shape [streams, hidden], fp32.
        deterministic: Whether a token's bits must be free of the other tokens.
    """

    deterministic = False

    def __init__(
        self,
        config: DeepseekV41Config,
        rounding: Rounding,
        num_rows: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        streams, hidden = config.hc_mult, config.hidden_size
        self.num_streams = streams
        self.eps = config.rms_norm_eps
        self.rounding = rounding
        self.embed = Linear(config.engram_head_dim, num_rows, device=device, dtype=dtype)
        self.wkv = Linear(config.engram_width, (streams + 1) * hidden, device=device, dtype=dtype)
        self.q_weight = nn.Parameter(
            torch.ones(streams, hidden, device=device, dtype=torch.float32)
        )
        self.k_weight = nn.Parameter(
            torch.ones(streams, hidden, device=device, dtype=torch.float32)
        )

    def forward(self, streams: Tensor, rows: Tensor, is_image: Tensor | None = None) -> Tensor:
        """Adds the gated n-gram value to every stream.

        Args:
            streams: Residual streams, shape [tokens, streams, hidden].
            rows: Table rows, shape [tokens, (n - 1) * heads], int64.
            is_image: True for image tokens, which get nothing, shape [tokens]; None when there is none.

        Returns:
            The new streams, same shape and dtype.
        """
        found = F.embedding(rows, self.embed.weight).flatten(-2).to(streams.dtype)
        projected = self.wkv(self.rounding.activation(found))
        kv = projected.float().unflatten(-1, (self.num_streams + 1, -1))
        key, value = kv[:, :-1], kv[:, -1:]
        wide = streams.float()
        weighted = wide * (self.q_weight.float() * self.k_weight.float()) * key
        if self.deterministic:
            key_square, square = map(batch_invariant.mean_square, (key, wide))
            square, key_square = square.squeeze(-1), key_square.squeeze(-1)
            dot, sigmoid = batch_invariant.row_sum(weighted).squeeze(-1), batch_invariant.sigmoid
        else:
            square, key_square = wide.square().mean(-1), key.square().mean(-1)
            dot, sigmoid = weighted.sum(-1), torch.sigmoid
        scale = (square + self.eps) * (key_square + self.eps)
        dot = dot * torch.rsqrt(scale * wide.shape[-1])
        gate = sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
        if is_image is not None:
            gate = gate.masked_fill(is_image.unsqueeze(-1), 0.0)
        return (wide + gate.unsqueeze(-1) * value).to(streams.dtype)


def _primes_above(start: int, count: int) -> list[int]:
    """The first `count` primes above `start`, by a sieve over small divisors."""
    primes: list[int] = []
    candidate = start
    while len(primes) < count:
        candidate += 1
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
    return primes


def _deal(primes: list[int], layers: int, sizes: int, heads: int) -> np.ndarray:
    """Primes in the published walk: layer by layer, n-gram size by n-gram size, head by head."""
    return np.array(primes, dtype=np.int64).reshape(layers, sizes * heads)
