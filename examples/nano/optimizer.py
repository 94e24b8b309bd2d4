"""Muon for matrices, AdamW for everything else, under one step size factor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MATRICES = {
    "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w3", "w2",
    "compressor_wkv", "compressor_wgate", "engram_wkv", "main_proj",
}  # fmt: skip


def orthogonalise(g: Tensor) -> Tensor:
    """Five quintic Newton-Schulz iterations towards the nearest (semi-)orthogonal matrix, in bf16."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        b = x @ x.mT
        x = 3.4445 * x + (-4.7750 * b + 2.0315 * (b @ b)) @ x
    return x.mT if tall else x


class MuonAdamW:
    """Muon (momentum 0.95, Nesterov) for `MATRICES`, AdamW without decay for the rest.

    Equal shapes are stepped together; the gradient is clipped to norm 1.

    Args:
        named: Parameters by name.
        muon_lr: Step size of matrices.
        adam_lr: Step size of the rest.
        decay: Weight decay of matrices.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        muon_lr: float,
        adam_lr: float,
        decay: float,
    ) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        rest: list[nn.Parameter] = []
        for name, p in named:
            (groups.setdefault(p.shape, []) if name.split(".")[-1] in MATRICES else rest).append(p)
        self.groups = [
            (g, torch.zeros_like(torch.stack([p.detach() for p in g]))) for g in groups.values()
        ]
        self.parameters = [p for g, _ in self.groups for p in g] + rest
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        cuda = rest[0].is_cuda
        self.adam = torch.optim.AdamW(
            rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, eps=1e-10, fused=cuda
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step with both step sizes times `factor`; the gradients are dropped."""
        nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        lr = self.muon_lr * factor
        for params, momentum in self.groups:
            grads = torch.stack(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
            )
            momentum.lerp_(grads, 0.05)
            update = orthogonalise(grads.lerp(momentum, 0.95)) * (
                0.2 * max(grads.shape[-2:]) ** 0.5
            )
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, [u.float() for u in update.unbind(0)], alpha=-lr)
        for p in self.parameters:
            p.grad = None
