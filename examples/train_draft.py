"""Attaches a draft to a causal language model, trains it, and shows what it saves.

    python examples/train_draft.py                    # a few minutes on one CPU thread
    python examples/train_draft.py --model torch      # without transformers
    python examples/train_draft.py --steps 20 --draft-steps 20    # seconds, to see that it runs

The target is a small Llama made from a configuration with `transformers`, or, where that is not installed, a small
model written below. It learns the standard library's source as bytes. Then its hidden states are kept, a DSpark draft
learns to propose what it would say, and prompts that neither saw are continued with and without drafts. The outputs
are compared token for token.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer.adapters import TransformersTarget
from deepinfer.adapters.transformers_draft import RecordedRows
from deepinfer.speculative import (
    BlockDrafter,
    DraftConfig,
    DraftModule,
    NgramDrafter,
    TargetEnds,
    TargetOutput,
    draft_training_loss,
    draw_blocks,
    speculative_generate,
)

VOCAB = 256
HEADS = 4


class TinyLayer(nn.Module):
    """Attention with rotary positions, and a gated feed-forward part."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(
        self, x: Tensor, phases: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The layer's output and its keys and values, those of the past included."""
        rows, tokens, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).view(rows, tokens, 3 * HEADS, -1).transpose(1, 2)
        q, k, v = parts.chunk(3, 1)
        q, k = turn(q, phases), turn(k, phases)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mask = torch.ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, hidden))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), (k, v)


def turn(x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * phases[0] - b * phases[1], b * phases[0] + a * phases[1]], -1)


class TinyModel(nn.Module):
    """A small causal language model, for where `transformers` is not installed."""

    def __init__(self, hidden: int, layers: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(TinyLayer(hidden, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, past: Any = None) -> tuple[list[Tensor], Any]:
        """States behind the embedding and every layer, the last one normed, and the cache."""
        x, start = self.embed(ids), 0 if past is None else past[0][0].shape[2]
        half = x.shape[-1] // HEADS // 2
        at = torch.arange(start, start + ids.shape[1])[:, None]
        angles = at * 10_000.0 ** (-torch.arange(half) / half)
        phases = angles.cos(), angles.sin()
        states, cache = [x], []
        for number, layer in enumerate(self.layers):
            x, rows = layer(x, phases, None if past is None else past[number])
            states.append(x)
            cache.append(rows)
        states[-1] = self.norm(x)
        return states, cache


class TorchTarget:
    """`TinyModel` behind the protocol of `speculative_generate`: the whole of what attaching a model takes."""

    def __init__(self, model: TinyModel, taps: tuple[int, ...]) -> None:
        self.model, self.taps = model, taps
        self.ends = TargetEnds(model.embed, model.lm_head)

    def forward(self, input_ids: Tensor, cache: Any = None, *, num_logits: int = 0) -> TargetOutput:
        """Runs tokens behind what is in the cache."""
        states, cache = self.model(input_ids[None], cache)
        logits = self.model.lm_head(states[-1][0, -num_logits:])
        return TargetOutput(logits, self._tapped(states)[0], cache)

    def crop(self, cache: Any, length: int) -> Any:
        """Forgets tokens."""
        return [(k[:, :, :length], v[:, :, :length]) for k, v in cache]

    @torch.no_grad()
    def record(self, input_ids: Tensor) -> RecordedRows:
        """Hidden states of whole texts."""
        states, _ = self.model(input_ids)
        return RecordedRows(self._tapped(states), states[-1])

    def _tapped(self, states: list[Tensor]) -> Tensor:
        return torch.cat([states[tap + 1] for tap in self.taps], -1)


def build_target(options: argparse.Namespace) -> TransformersTarget | TorchTarget:
    """An untrained target."""
    taps = tuple(sorted({0, options.layers // 2, options.layers - 2}))
    inner = 5 * options.hidden // 2
    kind = options.model
    if kind == "auto":
        kind = "transformers" if importlib.util.find_spec("transformers") else "torch"
    if kind == "torch":
        return TorchTarget(TinyModel(options.hidden, options.layers, inner).eval(), taps)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=options.hidden, intermediate_size=inner,
        num_hidden_layers=options.layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return TransformersTarget(LlamaForCausalLM(config), taps)


def read_text(most_bytes: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library: those to learn from, and those for prompts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in files]
    held = b"".join(texts[::10])
    learned = b"".join(text for at, text in enumerate(texts) if at % 10)[:most_bytes]
    return tuple(torch.frombuffer(bytearray(t), dtype=torch.uint8).long() for t in (learned, held))


def draw_rows(text: Tensor, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random pieces, shape [rows, tokens]."""
    starts = torch.randint(len(text) - tokens, (rows, 1), generator=generator)
    return text[starts + torch.arange(tokens)]


def fit(parameters: Any, steps: int, loss_of: Any, name: str, learning_rate: float) -> list[float]:
    """Trains with a warm-up and a decay; returns the losses."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        rate = learning_rate * min(1.0, (step + 1) / (0.05 * steps + 1)) * (1 - 0.95 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % max(1, steps // 6) == 0 or step == steps - 1:
            print(
                f"{name} {step + 1:4d}/{steps}  loss {losses[-1]:.3f}  {time.perf_counter() - began:.0f} s"
            )
    return losses


def train_target(
    target: TransformersTarget | TorchTarget, text: Tensor, options: argparse.Namespace
) -> list[float]:
    """Teaches the target to continue the text."""
    generator = torch.Generator().manual_seed(options.seed)
    model: Any = target.model

    def loss_of() -> Tensor:
        ids = draw_rows(text, options.batch, options.context, generator)
        if isinstance(target, TorchTarget):
            logits = model.lm_head(model(ids)[0][-1])
        else:
            logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    model.train()
    losses = fit(model.parameters(), options.steps, loss_of, "target", 1e-3)
    model.eval().requires_grad_(False)
    return losses


def train_draft(
    target: TransformersTarget | TorchTarget, text: Tensor, options: argparse.Namespace
) -> tuple[DraftModule, list[float]]:
    """Keeps the target's hidden states, and teaches a draft on them."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    ids = draw_rows(text, options.rows, options.context, generator)
    kept = [target.record(part) for part in ids.split(16)]
    features = torch.cat([part.features for part in kept])
    final = torch.cat([part.final_hidden for part in kept])
    config = DraftConfig(
        vocab_size=VOCAB, hidden_size=options.hidden, taps=target.taps, num_layers=options.draft_layers,
        num_heads=HEADS, num_kv_heads=HEADS, head_dim=options.hidden // HEADS,
        intermediate_size=2 * options.hidden, block_size=options.block, head=options.head, rank=64,
    )  # fmt: skip
    draft = DraftModule(config)
    size = sum(weight.numel() for weight in draft.parameters())
    print(
        f"draft of {size / 1e6:.2f} M parameters on {features.numel() * 4 / 2**20:.0f} MiB of features"
    )

    def loss_of() -> Tensor:
        rows = torch.randint(len(ids), (options.batch,), generator=generator)
        blocks = draw_blocks(ids[rows], options.anchors, options.block, generator=generator)
        return draft_training_loss(draft, features[rows], final[rows], blocks, target.ends).total

    losses = fit(draft.parameters(), options.draft_steps, loss_of, "draft ", 2e-3)
    return draft.eval(), losses


def compare(
    target: TransformersTarget | TorchTarget,
    drafters: dict[str, Any],
    text: Tensor,
    options: argparse.Namespace,
    temperature: float,
) -> list[dict[str, Any]]:
    """Continues prompts with and without drafts, side by side."""
    print(f"temperature {temperature:g}")
    generator = torch.Generator().manual_seed(options.seed + 2)
    prompts = draw_rows(text, options.prompts, 64, generator)
    speculative_generate(target, None, prompts[0], 4)
    seconds: dict[str, list[float]] = {name: [] for name in drafters}
    steps, tokens = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0)
    equal = dict.fromkeys(drafters, 0)
    for prompt in prompts:
        expected = None
        for name, drafter in drafters.items():
            began = time.perf_counter()
            found = speculative_generate(
                target, drafter, prompt, options.tokens, temperature=temperature, seed=options.seed
            )
            seconds[name].append(time.perf_counter() - began)
            expected = expected or found.token_ids
            equal[name] += found.token_ids == expected
            steps[name] += found.stats.steps
            tokens[name] += found.stats.tokens
    report = []
    for name in drafters:
        gains = [a / b for a, b in zip(seconds["none"], seconds[name], strict=True)]
        row = {
            "drafter": name,
            "temperature": temperature,
            "accepted_length": tokens[name] / max(1, steps[name]),
            "speed_up": statistics.median(gains),
            "identical": equal[name],
            "prompts": len(prompts),
        }
        report.append(row)
        print(
            f"{name:7} {row['accepted_length']:5.2f} tokens a step, {row['speed_up']:5.2f} x as fast, "
            f"{row['identical']} of {row['prompts']} outputs identical"
        )
    return report


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["auto", "transformers", "torch"], default="auto")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="of the target")
    parser.add_argument("--steps", type=int, default=240, help="of the target's training")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="tokens of a training row")
    parser.add_argument("--block", type=int, default=5, help="drafts of a block")
    parser.add_argument("--head", choices=["markov", "gated", "rnn"], default="markov")
    parser.add_argument("--draft-layers", type=int, default=1)
    parser.add_argument("--draft-steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=256, help="texts whose hidden states are kept")
    parser.add_argument("--anchors", type=int, default=16, help="blocks of a text and step")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="to generate a prompt")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0], help="to compare at; 0 is greedy"
    )
    parser.add_argument("--out", type=Path, help="folder for the draft")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(arguments: list[str]) -> dict[str, Any]:
    """Trains, compares, and returns losses and the report."""
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    learned, held = read_text(8_000_000)
    target = build_target(options)
    size = sum(weight.numel() for weight in target.model.parameters())
    print(f"target: {type(target.model).__name__} of {size / 1e6:.2f} M parameters")
    target_losses = train_target(target, learned, options)
    draft, draft_losses = train_draft(target, learned, options)
    if options.out:
        draft.save(options.out)
        draft = DraftModule.load(options.out)
    drafters = {
        "none": None,
        "ngram": NgramDrafter(options.block),
        "dspark": BlockDrafter(draft, target.ends),
    }
    report = []
    for temperature in options.temperatures:
        report += compare(target, drafters, held, options, temperature)
    return {"target_losses": target_losses, "draft_losses": draft_losses, "report": report}


if __name__ == "__main__":
    run(sys.argv[1:])
