"""The DSpark draft: a few layers that propose a block of tokens at once, and the heads that chain them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.norm import Linear, RMSNorm
from deepinfer.models.deepseek_v41.rounding import Rounding

__all__ = ["ConfidenceHead", "DSparkDraft", "MarkovHead"]


class MarkovHead(nn.Module):
    """Low-rank correction of the draft logits by the token before.

    Attributes:
        embed: Features of the previous token, weight [vocab, rank].
        head: Bias of every next token, weight [vocab, rank].
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rank, vocab = config.dspark_markov_rank, config.vocab_size
        self.embed = Linear(rank, vocab, device=device, dtype=dtype)
        self.head = Linear(rank, vocab, device=device, dtype=dtype)


class ConfidenceHead(nn.Module):
    """Probability that a draft survives, given that those before it did.

    Attributes:
        proj: Weight [1, hidden + rank], fp32.
    """

    def __init__(self, config: DeepseekV41Config, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        width = config.hidden_size + config.dspark_markov_rank
        self.proj = Linear(width, 1, device=device, dtype=torch.float32)


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
        super().__init__(config, config.num_hidden_layers + stage, rounding, device=device, dtype=dtype)
        factory = {"device": device, "dtype": dtype}
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if stage == 0:
            self.main_proj = Linear(len(config.dspark_target_layer_ids) * hidden, hidden, **factory)
            self.main_norm = RMSNorm(hidden, eps, **factory)
        if stage == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, eps, **factory)
            self.markov_head = MarkovHead(config, **factory)
            self.confidence_head = ConfidenceHead(config, device=device)


class DSparkDraft(nn.ModuleList):
    """The draft model; its stages are the published `mtp.0`, `mtp.1`, ..."""

    def __init__(
        self,
        config: DeepseekV41Config,
        rounding: Rounding,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        stages = range(config.num_nextn_predict_layers)
        super().__init__(DraftStage(config, stage, rounding, device=device, dtype=dtype) for stage in stages)
        self.config = config

    def markov_bias(self, prev_ids: Tensor) -> Tensor:
        """Bias of every next token.

        Args:
            prev_ids: Token before each position, shape [rows], int64.

        Returns:
            Shape [rows, vocab], fp32.
        """
        head = self[-1].markov_head
        return head.head(head.embed.weight[prev_ids]).float()

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Confidence of the draft at each position; it depends on the token before, not on the draft itself.

        Args:
            hidden: Collapsed streams before the final norm, shape [..., hidden].
            prev_ids: Token before each position, shape [...], int64.

        Returns:
            Probabilities, shape [...], fp32.
        """
        stage = self[-1]
        features = torch.cat((hidden.float(), stage.markov_head.embed.weight[prev_ids].float()), -1)
        return torch.sigmoid(stage.confidence_head.proj(features)).squeeze(-1)
