"""The DSpark draft: a few layers that propose a block of tokens at once, and the heads that chain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.core.errors import InvariantBroken, ShapeError
from deepinfer.models.deepseek_v41.attention import Attention, sink_attention
from deepinfer.models.deepseek_v41.autocast import without_autocast
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.compressor import Compressor
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.draft_heads import ConfidenceHead, MarkovHead, chain_block
from deepinfer.models.deepseek_v41.few_tokens import LayerStack
from deepinfer.models.deepseek_v41.hyper_connection import collapse, initial_pre
from deepinfer.models.deepseek_v41.indexer import Indexer
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.rope import Rotation, rope_frequencies
from deepinfer.models.deepseek_v41.rounding import Rounding
from deepinfer.sampling import CoupledDraw

__all__ = ["ConfidenceHead", "DSparkDraft", "DraftOutput", "DraftStage", "MarkovHead"]


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """A proposed block of each request, before the tokens are chained.

    Attributes:
        base_logits: Logits without the Markov bias, shape [requests, block, vocab], fp32.
        hidden: Collapsed streams before the final norm, shape [requests, block, hidden].
    """

    base_logits: Tensor
    hidden: Tensor


class DraftStage(Layer):
    """One stage; the first also projects the target features, the last also holds the heads."""

    def __init__(
        self,
        config: DeepseekV41Config,
        stage: int,
        rounding: Rounding,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            config, config.num_hidden_layers + stage, rounding, device=device, dtype=dtype
        )
        factory = {"device": device, "dtype": dtype}
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if stage == 0:
            targets = len(config.dspark_target_layer_ids)
            self.main_proj = Linear(targets * hidden, hidden, **factory)
            self.main_norm = RMSNorm(hidden, eps, **factory)
        if stage == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, eps, **factory)
            self.markov_head = MarkovHead(config, **factory)
            self.confidence_head = ConfidenceHead(config, device=device)


class _BlockPass:
    """One block a request: queries see the context window before the anchor, and the whole block."""

    is_image = None
    features = None
    narrow_layer = None

    def __init__(
        self,
        cache: SlotCache,
        rotation: Rotation,
        slots: np.ndarray,
        anchors: np.ndarray,
        block: int,
        deterministic: bool,
    ) -> None:
        window, ring = cache.config.sliding_window, cache.ring_size
        self.engram_rows: dict[int, Tensor] = {}
        self._cache = cache
        self._rotation = rotation
        self._block = block
        self._deterministic = deterministic
        first = np.array([cache.draft_spans[slot][0] for slot in slots.tolist()])
        first = np.maximum(first, anchors - window)[:, None]
        width = window if deterministic else int((anchors[:, None] - first).max())
        wanted = anchors[:, None] - np.arange(width, 0, -1)
        valid = wanted >= first
        rows = slots[:, None] * ring + np.where(valid, wanted, first) % ring
        self._context_index = torch.from_numpy(rows).to(cache.device)
        self._bias = None
        if not valid.all():
            allowed = np.pad(valid, ((0, 0), (0, block)), constant_values=True)
            bias = np.where(allowed, np.float32(0), np.float32(-np.inf))[:, None]
            self._bias = torch.from_numpy(bias).to(cache.device)

    def rotation(self, compressed: bool) -> Rotation:
        return self._rotation

    def narrow(self) -> Tensor | None:
        return None

    def extend_pool(
        self, attention: Attention, compressor: Compressor, indexer: Indexer, y: Tensor
    ) -> None:
        raise InvariantBroken("A draft stage has no pool.")

    def select(self, attention: Attention, indexer: Indexer, bottleneck: Tensor, y: Tensor) -> None:
        raise InvariantBroken("A draft stage has no pool.")

    def attend(self, attention: Attention, queries: Tensor, kv: Tensor) -> Tensor:
        requests = self._context_index.shape[0]
        dim = kv.shape[-1]
        context = self._cache.rows.read_windows(attention.layer_id, self._context_index)
        keys = torch.cat((context, kv.view(requests, self._block, dim)), 1)
        # Every query of a block sees the same rows, so block positions act as further heads.
        out = sink_attention(
            queries.view(requests, -1, dim),
            keys,
            self._bias,
            attention.attn_sink.repeat(self._block),
            attention.softmax_scale,
            deterministic=self._deterministic,
        )
        return out.view(queries.shape)


class DSparkDraft(nn.ModuleList):
    """The draft model; its stages are the published `mtp.0`, `mtp.1`, ...

    Attributes:
        deterministic: Set by `DeepseekV41.set_deterministic`.
    """

    deterministic = False

    def __init__(
        self,
        config: DeepseekV41Config,
        rounding: Rounding,
        *,
        embed: Linear,
        head: Linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Builds the stages.

        Args:
            config: The configuration.
            rounding: Where values are rounded.
            embed: The target's embedding, shared.
            head: The target's head, shared.
            device: Where parameters live.
            dtype: Dtype of activations and of most parameters.
        """
        super().__init__(
            DraftStage(config, stage, rounding, device=device, dtype=dtype)
            for stage in range(config.num_nextn_predict_layers)
        )
        self.config = config
        self.rounding = rounding
        # A tuple, so that the shared modules are not registered, and named, twice.
        self._shared = (embed, head)
        self._stack = LayerStack(self)
        self._frequencies: dict[torch.device, Tensor] = {}

    @without_autocast
    @torch.inference_mode()
    def extend_context(
        self,
        features: Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        cache: SlotCache,
    ) -> None:
        """Gives the draft the target features of tokens that are final.

        Args:
            features: Rows of `ForwardOutput.features`, shape [tokens, targets * hidden].
            positions: Their positions, shape [tokens], rising by one within a slot.
            slots: Their slots, shape [tokens].
            cache: The cache whose draft windows are written.

        Raises:
            ShapeError: The arguments differ in length.
        """
        at, where = _host(positions), _host(slots)
        if not len(features) == len(at) == len(where):
            raise ShapeError(
                f"There are {len(features)} feature rows, {len(at)} positions and {len(where)} slots; "
                "give one position and one slot a row.",
                argument="features",
                expected=(len(at), len(where)),
                found=len(features),
            )
        # What lies behind the window, rollback included, is never read.
        reach = cache.config.sliding_window + cache.max_rollback
        ends = {slot: int(at[where == slot].max()) + 1 for slot in np.unique(where).tolist()}
        near = at >= np.array([ends[slot] - reach for slot in where.tolist()])
        if not near.all():
            at, where = at[near], where[near]
            features = features[torch.from_numpy(near).to(features.device)]
        main = self[0].main_norm(self[0].main_proj(self.rounding.activation(features)))
        x = self.rounding.activation(main)
        phases = self._rotation(at, features.device).per_token
        rows = torch.from_numpy(where * cache.ring_size + at % cache.ring_size)
        rows = rows.to(features.device)
        for stage in self:
            kv = stage.attn.window_rows(x, phases)
            cache.rows.write_windows(stage.layer_id, rows, kv)
        for slot, high in ends.items():
            low = int(at[where == slot].min())
            first, end = cache.draft_spans[slot]
            # Rows before a gap are no context of what comes after it.
            cache.draft_spans[slot] = (first if first < end and first <= low <= end else low, high)

    @without_autocast
    @torch.inference_mode()
    def propose(
        self,
        anchor_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        cache: SlotCache,
    ) -> DraftOutput:
        """Runs one block for each request; nothing is written to the cache.

        Args:
            anchor_ids: Newest sampled token of each request, shape [requests].
            positions: Its position, one behind the last features given, shape [requests].
            slots: Slot of each request, shape [requests].
            cache: The cache with the draft windows.

        Returns:
            Base logits and hidden rows; row i of a block is about the token at `position + 1 + i`.

        Raises:
            InvariantBroken: The features right before an anchor were not given.
        """
        at, where, block = _host(positions), _host(slots), self.config.dspark_block_size
        for slot, anchor in zip(where.tolist(), at.tolist(), strict=True):
            first, end = cache.draft_spans[slot]
            if end != anchor or first == end:
                raise InvariantBroken(
                    f"The draft has features of slot {slot} for positions {first} to {end - 1}, but "
                    f"the anchor is at {anchor}; call extend_context with the features of every "
                    "final token before proposing."
                )
        embed, head = self._shared
        device = embed.weight.device
        ids = torch.full((len(at), block), self.config.dspark_noise_token_id, device=device)
        ids[:, 0] = torch.as_tensor(anchor_ids, device=device)
        rotation = self._rotation((at[:, None] + np.arange(block)).reshape(-1), device)
        run = _BlockPass(cache, rotation, where, at, block, self.deterministic)
        streams = F.embedding(ids.view(-1), embed.weight).unsqueeze(1)
        streams = streams.repeat(1, self.config.hc_mult, 1)
        pre = initial_pre(streams.shape[0], self.config.hc_mult, device)
        streams, pre = self._stack(streams, pre, run)
        hidden = collapse(streams, pre, deterministic=self.deterministic)
        logits = head(self[-1].norm(hidden).float())
        return DraftOutput(logits.view(len(at), block, -1), hidden.view(len(at), block, -1))

    @without_autocast
    @torch.inference_mode()
    def draft_greedy(
        self,
        anchor_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor]:
        """Proposes a block for each request and chains it greedily.

        Args:
            anchor_ids: Newest sampled token of each request, shape [requests].
            positions: Its position, shape [requests].
            slots: Slot of each request, shape [requests].
            cache: The cache with the draft windows.

        Returns:
            Draft tokens, shape [requests, block], int64 (equal logits: the lowest id), and their
            confidences, shape [requests, block], fp32.
        """
        return self.draft_blocks(anchor_ids, positions, slots, cache)[:2]

    @without_autocast
    @torch.inference_mode()
    def draft_coupled(
        self,
        anchor_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        cache: SlotCache,
        *,
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Proposes a block for each request, each token drawn with the noise that the sampler will draw the target's with.

        Args:
            anchor_ids: Newest sampled token of each request, shape [requests].
            positions: Its position, shape [requests].
            slots: Slot of each request, shape [requests].
            cache: The cache with the draft windows.
            temperatures: Temperature of each request; 0 takes the likeliest token.
            seeds: Seed of each request.

        Returns:
            As `draft_greedy`.
        """
        draws = {"temperatures": temperatures, "seeds": seeds}
        return self.draft_blocks(anchor_ids, positions, slots, cache, **draws)[:2]

    @without_autocast
    @torch.inference_mode()
    def draft_blocks(
        self,
        anchor_ids: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        cache: SlotCache,
        *,
        temperatures: Sequence[float] = (),
        seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Proposes and chains blocks: `draft_greedy`, or `draft_coupled` with temperatures, and margins with them.

        Args:
            anchor_ids: Newest sampled token of each request, shape [requests].
            positions: Its position, shape [requests].
            slots: Slot of each request, shape [requests].
            cache: The cache with the draft windows.
            temperatures: As in `draft_coupled`; empty for the likeliest tokens.
            seeds: Seed of each request, with temperatures.

        Returns:
            Tokens and confidences, and the gap between the two highest logits of each draft, shape [requests, block],
            fp32.
        """
        draw = None
        if len(temperatures):
            draw = CoupledDraw.of(temperatures, seeds, self._shared[0].weight.device)
        out = self.propose(anchor_ids, positions, slots, cache)
        device = out.hidden.device
        anchors = torch.as_tensor(anchor_ids, device=device, dtype=torch.int64)
        at = None if draw is None else torch.as_tensor(positions, device=device, dtype=torch.int64)
        markov = self[-1].markov_head
        tokens, before, margins = chain_block(out.base_logits, anchors, markov, draw, at)
        return tokens, self.confidence(out.hidden, before), margins

    @without_autocast
    def markov_bias(self, prev_ids: Tensor) -> Tensor:
        """Bias of every next token.

        Args:
            prev_ids: Token before each position, shape [rows], int64.

        Returns:
            Shape [rows, vocab], fp32.
        """
        return self[-1].markov_head.bias(prev_ids)

    @without_autocast
    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Confidence of the draft at each position; it depends on the token before, not on the draft.

        Args:
            hidden: Collapsed streams before the final norm, shape [..., hidden].
            prev_ids: Token before each position, shape [...], int64.

        Returns:
            Probabilities, shape [...], fp32.
        """
        stage = self[-1]
        prev = stage.markov_head.embed.weight[prev_ids]
        features = torch.cat((hidden.float(), prev.float()), -1)
        return torch.sigmoid(stage.confidence_head.proj(features)).squeeze(-1)

    def _rotation(self, positions: np.ndarray, device: torch.device) -> Rotation:
        if device not in self._frequencies:
            self._frequencies[device] = rope_frequencies(
                self.config, compressed=False, device=device
            )
        return Rotation.at(self._frequencies[device], torch.from_numpy(positions).to(device))


def _host(values: Sequence[int] | Tensor) -> np.ndarray:
    return np.asarray(values.tolist() if isinstance(values, Tensor) else values, dtype=np.int64)
