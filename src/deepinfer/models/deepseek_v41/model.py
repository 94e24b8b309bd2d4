"""The DeepSeek-V4.1 text model in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.core.errors import InvalidRequest, RequestTooLong, ShapeError
from deepinfer.kernels.fused import fused_kernels, has_triton
from deepinfer.models.deepseek_v41.autocast import without_autocast
from deepinfer.models.deepseek_v41.batch import ForwardBatch, ForwardOutput, Segment
from deepinfer.models.deepseek_v41.cache import SlotCache
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.decode_stack import why_not_fused
from deepinfer.models.deepseek_v41.deterministic import set_deterministic
from deepinfer.models.deepseek_v41.draft import DSparkDraft
from deepinfer.models.deepseek_v41.engram import EngramHash
from deepinfer.models.deepseek_v41.few_tokens import LayerStack
from deepinfer.models.deepseek_v41.full_pass import FullPass, Truncation
from deepinfer.models.deepseek_v41.hyper_connection import collapse, initial_pre
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.rope import rope_frequencies
from deepinfer.models.deepseek_v41.rounding import Rounding, RoundingLevel
from deepinfer.models.deepseek_v41.step_pass import StepPass

__all__ = ["DeepseekV41"]


class DeepseekV41(nn.Module):
    """DeepSeek-V4.1: embedding, layers, head, and the draft under `mtp`.

    Parameter names are the published tensor names, except that the routed experts of a layer are stacked
    (`ffn.experts.w13`, `ffn.experts.w2`). Parameters are left unset for a loader, and need no gradient until
    `requires_grad_(True)`.

    Attributes:
        config: The configuration.
        rounding: "none", "cache" or "full".
        deterministic: Whether a row's bits are free of its batch; see `set_deterministic`.
    """

    deterministic = False

    def __init__(
        self,
        config: DeepseekV41Config,
        *,
        rounding: RoundingLevel = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Builds the module tree.

        Args:
            config: The configuration.
            rounding: Where values are rounded, see `Rounding`.
            device: Where parameters live; "meta" builds the tree without memory.
            dtype: Dtype of activations and of most parameters; the head, the router, the compressor, the stream
                mixing and the confidence head are fp32.
        """
        super().__init__()
        self.config = config
        self.rounding = rounding
        rules = Rounding(rounding)
        factory = {"device": device, "dtype": dtype}
        self.embed = Linear(config.hidden_size, config.vocab_size, **factory)
        self.layers = nn.ModuleList(
            Layer(config, i, rules, **factory) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **factory)
        self.head = Linear(
            config.hidden_size, config.vocab_size, device=device, dtype=torch.float32
        )
        if config.num_nextn_predict_layers:
            self.mtp = DSparkDraft(config, rules, embed=self.embed, head=self.head, **factory)
        self.engram_hash = EngramHash(config) if config.engram_layer_ids else None
        self._stack = LayerStack(self.layers)
        self._frequencies: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._can_fuse: bool | None = None
        self.requires_grad_(False)

    @property
    def draft(self) -> DSparkDraft | None:
        """The DSpark draft, or None when the configuration has no stages."""
        return getattr(self, "mtp", None)

    def set_deterministic(self, enabled: bool = True) -> DeepseekV41:
        """Turns bitwise reproducible arithmetic on or off.

        While it is on, the rows that `forward`, `compute_logits` and the draft give for a token depend on nothing
        but the tokens before it: not on the batch, its other rows, chunk sizes or slots. On one device, with one
        build of torch and one number of CPU threads.

        Args:
            enabled: Whether to turn it on.

        Returns:
            The model itself.

        Raises:
            UnsupportedHardware: The device's products of matrices depend on what shares a call with a row.
        """
        set_deterministic(self, enabled)
        self._can_fuse = None
        return self

    def row_kernels(self) -> ModuleType | None:
        """The row-wise steps that steps over a cache run, or None where the layers run their own.

        Layers run their own steps on a CPU, and with packed weights. Looked up once, and again after
        `set_deterministic`.
        """
        device = self.embed.weight.device
        if device.type != "cuda" or self.config.hc_mult != 4:
            return None
        if self._can_fuse is None:
            self._can_fuse = has_triton() and not why_not_fused(self)
        return fused_kernels(device) if self._can_fuse else None

    def set_engram_token_map(self, token_map: Sequence[int] | Tensor) -> None:
        """Sets the Engram folding of token ids, shape [vocab]; nothing happens without Engram layers.

        Raises:
            ConfigError: The map does not fit the configuration.
        """
        if self.engram_hash is not None:
            self.engram_hash.set_token_map(token_map)

    @without_autocast
    def logits(
        self,
        input_ids: Sequence[int] | Tensor,
        images: Tensor | None = None,
        *,
        truncation: Truncation | None = None,
    ) -> Tensor:
        """Next-token logits of one whole sequence, without a cache.

        Args:
            input_ids: Token ids, shape [tokens], any integer dtype.
            images: Embeddings of the positions whose id is `image_token_id`, in order, shape [image_tokens,
                hidden].
            truncation: What a prefix hit with a bounded replay, or a prompt that was narrowed, does without; rows
                before its `window_start` and `full_start` mean nothing then. None for the full computation.

        Returns:
            Logits, shape [tokens, vocab], fp32.

        Raises:
            ShapeError: Wrong rank or dtype.
            InvalidRequest: No tokens, an id outside the vocabulary, or images that do not fit the ids.
            RequestTooLong: More tokens than `max_position_embeddings`.
        """
        ids = self._check_ids(input_ids)
        if self.deterministic and self.row_kernels() is not None:
            # One pass through a cache: the kernels, and so the bits, of every cached step.
            count = ids.shape[0]
            batch = ForwardBatch(ids, (Segment(0, 0, count),), images)
            return self.compute_logits(self.forward(batch, self.new_cache(1, count, count)).hidden)
        embedded, is_image = self._embed(ids, ids, images)
        engram_rows = self._sequence_engram_rows(ids, is_image)

        def run(**options: Any) -> FullPass:
            return FullPass(
                self.config,
                len(ids),
                ids.device,
                is_image=is_image,
                engram_rows=engram_rows,
                **options,
            )

        cached: FullPass | None = None
        if truncation is not None and truncation.pool_start:
            cached = run()
            self._run_layers(embedded, cached)
        pools = None if cached is None else cached.pools
        return self.compute_logits(
            self._run_layers(embedded, run(truncation=truncation, cached_pools=pools))
        )

    def new_cache(
        self,
        num_slots: int,
        max_tokens: int,
        max_step_tokens: int = 512,
        *,
        num_blocks: int | None = None,
        block_size: int = 128,
        storage: Literal["plain", "packed"] = "plain",
        window_layers: int | None = None,
        max_rollback: int = 16,
    ) -> SlotCache:
        """Allocates a cache on the model's device, in its dtype; see `SlotCache`.

        Args:
            num_slots: Requests that can hold state at once.
            max_tokens: Tokens that one slot holds.
            max_step_tokens: Tokens that one request may run in one step.
            num_blocks: Blocks of the pools, which `apply_updates` gives to slots; None for one block a slot.
            block_size: Tokens in one block.
            storage: "plain": rows in the model's dtype. "packed": in the published byte formats.
            window_layers: Layers whose windows `save_windows` saves; None for those that a narrowed prompt needs.
            max_rollback: Tokens that `truncate` can take back.

        Raises:
            ConfigError: A size is out of range.
        """
        weight = self.embed.weight
        return SlotCache(
            self.config, num_slots, max_tokens, max_step_tokens, num_blocks=num_blocks, block_size=block_size,
            storage=storage, rounding=self.rounding, window_layers=window_layers,
            max_rollback=max_rollback, device=weight.device, dtype=weight.dtype,
        )  # fmt: skip

    @without_autocast
    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: SlotCache) -> ForwardOutput:
        """Runs the tokens of one step: prefill chunks, decode and verify rows of any mix of requests.

        Args:
            batch: The tokens and where they stand.
            cache: The cache that they read and extend.

        Returns:
            Hidden rows of all tokens that ran every layer, and features for the draft.

        Raises:
            InvalidRequest: An id outside the vocabulary, or images that do not fit the ids.
            InvariantBroken: A segment does not continue its slot.
            RequestTooLong: A segment does not fit its slot.
        """
        cache.begin(batch.segments)
        if batch.input_ids.device != self.embed.weight.device:
            moved = batch.input_ids.to(self.embed.weight.device)
            batch = dataclasses.replace(batch, input_ids=moved)
        ids = batch.input_ids
        known = torch.from_numpy(batch.host_ids) if batch.host_ids is not None else ids
        if known.device.type == "cpu":
            self._check_range(known)
        embedded, is_image = self._embed(ids, known, batch.images)
        if is_image is not None:
            for segment in batch.segments:
                cache.has_images[segment.slot] = True
        run = StepPass(
            batch,
            cache,
            self._frequencies_on(ids.device),
            is_image,
            deterministic=self.deterministic,
            kernels=self.row_kernels(),
        )
        if self.engram_hash is not None:
            run.engram_rows = self.engram_hash.rows(run.history(self.engram_hash.ngram))
        hidden = self._run_layers(embedded, run)
        cache.commit(batch.segments)
        features = None
        if run.features is not None:
            width = len(self.config.dspark_target_layer_ids) * hidden.shape[1]
            features = torch.cat(run.features, -1) if len(hidden) else hidden.new_empty(0, width)
        return ForwardOutput(hidden, features, run.kept)

    @without_autocast
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of chosen rows.

        Args:
            hidden: Collapsed streams before the final norm, shape [rows, hidden].

        Returns:
            Shape [rows, vocab], fp32.
        """
        return self.head(self.norm(hidden).float())

    def _run_layers(self, embedded: Tensor, run: FullPass | StepPass) -> Tensor:
        streams = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = initial_pre(embedded.shape[0], self.config.hc_mult, embedded.device)
        streams, pre = self._stack(streams, pre, run)
        return collapse(streams, pre, deterministic=self.deterministic)

    def _frequencies_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._frequencies:
            self._frequencies[device] = tuple(
                rope_frequencies(self.config, compressed=kind, device=device)
                for kind in (False, True)
            )
        return self._frequencies[device]

    def _embed(
        self, ids: Tensor, known: Tensor, images: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings, and where the images are; `known` holds the ids, on the host when possible."""
        embedded = F.embedding(ids, self.embed.weight)
        image_id = self.config.image_token_id
        if images is None and (image_id is None or known.device.type != "cpu"):
            return embedded, None
        count = 0 if image_id is None else int((known == image_id).sum())
        given = 0 if images is None else images.shape[0]
        if given != count:
            raise InvalidRequest(
                f"{count} positions hold the image token, but {given} image embeddings were given; "
                "give one embedding for each position.",
                field="images", value=given, limit=str(count),
            )  # fmt: skip
        if images is None or not count:
            return embedded, None
        if images.shape != (count, embedded.shape[1]):
            raise ShapeError(
                f"images has shape {tuple(images.shape)}; it must be [image_tokens, hidden] = "
                f"[{count}, {embedded.shape[1]}].",
                argument="images", expected=(count, embedded.shape[1]), found=tuple(images.shape),
            )  # fmt: skip
        is_image = ids == image_id
        embedded[is_image] = images.to(embedded)
        return embedded, is_image

    def _sequence_engram_rows(self, ids: Tensor, is_image: Tensor | None) -> dict[int, Tensor]:
        if self.engram_hash is None:
            return {}
        marked = ids if is_image is None else ids.masked_fill(is_image, -1)
        ngram = self.engram_hash.ngram
        return self.engram_hash.rows(
            F.pad(marked, (ngram - 1, 0), value=-1).unfold(0, ngram, 1).flip(-1)
        )

    def _check_ids(self, input_ids: Sequence[int] | Tensor) -> Tensor:
        try:
            ids = (
                input_ids
                if isinstance(input_ids, Tensor)
                else torch.as_tensor(input_ids, device="cpu")
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(
                f"input_ids is not a flat sequence of integers ({error}); give a list of ids or a 1-D tensor.",
                argument="input_ids", expected="[tokens], integer",
            ) from error  # fmt: skip
        if ids.dim() == 1 and ids.numel() == 0:
            raise InvalidRequest(
                "input_ids is empty; give at least one token.",
                field="input_ids",
                limit=">= 1 token",
            )
        if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ShapeError(
                f"input_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; it must be [tokens] of an integer "
                "dtype. Pass one sequence at a time.",
                argument="input_ids", expected="[tokens], integer", found=(tuple(ids.shape), ids.dtype),
            )  # fmt: skip
        limit = self.config.max_position_embeddings
        if ids.shape[0] > limit:
            raise RequestTooLong(
                f"input_ids has {ids.shape[0]} tokens; the model takes at most {limit}. Shorten the prompt.",
                limit_tokens=limit, asked_tokens=ids.shape[0],
            )  # fmt: skip
        self._check_range(ids)
        return ids.to(device=self.embed.weight.device, dtype=torch.int64)

    def _check_range(self, ids: Tensor) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                f"input_ids holds the id {bad}; ids must be from 0 to {self.config.vocab_size - 1}. "
                "Use the tokenizer of this checkpoint.",
                field="input_ids", value=bad, limit=f"0 to {self.config.vocab_size - 1}",
            )  # fmt: skip
