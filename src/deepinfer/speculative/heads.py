"""Sequential heads: what a parallel draft learns of the token before, at the price of one small product a position.

A parallel backbone gives logits `U_k` of all positions of a block at once. A head adds what follows from the token
that was drawn one position earlier: the law of draft k is `softmax(U_k + B(x_{k-1}))`, normalised by itself, so it is
the exact law that verification needs.

Source: DSpark paper (arXiv 2607.05147), section 3.1; deepseek-ai/DeepSpec for the gated form.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from deepinfer.core import _checks as checks
from deepinfer.core.errors import ConfigError
from deepinfer.speculative._arrays import shape_error
from deepinfer.speculative.laws import first_argmax

__all__ = [
    "HEADS",
    "ConfidenceHead",
    "GatedMarkovHead",
    "MarkovHead",
    "RnnHead",
    "SequentialHead",
    "make_sequential_head",
]


class SequentialHead(nn.Module):
    """A correction of draft logits that depends on the tokens before.

    Args:
        vocab_size: Tokens of the target.
        rank: Width of the embedding of the token before.
        draft_vocab_size: Tokens that the draft can propose; None says all. Their logits come first.
    """

    def __init__(
        self, vocab_size: int, rank: int = 256, *, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__()
        checks.check_int("vocab_size", vocab_size, 1, 2**31, ConfigError)
        self.rank = checks.check_int("rank", rank, 1, 65_536, ConfigError)
        columns = vocab_size if draft_vocab_size is None else draft_vocab_size
        checks.check_int("draft_vocab_size", columns, 1, vocab_size, ConfigError)
        self.embedding = nn.Embedding(vocab_size, rank)
        self.output = nn.Linear(rank, columns, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """Embedding of the tokens before.

        Args:
            previous: Tokens, shape [...], int64.

        Returns:
            Shape [..., rank].
        """
        return self.embedding(previous)

    def initial_state(self, requests: int) -> Tensor | None:
        """What the first position starts from.

        Args:
            requests: Rows.

        Returns:
            State, or None for heads that keep none.
        """
        return None

    @abstractmethod
    def step(
        self,
        base: Tensor,
        previous: Tensor,
        hidden: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of one position.

        Args:
            base: Logits of the backbone, shape [requests, draft vocab].
            previous: Token before, shape [requests], int64.
            hidden: Hidden rows of the position, shape [requests, hidden]; only some heads read them.
            state: What the step before returned, shape [requests, rank]; `initial_state` at the first position. A head that keeps one
                must be given it: starting anew at each position is another model.

        Returns:
            Logits, shape [requests, draft vocab], and the state of the next position.
        """

    def block(self, base: Tensor, previous: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits of a block whose tokens are known, as in training.

        Args:
            base: Logits of the backbone, shape [requests, drafts, draft vocab].
            previous: Token before each position, shape [requests, drafts], int64.
            hidden: Hidden rows, shape [requests, drafts, hidden].

        Returns:
            Logits, shape [requests, drafts, draft vocab].
        """
        state = self.initial_state(base.shape[0])
        if state is not None:
            state = state.to(base)
        rows = []
        for position in range(base.shape[1]):
            at = None if hidden is None else hidden[:, position]
            logits, state = self.step(base[:, position], previous[:, position], at, state)
            rows.append(logits)
        return torch.stack(rows, 1) if rows else base

    def sample(
        self,
        base: Tensor,
        anchor: Tensor,
        hidden: Tensor | None = None,
        *,
        temperature: Tensor | float = 0.0,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws a block, position by position.

        Args:
            base: Logits of the backbone, shape [requests, drafts, draft vocab].
            anchor: Token before the block, shape [requests], int64.
            hidden: Hidden rows, shape [requests, drafts, hidden].
            temperature: One number from 0, or one a request, shape [requests]; 0 takes the likeliest, ties to the lowest id.
            noise: Gumbel noise, shape [requests, drafts, draft vocab]; None draws nothing and takes the likeliest.

        Returns:
            Tokens, shape [requests, drafts], int64, and the logits of the law that they come from, shape [requests, drafts,
            draft vocab]: their softmax is q, what `RejectionSampler` is given. After temperature where a token was drawn;
            where the likeliest was taken, 0 for it and minus infinity for all others.

        Raises:
            ConfigError: The temperature is a number out of range.
            ShapeError: There is not one temperature a request, or not one number of noise a logit.
        """
        requests = base.shape[0]
        if not isinstance(temperature, Tensor):
            checks.check_float("temperature", temperature, 0.0, 1e6, ConfigError)
        elif temperature.ndim and tuple(temperature.shape) != (requests,):
            raise shape_error("temperature", tuple(temperature.shape), f"[requests={requests}]")
        if noise is not None:
            noise = torch.as_tensor(noise, device=base.device)
        if noise is not None and tuple(noise.shape) != tuple(base.shape):
            raise shape_error("noise", tuple(noise.shape), f"{tuple(base.shape)}")
        scale = torch.as_tensor(temperature, dtype=base.dtype, device=base.device).expand(requests)
        warm = scale > 0 if noise is not None else torch.zeros_like(scale, dtype=torch.bool)
        divisor = torch.where(warm, scale, 1.0)[:, None]
        state = self.initial_state(requests)
        if state is not None:
            state = state.to(base)
        previous, tokens, laws = anchor, [], []
        for position in range(base.shape[1]):
            at = None if hidden is None else hidden[:, position]
            logits, state = self.step(base[:, position], previous, at, state)
            logits = logits / divisor
            scores = logits
            if noise is not None:
                scores = torch.where(warm[:, None], logits + noise[:, position].to(logits), logits)
            previous = first_argmax(scores)
            tokens.append(previous)
            chosen = torch.full_like(logits, -torch.inf).scatter(1, previous[:, None], 0.0)
            laws.append(torch.where(warm[:, None], logits, chosen))
        if not tokens:
            return anchor.new_zeros(requests, 0), base
        return torch.stack(tokens, 1), torch.stack(laws, 1)


class MarkovHead(SequentialHead):
    """`B = W2 W1[x]`: a low-rank table of which token follows which."""

    def step(
        self,
        base: Tensor,
        previous: Tensor,
        hidden: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of one position; see `SequentialHead.step`."""
        return base + self.output(self.embed(previous)), None

    def block(self, base: Tensor, previous: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits of a block in one product; see `SequentialHead.block`."""
        return base + self.output(self.embed(previous))


class GatedMarkovHead(SequentialHead):
    """`B = W2 (g * W1[x])` with `g = sigmoid(Wg [h; W1[x]] + b)`: the hidden row decides how much of it counts.

    Args:
        vocab_size: Tokens of the target.
        rank: Width of the embedding of the token before.
        hidden_size: Width of the hidden rows.
        draft_vocab_size: Tokens that the draft can propose; None says all.
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int = 256,
        *,
        hidden_size: int,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size=draft_vocab_size)
        self.gate = nn.Linear(hidden_size + rank, rank)

    def step(
        self,
        base: Tensor,
        previous: Tensor,
        hidden: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of one position; see `SequentialHead.step`."""
        return self.block(base, previous, hidden), None

    def block(self, base: Tensor, previous: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits of a block in one product; see `SequentialHead.block`."""
        row = self.embed(previous)
        gate = torch.sigmoid(self.gate(torch.cat([_needed(hidden), row], -1)))
        return base + self.output(gate * row)


class RnnHead(SequentialHead):
    """A small gated recurrence over the block: `z = [s; W1[x]; h]`, `B = W2 tanh(o)`.

    Gate, candidate and output come from one product with z, so the correction of a position reads the state before
    it; the state after it is `sigmoid(g) s + (1 - sigmoid(g)) tanh(c)`.

    Args:
        vocab_size: Tokens of the target.
        rank: Width of the state and of the embedding of the token before.
        hidden_size: Width of the hidden rows.
        draft_vocab_size: Tokens that the draft can propose; None says all.
    """

    def __init__(
        self,
        vocab_size: int,
        rank: int = 256,
        *,
        hidden_size: int,
        draft_vocab_size: int | None = None,
    ) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size=draft_vocab_size)
        self.cell = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, requests: int) -> Tensor:
        """Zeros.

        Args:
            requests: Rows.

        Returns:
            State, shape [requests, rank].
        """
        return self.output.weight.new_zeros(requests, self.rank)

    def step(
        self,
        base: Tensor,
        previous: Tensor,
        hidden: Tensor | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of one position; see `SequentialHead.step`."""
        if state is None:
            checks.fail(
                "state", state, "what the step before returned, or initial_state()", ConfigError
            )
        parts = torch.cat([state, self.embed(previous), _needed(hidden)], -1)
        gate, candidate, out = self.cell(parts).chunk(3, -1)
        share = torch.sigmoid(gate)
        after = share * state + (1.0 - share) * torch.tanh(candidate)
        return base + self.output(torch.tanh(out)), after


HEADS = {"markov": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnHead}
"""Sequential heads by name."""


def make_sequential_head(
    kind: str,
    vocab_size: int,
    rank: int = 256,
    *,
    hidden_size: int | None = None,
    draft_vocab_size: int | None = None,
) -> SequentialHead:
    """Makes a head by name.

    Args:
        kind: "markov", "gated" or "rnn".
        vocab_size: Tokens of the target.
        rank: Width of the embedding of the token before.
        hidden_size: Width of the hidden rows; needed by "gated" and "rnn".
        draft_vocab_size: Tokens that the draft can propose; None says all.

    Returns:
        The head.

    Raises:
        ConfigError: There is no such head, or it needs `hidden_size`.
    """
    checks.check_choice("kind", kind, HEADS, ConfigError)
    if kind == "markov":
        return MarkovHead(vocab_size, rank, draft_vocab_size=draft_vocab_size)
    width = checks.check_int("hidden_size", hidden_size, 1, 2**24, ConfigError)
    made = GatedMarkovHead if kind == "gated" else RnnHead
    return made(vocab_size, rank, hidden_size=width, draft_vocab_size=draft_vocab_size)


class ConfidenceHead(nn.Module):
    """Logit of the probability that a draft survives if all before it do: `w [h; W1[x_{k-1}]]`, in fp32.

    It reads the token before the draft, never the draft itself, so that it is known before the draft is drawn: that is
    what makes schedules by confidence legal.

    Args:
        hidden_size: Width of the hidden rows.
        markov_rank: Width of the embedding of the token before; 0 leaves it out.
        bias: Whether a constant is learned.
    """

    def __init__(self, hidden_size: int, markov_rank: int = 0, *, bias: bool = False) -> None:
        super().__init__()
        checks.check_int("hidden_size", hidden_size, 1, 2**24, ConfigError)
        checks.check_int("markov_rank", markov_rank, 0, 65_536, ConfigError)
        self.markov_rank = markov_rank
        self.output = nn.Linear(hidden_size + markov_rank, 1, bias=bias)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None = None) -> Tensor:
        """Confidence logits.

        Args:
            hidden: Hidden rows, shape [..., hidden].
            previous_embedding: `SequentialHead.embed` of the tokens before, shape [..., markov_rank].

        Returns:
            Logits, shape [...], fp32.

        Raises:
            ConfigError: The head was made for an embedding and there is none, or the other way round.
        """
        if (previous_embedding is None) != (self.markov_rank == 0):
            checks.fail(
                "previous_embedding",
                None if previous_embedding is None else tuple(previous_embedding.shape),
                f"given exactly when markov_rank is above 0; it is {self.markov_rank}",
                ConfigError,
            )
        rows = hidden.float()
        if previous_embedding is not None:
            rows = torch.cat([rows, previous_embedding.float()], -1)
        bias = None if self.output.bias is None else self.output.bias.float()
        return nn.functional.linear(rows, self.output.weight.float(), bias)[..., 0]


def _needed(hidden: Tensor | None) -> Tensor:
    if hidden is None:
        checks.fail("hidden", hidden, "hidden rows; this head reads them", ConfigError)
        raise AssertionError
    return hidden
