"""A draft for any causal language model that shows its hidden states.

The draft reads hidden states of the target at positions that are settled, and proposes a block of tokens in one pass:
the anchor, which is the newest token, and masks behind it, each of which predicts the token that follows it. A
sequential head then chains the tokens. Embedding and output head are the target's own.

Source: DSpark paper (arXiv 2607.05147), section 3.1; deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepinfer.core.errors import CheckpointMismatch, CheckpointMissing
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.draft_config import DraftConfig
from deepinfer.speculative.heads import ConfidenceHead, make_sequential_head

__all__ = ["DraftModule", "TargetEnds"]

CONFIG_FILE, WEIGHTS_FILE = "draft_config.json", "draft.safetensors"
KeyValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a draft borrows from its target, which keeps owning it.

    Attributes:
        embed: Token ids to embeddings, shape [...] to [..., hidden]; the target's embedding module.
        lm_head: Hidden rows to logits, shape [..., hidden] to [..., vocab]; the target's output head.
    """

    embed: Callable[[Tensor], Tensor]
    lm_head: Callable[[Tensor], Tensor]


class _Attention(nn.Module):
    """Attention whose keys and values come from the context and from the block, by the same projections."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def key_values(self, rows: Tensor, phases: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, each shape [batch, kv heads, tokens, head dim]."""
        batch, tokens, _ = rows.shape
        both = self.kv_proj(rows).view(batch, tokens, 2 * self.kv_heads, self.head_dim)
        keys, values = both.transpose(1, 2).split(self.kv_heads, 1)
        return _rotate(self.k_norm(keys), phases), values

    def forward(
        self,
        rows: Tensor,
        phases: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        allowed: Tensor | None,
    ) -> Tensor:
        batch, tokens, _ = rows.shape
        queries = self.q_proj(rows).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        keys, values = self.key_values(rows, phases)
        found = F.scaled_dot_product_attention(
            _rotate(self.q_norm(queries), phases),
            torch.cat([context[0], keys], 2),
            torch.cat([context[1], values], 2),
            attn_mask=allowed,
            enable_gqa=self.heads != self.kv_heads,
        )
        out: Tensor = self.o_proj(found.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.attention = _Attention(config)
        self.mlp_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(
        self,
        rows: Tensor,
        phases: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        allowed: Tensor | None,
    ) -> Tensor:
        rows = rows + self.attention(self.attention_norm(rows), phases, context, allowed)
        gate, up = self.gate_up_proj(self.mlp_norm(rows)).chunk(2, -1)
        out: Tensor = rows + self.down_proj(F.silu(gate) * up)
        return out


class DraftModule(nn.Module):
    """A parallel draft with a sequential head and a confidence head.

    Within a block attention goes both ways; of the target's hidden states a block sees those strictly before its
    anchor, whose own do not exist yet when the draft runs. Parameters are fp32 unless moved; the target's embedding and
    head are not among them.

    Args:
        config: Its shape.

    Examples:
        >>> config = DraftConfig(vocab_size=10, hidden_size=8, taps=(0,), num_layers=1, num_heads=2, num_kv_heads=1,
        ...     head_dim=4, intermediate_size=8, block_size=3, rank=2)
        >>> ends = TargetEnds(nn.Embedding(10, 8), nn.Linear(8, 10))
        >>> draft = DraftModule(config)
        >>> context = draft.context_rows(torch.zeros(1, 6, 8), torch.arange(6)[None])
        >>> draft.block_hidden(torch.tensor([[4]]), torch.tensor([[6]]), context, ends).shape
        torch.Size([1, 1, 3, 8])
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.combiner = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.combiner_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.head = make_sequential_head(
            config.head, config.vocab_size, config.rank, hidden_size=hidden
        )
        # A correction starts at nothing; a random one would have to be unlearned first.
        nn.init.zeros_(self.head.output.weight)
        self.confidence: ConfidenceHead | None = None
        if config.confidence:
            width = config.rank if config.confidence_with_token else 0
            self.confidence = ConfidenceHead(hidden, width, bias=config.confidence_bias)
        self.mask_embedding: nn.Parameter | None = None
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.randn(hidden) * hidden**-0.5)

    def context_rows(self, features: Tensor, positions: Tensor) -> KeyValues:
        """Keys and values of settled positions, for every layer.

        Args:
            features: Tapped hidden states of the target, one tap behind the other, shape [batch, tokens, taps * hidden].
            positions: Their positions, shape [batch, tokens], int64.

        Returns:
            Keys and values of each layer, each of shape [batch, kv heads, tokens, head dim].

        Raises:
            ShapeError: The features have another width.
        """
        width = self.combiner.in_features
        if features.ndim != 3 or features.shape[-1] != width:
            expected = f"[batch, tokens, taps * hidden = {width}]"
            raise shape_error("features", tuple(features.shape), expected)
        rows = self.combiner_norm(self.combiner(features.to(self.combiner.weight.dtype)))
        phases = self._phases(positions, rows.dtype)
        return [layer.attention.key_values(rows, phases) for layer in self._stack()]

    def block_hidden(
        self,
        anchor_ids: Tensor,
        positions: Tensor,
        context: KeyValues,
        ends: TargetEnds,
        *,
        first_positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows of whole blocks, before the heads.

        Args:
            anchor_ids: Token at the anchor of each block, shape [batch, blocks], int64.
            positions: Positions of the anchors, shape [batch, blocks], int64.
            context: What `context_rows` gave.
            ends: Embedding and head of the target.
            first_positions: Position of the first row of the context, shape [batch]; each block then sees the rows
                strictly before its anchor. None says that every row of the context is before every anchor.

        Returns:
            Normed rows, shape [batch, blocks, block_size, hidden]; row k of a block is about the token at its
            anchor's position + 1 + k.
        """
        batch, blocks = anchor_ids.shape
        size = self.config.block_size
        steps = torch.arange(size, device=positions.device)
        at = (positions[..., None] + steps).view(batch, blocks * size)
        rows = self._inputs(anchor_ids, ends).view(batch, blocks * size, -1)
        phases = self._phases(at, rows.dtype)
        allowed = None
        if first_positions is not None or blocks > 1:
            seen = torch.arange(context[0][0].shape[2], device=positions.device)
            if first_positions is None:
                known = torch.ones(batch, blocks * size, len(seen), device=seen.device).bool()
            else:
                known = seen + first_positions[:, None, None] < positions[..., None]
                known = known.repeat_interleave(size, 1)
            own = torch.arange(blocks, device=positions.device).repeat_interleave(size)
            same = (own[:, None] == own).expand(batch, -1, -1)
            allowed = torch.cat([known, same], -1)[:, None]
        for layer, rows_of_context in zip(self._stack(), context, strict=True):
            rows = layer(rows, phases, rows_of_context, allowed)
        out: Tensor = self.norm(rows).view(batch, blocks, size, -1)
        return out

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Logits of the probability that each draft survives if those before it do.

        Args:
            hidden: Rows of `block_hidden`, shape [..., hidden].
            previous: Token before each, shape [...], int64.

        Returns:
            Logits, shape [...], fp32; None without a confidence head.
        """
        if self.confidence is None:
            return None
        known = self.head.embed(previous) if self.confidence.markov_rank else None
        logits: Tensor = self.confidence(hidden, known)
        return logits

    def save(self, folder: str | Path) -> None:
        """Writes configuration and weights.

        Args:
            folder: Where to; made when it is not there.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(self.config.to_dict(), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> DraftModule:
        """Reads what `save` wrote; nothing may be missing, left over or of another shape.

        Args:
            folder: The folder.
            device: Where the weights go.

        Returns:
            The draft, in evaluation mode, in the dtypes of the file.

        Raises:
            CheckpointMissing: A file is not there.
            CheckpointMismatch: The file does not have exactly the tensors of the configuration.
            ConfigError: The configuration is not one.
        """
        folder = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                message = f"{folder} has no {name}; give a folder that DraftModule.save wrote."
                raise CheckpointMissing(message, path=folder / name)
        config = DraftConfig.from_dict(_read_config(folder / CONFIG_FILE))
        with torch.device("meta"):
            module = cls(config)
        try:
            tensors = load_file(folder / WEIGHTS_FILE, device=str(device))
        except SafetensorError as error:
            message = f"{folder / WEIGHTS_FILE} cannot be read ({error}); save the draft again."
            raise CheckpointMismatch(message) from error
        wanted = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in tensors.items()}
        if found != wanted:
            different = sorted(
                name for name in wanted | found if wanted.get(name) != found.get(name)
            )
            name = different[0]
            raise CheckpointMismatch(
                f"{folder / WEIGHTS_FILE} differs from its configuration in {len(different)} tensors, first {name}: "
                f"found {found.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')}; save the draft again.",
            )
        module.load_state_dict(tensors, assign=True)
        return module.eval()

    def _stack(self) -> Any:
        return self.layers

    def _inputs(self, anchor_ids: Tensor, ends: TargetEnds) -> Tensor:
        """Embeddings of blocks: the anchor, then masks."""
        size = self.config.block_size
        if self.mask_embedding is None:
            ids = anchor_ids.new_full(
                (*anchor_ids.shape, size), int(self.config.mask_token_id or 0)
            )
            ids[..., 0] = anchor_ids
            return ends.embed(ids).to(self.combiner.weight.dtype)
        anchors = ends.embed(anchor_ids).to(self.mask_embedding.dtype)[..., None, :]
        masks = self.mask_embedding.expand(*anchor_ids.shape, size - 1, -1)
        return torch.cat([anchors, masks], -2)

    def _phases(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, each shape [batch, 1, tokens, head dim / 2]; angles are fp32."""
        half = self.config.head_dim // 2
        steps = torch.arange(half, device=positions.device, dtype=torch.float32)
        frequencies = self.config.rope_theta ** (-steps / half)
        angles = (positions[..., None].float() * frequencies)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(rows: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + head dim / 2), shape [batch, heads, tokens, head dim]."""
    cosines, sines = phases
    first, second = rows.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise CheckpointMismatch(f"{path} is no JSON ({error}); save the draft again.") from error
    if not isinstance(found, dict):
        raise CheckpointMismatch(
            f"{path} holds a {type(found).__name__}, not an object; save the draft again."
        )
    return found
