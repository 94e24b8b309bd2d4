"""The DSpark draft in steps of fixed shape: context and block as functions of device tensors alone.

Twin of `DSparkDraft.extend_context` and `draft_greedy`; which features a slot's draft has seen is kept by the caller.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.core.errors import ConfigError, InvariantBroken
from deepinfer.kernels.fused import fused_kernels
from deepinfer.models.deepseek_v41.attention import Attention, sink_attention
from deepinfer.models.deepseek_v41.autocast import without_autocast
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.decode_pass import window_index
from deepinfer.models.deepseek_v41.decode_stack import run_layers
from deepinfer.models.deepseek_v41.decode_step import why_no_fixed_shape
from deepinfer.models.deepseek_v41.draft_heads import chain_block
from deepinfer.models.deepseek_v41.hyper_connection import collapse, initial_pre
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.model import DeepseekV41
from deepinfer.models.deepseek_v41.rope import rope_frequencies, rope_phases
from deepinfer.models.deepseek_v41.row_storage import PlainRows
from deepinfer.sampling import CoupledDraw

__all__ = ["DraftStep", "num_final"]


def num_final(ids: Tensor, counts: Tensor, chosen: Tensor) -> Tensor:
    """How many tokens of each verify row are final: the first, and the drafts that equal the choices before them.

    Args:
        ids: Ids that were run, shape [rows, tokens per row], int64.
        counts: Tokens of each row, 0 for an unused one, shape [rows], int64.
        chosen: Token chosen after each, shape [rows, tokens per row], int64.

    Returns:
        Shape [rows], int64, from 1 to the row's count; 0 for an unused row.
    """
    step = torch.arange(1, ids.shape[1], device=ids.device)
    same = (chosen[:, :-1] == ids[:, 1:]) & (step < counts.unsqueeze(1))
    return same.long().cumprod(1).sum(1) + (counts > 0)


class _DraftPass:
    """One block a request: queries see the context window before the anchor, and the whole block."""

    is_image = None
    features = None
    narrow_layer = None
    packed = False

    def __init__(
        self,
        cache: SlotCache,
        kernels: ModuleType,
        phases: Tensor,
        windows: Tensor,
        block: int,
    ) -> None:
        self.kernels = kernels
        self.engram_rows: dict[int, Tensor] = {}
        self._cache = cache
        self._phases = phases
        self._index = windows.clamp_min(0)
        allowed = F.pad(windows >= 0, (0, block), value=True)
        zeros = torch.zeros(allowed.shape, dtype=torch.float32, device=windows.device)
        self._bias = zeros.masked_fill(~allowed, -torch.inf).unsqueeze(1)
        self._block = block
        self._rows: Tensor | None = None

    def phases(self, compressed: bool) -> Tensor:
        return self._phases

    def write_windows(
        self,
        attention: Attention,
        kv: Tensor,
        weight: Tensor,
        eps: float,
        phases: Tensor,
        rounding: str,
    ) -> None:
        self._rows = self.kernels.norm_rope_round(kv, weight, eps, phases, rounding=rounding)

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        raise InvariantBroken("A draft stage has no pool.")

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        raise InvariantBroken("A draft stage has no pool.")

    def attend_cached(self, attention: Attention, queries: Tensor) -> Tensor:
        if self._rows is None:
            raise InvariantBroken("The block's rows come before its attention.")
        requests, dim = self._index.shape[0], queries.shape[-1]
        context = self._cache.rows.read_windows(attention.layer_id, self._index)
        keys = torch.cat((context, self._rows.view(requests, self._block, dim)), 1)
        # Every query of a block sees the same rows, so block positions act as further heads.
        out = sink_attention(
            queries.view(requests, -1, dim), keys, self._bias,
            attention.attn_sink.repeat(self._block), attention.softmax_scale,
        )  # fmt: skip
        return out.view(queries.shape)


class DraftStep:
    """Runs the draft without a look at the host; on a GPU its calls can be recorded."""

    def __init__(
        self, model: DeepseekV41, cache: SlotCache, kernels: ModuleType | None = None
    ) -> None:
        """Binds a model with a draft, and a cache.

        Args:
            model: The model.
            cache: The cache.
            kernels: Row-wise steps; None for those of the cache's device.

        Raises:
            ConfigError: The model has no draft, or cannot run steps of fixed shape.
        """
        draft, rows = model.draft, cache.rows
        reason = why_no_fixed_shape(model, cache) if draft is not None else "there is no draft"
        if draft is None or reason or not isinstance(rows, PlainRows):
            raise ConfigError(f"No draft step of fixed shape: {reason}.")
        self._draft = draft
        self._rings = rows.rings
        self._model = model
        self._cache = cache
        self._kernels = kernels or fused_kernels(cache.device)
        self._frequencies = rope_frequencies(model.config, compressed=False, device=cache.device)

    @without_autocast
    @torch.inference_mode()
    def extend_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, counts: Tensor
    ) -> None:
        """Gives the draft the target features of tokens that are final.

        Args:
            features: Of each row's tokens side by side, shape [rows * tokens per row, targets * hidden].
            positions: Of each row's first token, shape [rows], int64.
            slots: Shape [rows], int64.
            counts: Final tokens of each row, see `num_final`, shape [rows], int64.
        """
        ring_size = self._cache.ring_size
        tokens = len(features) // len(slots)
        step = torch.arange(tokens, device=slots.device)
        at = (positions.unsqueeze(1) + step).flatten()
        index = slots.repeat_interleave(tokens) * ring_size + at % ring_size
        self.write_context(
            features, at, index.masked_fill(~(step < counts.unsqueeze(1)).flatten(), -1)
        )

    @without_autocast
    @torch.inference_mode()
    def write_context(self, features: Tensor, at: Tensor, index: Tensor) -> None:
        """Gives the draft the target features of tokens, also of drafts that may still be rejected.

        A row of a rejected draft lies behind every anchor until the position is run again, which writes it anew.

        Args:
            features: Shape [tokens, targets * hidden].
            at: Their positions, shape [tokens], int64.
            index: Their rows in the draft's rings, -1 for none, shape [tokens], int64.
        """
        draft, kernels = self._draft, self._kernels
        phases = torch.view_as_real(rope_phases(self._frequencies, at))
        norm, inputs = draft[0].main_norm, "fp8" if draft.rounding.level == "full" else "none"
        by_target = features.view(
            len(features), len(self._model.config.dspark_target_layer_ids), -1
        )
        rounded = kernels.norm_rope_round(by_target, rounding=inputs).view(features.shape)
        main = draft[0].main_proj(rounded).unsqueeze(1)
        x = kernels.norm_rope_round(main, norm.weight, norm.eps, rounding=inputs).squeeze(1)
        rounding = "fp8" if draft.rounding.level != "none" else "none"
        for stage in draft:
            norm = stage.attn.kv_norm
            kernels.norm_rope_round(
                stage.attn.wkv(x).unsqueeze(1), norm.weight, norm.eps, phases, rounding=rounding,
                out=self._rings[stage.layer_id], index=index,
            )  # fmt: skip

    @without_autocast
    @torch.inference_mode()
    def draft_greedy(
        self,
        anchor_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        first: Tensor,
        draw: CoupledDraw | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Proposes a block for each request and chains it; nothing is written to the cache.

        Args:
            anchor_ids: Newest token of each request, shape [rows], int64.
            positions: Its position, one behind the last features given, shape [rows], int64.
            slots: Shape [rows], int64.
            first: Lowest position whose features the draft has seen without a gap, shape [rows], int64.
            draw: Draws the tokens, as in `DSparkDraft.draft_coupled`; None takes the likeliest.

        Returns:
            Draft tokens, shape [rows, block], int64 (equal logits: the lowest id), their confidences and their margins
            (see `chain_block`), both of shape [rows, block], fp32.
        """
        draft, config, cache = self._draft, self._model.config, self._cache
        block, rows = config.dspark_block_size, len(anchor_ids)
        at = (positions.unsqueeze(1) + torch.arange(block, device=positions.device)).flatten()
        window = config.sliding_window
        windows = window_index(positions - 1, slots, first, window, cache.ring_size)
        phases = torch.view_as_real(rope_phases(self._frequencies, at))
        run = _DraftPass(cache, self._kernels, phases, windows, block)
        noise = anchor_ids.new_full((rows, block - 1), config.dspark_noise_token_id)
        ids = torch.cat((anchor_ids.unsqueeze(1), noise), 1).flatten()
        streams = F.embedding(ids, self._model.embed.weight).unsqueeze(1)
        streams = streams.repeat(1, config.hc_mult, 1)
        pre = initial_pre(len(ids), config.hc_mult, ids.device)
        hidden = collapse(*run_layers(draft, streams, pre, run))
        logits = self._model.head(draft[-1].norm(hidden).float()).view(rows, block, -1)
        markov = draft[-1].markov_head
        tokens, before, margins = chain_block(logits, anchor_ids, markov, draw, positions)
        return tokens, draft.confidence(hidden.view(rows, block, -1), before), margins
