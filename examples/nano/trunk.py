"""The differentiable twin of `deepinfer.models.deepseek_v41`: dense masks instead of gathers.

Every weight is held in fp32 and rounded straight-through to the format it will be stored in; the
caches' rounding is simulated as well. Shapes: B rows, T tokens, M streams, D hidden, N pool rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepinfer.models.deepseek_v41.config import DeepseekV41Config

from .attention import AttentionInputs, Pool, Setting, window_mask
from .compiling import EAGER, Parts
from .indexing import Rows, compress, visible_rows
from .layer import TrainLayer, ones, random_weight
from .rope import Rope, rope_table
from .streams import collapse, initial_pre, rms_norm


@dataclass
class Clamp:
    """Simulated bounded replay: rows at or after a start see no window key before it. [B] each."""

    encoder: Tensor | None = None
    decoder: Tensor | None = None


@dataclass
class TrunkOutput:
    """What a forward gives.

    Attributes:
        hidden: Normed hidden rows, shape [B, T, D].
        features: Mean streams that entered the draft's target layers, shape [B, T, targets * D], or None.
        index_loss: Mean over the index sources, a scalar, or None.
        loads: Tokens of each routed expert, one tensor [E] a layer.
    """

    hidden: Tensor
    features: Tensor | None = None
    index_loss: Tensor | None = None
    loads: list[Tensor] = field(default_factory=list)


class Trunk(nn.Module):
    """The trainable model.

    Args:
        c: The configuration.
        ngram_rows: Engram table rows by layer of ids [B, T]; None only where nothing is run.
        context: Longest row, in tokens.

    Attributes:
        blend: Scalar: moves the weights to their stored formats.
        sparse: Whether top-k selection is on; before, every visible pool row is attended to.
        dropout: Share of sublayer outputs that are dropped in training mode.
        parts: The costly functions, for rows of the shape `compiled_shape`; others run eagerly.
        compiled_shape: The one shape [B, T] that `parts` are used for.
        graphs_need_grad: Whether those graphs were made in training, so that a forward without
            gradient reuses them by running as if there were one.
    """

    def __init__(
        self,
        c: DeepseekV41Config,
        ngram_rows: Callable[[Tensor], dict[int, Tensor]] | None,
        context: int,
    ) -> None:
        super().__init__()
        self.c, self.ngram_rows = c, ngram_rows
        self.embed = random_weight(c.vocab_size, c.hidden_size, std=0.5)
        self.head = random_weight(c.vocab_size, c.hidden_size, std=0.02)
        self.norm = ones(c.hidden_size)
        self.layers = nn.ModuleList(TrainLayer(i, c) for i in range(c.num_hidden_layers))
        self.sparse, self.dropout = False, 0.0
        self.parts, self.compiled_shape = EAGER, None
        self.graphs_need_grad = False
        self.register_buffer("blend", torch.zeros(()))
        for name, compressed in (("plain", False), ("yarn", True)):
            table = rope_table(c, context + 16, compressed=compressed)
            self.register_buffer(f"cos_{name}", table.cos, persistent=False)
            self.register_buffer(f"sin_{name}", table.sin, persistent=False)

    def rope(self, ratio: int, at: slice) -> Rope:
        """Rotations of a range of positions for a layer of this ratio."""
        if ratio:
            return Rope(self.cos_yarn[at], self.sin_yarn[at])
        return Rope(self.cos_plain[at], self.sin_plain[at])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], fp32, of normed hidden rows [..., D]."""
        return F.linear(hidden, self.head).float()

    def embed_streams(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [B, T, M, D] and the first `pre` of ids [B, T]."""
        bf16 = torch.is_autocast_enabled(ids.device.type)
        x = self.embed[ids].to(torch.bfloat16 if bf16 else torch.float32)
        pre = initial_pre(tuple(ids.shape), self.c, ids.device)
        return x.unsqueeze(2).repeat(1, 1, self.c.hc_mult, 1), pre

    def forward(
        self,
        ids: Tensor,
        clamp: Clamp | None = None,
        index_chunk: int | None = None,
        features: bool = False,
    ) -> TrunkOutput:
        """Runs whole rows.

        Args:
            ids: Token ids, shape [B, T]; T is a multiple of the window.
            clamp: Simulated bounded replay, or None.
            index_chunk: 0 to 3: asks for the index loss on that quarter of the chunks.
            features: Whether to give features.
        """
        c, clamp = self.c, clamp or Clamp()
        T, W, device = ids.shape[1], c.sliding_window, ids.device
        parts = self.parts if tuple(ids.shape) == self.compiled_shape else EAGER
        masks = self._window_masks(ids, clamp)
        ropes = [self.rope(kind, slice(T)) for kind in (0, 1)]
        streams, pre = self.embed_streams(ids)
        pre.requires_grad_(torch.is_grad_enabled())
        engram_rows = self.ngram_rows(ids) if c.engram_layer_ids else {}
        chunk_ids = None
        if index_chunk is not None:
            chunk_ids = torch.arange(index_chunk, T // W, 4, device=device)
        pools = PoolState(self, parts, chunk_ids)
        out = TrunkOutput(streams)
        taps = []
        for layer in self.layers:
            w = layer.weights()
            in_decoder = layer.index > c.kv_source_layer_ids[-1]
            setting = Setting(ropes[layer.ratio > 0], masks[in_decoder], self.blend)
            if layer.has_engram:
                found = F.embedding(engram_rows[layer.index], layer.engram_embed)
                streams = parts.engram(streams, found, layer.engram_weights(), self.blend, c)
            if features and layer.index in c.dspark_target_layer_ids:
                taps.append(streams.float().mean(2).to(streams.dtype))
            inputs = parts.inputs(streams, pre, w.input, setting, c)
            pools.update(layer, inputs, setting)
            keep = self._keep(ids, streams.dtype)
            pool = pools.pool if layer.ratio else None
            streams, pre, load = parts.rest(streams, inputs, pool, w, setting, keep, c)
            out.loads.append(load)
        out.hidden = rms_norm(collapse(streams, pre), self.norm)
        out.features = torch.cat(taps, -1) if features else None
        out.index_loss = sum(pools.losses) / len(pools.losses) if pools.losses else None
        return out

    def use_parts(self, parts: Parts, shape: tuple[int, int] | None, *, need_grad: bool) -> None:
        """Uses compiled parts for rows of one shape [B, T].

        Args:
            parts: The costly functions.
            shape: Batch and row length, or None for no shape.
            need_grad: Whether they are compiled in training, for a backward pass too.
        """
        self.parts, self.compiled_shape, self.graphs_need_grad = parts, shape, need_grad

    def frozen(self, ids: Tensor, features: bool = False) -> TrunkOutput:
        """A forward whose results carry no gradient, in evaluation mode; arguments as in `forward`."""
        training = self.training
        self.eval()
        compiled = tuple(ids.shape) == self.compiled_shape
        with torch.set_grad_enabled(compiled and self.graphs_need_grad):
            out = self(ids, features=features)
        self.train(training)
        tapped = None if out.features is None else out.features.detach()
        return TrunkOutput(out.hidden.detach(), tapped, None, out.loads)

    def _window_masks(self, ids: Tensor, clamp: Clamp) -> tuple[Tensor, Tensor]:
        """Masks of the layers up to the last KV source, and of those behind it."""
        (B, T), W = ids.shape, self.c.sliding_window
        encoder = window_mask(T, W, clamp.encoder, ids.device).expand(B, -1, -1, -1).contiguous()
        if clamp.decoder is None:
            return encoder, encoder
        return encoder, encoder & window_mask(T, W, clamp.decoder, ids.device)

    def _keep(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Dropout factors; ones where graphs were compiled with dropout, None where there is none."""
        shape = (2, *ids.shape, self.c.hidden_size)
        if not self.dropout or not torch.is_grad_enabled():
            return None
        if not self.training:
            return torch.ones(shape, device=ids.device, dtype=dtype)
        keep = torch.empty(shape, device=ids.device, dtype=dtype)
        return keep.bernoulli_(1 - self.dropout).div_(1 - self.dropout)


class PoolState:
    """The newest pool and selection while a forward goes through the layers.

    Attributes:
        pool: What the layers with a pool attend to.
        losses: Index losses so far.
    """

    def __init__(self, trunk: Trunk, parts: Parts, chunk_ids: Tensor | None) -> None:
        self.trunk, self.parts, self.chunk_ids = trunk, parts, chunk_ids
        self.pool: Pool | None = None
        self.losses: list[Tensor] = []
        self._rows: Rows | None = None
        self._candidates: Tensor | None = None

    def update(self, layer: TrainLayer, inputs: AttentionInputs, setting: Setting) -> None:
        """Makes the pool of a KV source, and selects rows at an index source."""
        if layer.is_source:
            T = inputs.y.shape[1]
            rope = self.trunk.rope(layer.ratio, slice(0, T, layer.ratio))
            seen = (torch.arange(T, device=inputs.y.device) + 1) // layer.ratio
            self._rows = Rows(*compress(inputs.y, layer.compressor_weights(), rope), seen)
        if not layer.is_index_source:
            return
        trunk, w, rows = self.trunk, layer.index_weights(), self._rows
        # the loss first: autocast keeps a weight cast made without gradient
        if self.chunk_ids is not None:
            arguments = (inputs, rows, layer.attn_sink, self.chunk_ids, w, setting, trunk.c)
            self.losses.append(self.parts.index_loss(*arguments))
        if trunk.sparse:
            makes_candidates = layer.index == trunk.c.candidate_source_layer_id
            with torch.no_grad():
                selected, self._candidates = self.parts.select(
                    inputs, rows, self._candidates, w, setting, trunk.c,
                    makes_candidates=makes_candidates,
                )  # fmt: skip
        else:
            B, N = rows.values.shape[:2]
            selected = visible_rows(rows.num_visible, N).expand(B, -1, -1).contiguous()
        self.pool = Pool(rows.values, selected)
