"""A cached decode of the twin with all rows at the same position: its own continuations, many at once.

The inference model serves ragged batches of requests; a training set of continuations is a dense one, and
needs no index arithmetic: caches are plain tensors, and positions are plain numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .attention import Pool, Setting, attention_inputs, pool_logits, sink_softmax
from .engram import engram_inject
from .evaluate import autocast
from .indexing import Rows, compress, select_rows
from .layer import TrainLayer, finish_layer
from .streams import collapse, rms_norm
from .trunk import Trunk

CHECK_EVERY = 16
"""Steps between two looks at the clock; each look waits for the device."""


class Lockstep:
    """Caches of rows that all stand at the same position.

    Args:
        trunk: The trunk, with `sparse` on and `blend` at 1 for what inference will do.
        num_rows: Rows R.
        max_tokens: Longest row.

    Attributes:
        position: Position of the next token.
    """

    def __init__(self, trunk: Trunk, num_rows: int, max_tokens: int) -> None:
        c, device = trunk.c, trunk.embed.device
        self.trunk, self.position = trunk, 0
        self._max_rows = -(-max_tokens // c.candidate_block_size) * c.candidate_block_size
        self._num_rows = num_rows
        self._windows: dict[int, Tensor] = {}
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._waiting: dict[int, Tensor] = {}
        n = c.engram_max_ngram_size
        self._history = torch.full((num_rows, n), -1, dtype=torch.long, device=device)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Feeds one token a row, shape [R], int64; gives the normed hidden rows, shape [R, D]."""
        trunk, c, t = self.trunk, self.trunk.c, self.position
        self._history = torch.cat([ids[:, None], self._history[:, :-1]], 1)
        found = trunk.ngram_rows.of_history(self._history[:, None]) if c.engram_layer_ids else {}
        streams, pre = trunk.embed_streams(ids[:, None])
        mask = torch.empty(0, device=ids.device)
        rows = pool = candidates = None
        for layer in trunk.layers:
            w = layer.weights()
            setting = Setting(trunk.rope(layer.ratio, slice(t, t + 1)), mask, trunk.blend)
            if layer.has_engram:
                embedded = layer.engram_embed[found[layer.index]]
                streams = engram_inject(streams, embedded, layer.engram_weights(), trunk.blend, c)
            inputs = attention_inputs(streams, pre, w.input, setting, c)
            if layer.is_source:
                rows = self._extend(layer, inputs.y)
            if layer.is_index_source:
                selected, candidates = select_rows(
                    inputs, rows, candidates, layer.index_weights(), setting, c,
                    makes_candidates=layer.index == c.candidate_source_layer_id,
                )  # fmt: skip
                pool = Pool(rows.values, selected)
            o = self._attend(layer, inputs.queries, inputs.kv, pool if layer.ratio else None)
            streams, pre, _ = finish_layer(streams, inputs, o, w, setting, None, c)
        self.position += 1
        return rms_norm(collapse(streams, pre), trunk.norm)[:, 0]

    def _extend(self, layer: TrainLayer, y: Tensor) -> Rows:
        """Adds the pool row that this token completes, if it does; gives the rows so far, in whole blocks."""
        c, t, ratio = self.trunk.c, self.position, layer.ratio
        index = layer.index
        if index not in self._pools:
            shape = (self._num_rows, self._max_rows)
            self._pools[index] = (
                torch.zeros(*shape, c.head_dim, device=y.device, dtype=y.dtype),
                torch.zeros(*shape, c.index_head_dim, device=y.device, dtype=y.dtype),
            )
        values, keys = self._pools[index]
        if t % ratio == ratio - 1:
            both = torch.cat([self._waiting.pop(index), y], 1) if ratio > 1 else y
            rope = self.trunk.rope(ratio, slice(t - ratio + 1, t + 1, ratio))
            row = t // ratio
            made = compress(both, layer.compressor_weights(), rope)
            values[:, row : row + 1], keys[:, row : row + 1] = made
        else:
            self._waiting[index] = y
        visible = (t + 1) // ratio
        size = max(1, -(-visible // c.candidate_block_size)) * c.candidate_block_size
        seen = torch.full((1,), visible, device=y.device)
        return Rows(values[:, :size], keys[:, :size], seen)

    def _attend(self, layer: TrainLayer, queries: Tensor, kv: Tensor, pool: Pool | None) -> Tensor:
        """Attention of one token a row, shape [R, 1, H, d], over its window, pool and sink."""
        W, t, index = self.trunk.c.sliding_window, self.position, layer.index
        if index not in self._windows:
            shape = (self._num_rows, W, kv.shape[-1])
            self._windows[index] = torch.zeros(shape, device=kv.device, dtype=kv.dtype)
        ring = self._windows[index]
        ring[:, t % W : t % W + 1] = kv
        near = ring[:, : t + 1]
        everything = torch.ones(1, 1, near.shape[1], dtype=torch.bool, device=kv.device)
        logits = [pool_logits(queries, near, everything)]
        if pool is not None:
            logits.append(pool_logits(queries, pool.rows, pool.selected))
        weights, total = sink_softmax(logits, layer.attn_sink)
        o = (weights[0][:, 0].to(kv.dtype) @ near).float()
        if pool is not None:
            o = o + (weights[1][:, 0].to(kv.dtype) @ pool.rows).float()
        return (o / total[:, 0]).to(queries.dtype)[:, None]


@torch.no_grad()
def continue_prompts(
    trunk: Trunk,
    prompts: Tensor,
    num_tokens: int,
    temperature: Tensor,
    seed: int,
    max_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Tensor:
    """Extends equally long prompts.

    Args:
        trunk: The trunk.
        prompts: Token ids, shape [rows, prompt_tokens], int64.
        num_tokens: Tokens to generate.
        temperature: Per row, shape [rows]; 0 is greedy, ties to the lowest id.
        seed: Fixes the draws.
        max_seconds: Ends the rows early, all at the same length.
        clock: Gives seconds.

    Returns:
        Prompts with their continuations, shape [rows, length]; length is a multiple of the window.
    """
    length = prompts.shape[1]
    lockstep = Lockstep(trunk, len(prompts), length + num_tokens)
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    heat = temperature[:, None]
    sequence = list(prompts.unbind(1))
    begun = clock()
    with autocast(prompts.device):
        for t in range(length + num_tokens - 1):
            hidden = lockstep.step(sequence[t])
            if t >= length - 1:
                logits = trunk.logits(hidden)
                noise = torch.empty_like(logits).exponential_(generator=generator).log_()
                sequence.append((logits - heat * noise).argmax(-1))
            if not t % CHECK_EVERY:
                hidden[0, 0].item()
                if clock() - begun > max_seconds:
                    break
    whole = len(sequence) // trunk.c.sliding_window * trunk.c.sliding_window
    return torch.stack(sequence[:whole], 1)
