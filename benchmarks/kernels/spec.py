"""Cases of verification and of drafts from the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from harness import Built, Case, assert_repeats
from row_checks import eager

VOCAB, DRAFTS = 129_280, 5


def near_laws(requests: int, ragged: bool):
    """Logits of targets and of drafts near them, drafts drawn from these, lengths, seeds, positions."""
    from deepinfer.kernels.sampling import gumbel_sample

    lengths = torch.full((requests,), DRAFTS, device="cuda")
    if ragged:
        lengths = torch.randint(0, DRAFTS + 1, (requests,), device="cuda")
    rows = int((lengths + 1).sum())
    target = torch.randn(rows, VOCAB, device="cuda") * 3
    draft = torch.randn(requests, DRAFTS, VOCAB, device="cuda") * 3
    first = (lengths + 1).cumsum(0) - (lengths + 1)
    for r in range(requests):
        n = int(lengths[r])
        draft[r, :n] = target[first[r] : first[r] + n] + 0.5 * torch.randn(n, VOCAB, device="cuda")
    seeds = torch.randint(0, 2**62, (requests,), device="cuda")
    positions = torch.randint(0, 9999, (requests,), device="cuda")
    return target, draft, lengths, seeds, positions, gumbel_sample


def softmax_verify(target, draft, drafts, lengths):
    """The standard rule for equal lengths in the operations of torch, with its own random numbers."""
    requests, width, vocab = draft.shape
    p = torch.softmax(target.view(requests, width + 1, vocab), -1)
    q = torch.softmax(draft, -1)
    at = drafts.unsqueeze(-1)
    ratio = p[:, :width].gather(-1, at)[..., 0] / q.gather(-1, at)[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    each = torch.arange(requests, device=target.device)
    rest = (p[:, :width] - q).clamp_min(0)
    rest = torch.cat((rest, p[:, width:]), 1)[each, accepted]
    token = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
    return token, accepted


def coupled_steps(target, drafts):
    """The coupled rule for equal lengths in the operations of torch, with its own random numbers."""
    requests, width = drafts.shape
    noise = -torch.empty_like(target).exponential_().log()
    own = (target.log_softmax(-1) + noise).argmax(-1).view(requests, width + 1)
    accepted = (own[:, :-1] == drafts).long().cumprod(1).sum(1)
    return own, accepted


def verify(requests: int, rule: str, drawn: bool, sizes: tuple[int, int] | None):
    """Builds a verification of 5 drafts a request."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import spec as reference
        from deepinfer.kernels.triton import spec_launch as launch

        count = 9 if small else requests
        target, draft, lengths, seeds, positions, draw = near_laws(count, small)
        warm = None
        if small:
            warm = torch.rand(count, device="cuda", dtype=torch.float64) + 0.5
            warm[3] = 0.0
        stream = 0 if rule == "coupled" else 1
        drafts = torch.stack(
            [
                draw(
                    draft[:, j].contiguous(), seeds, positions + j, temperature=warm, stream=stream
                )
                for j in range(DRAFTS)
            ],
            1,
        )
        if small:
            target[0] = float("nan")
            drafts[4, 2] = -1
            target = torch.cat((target, torch.full_like(target[:3], float("nan"))))
        out = torch.full((count, DRAFTS + 1), 777, device="cuda", dtype=torch.int64)
        accepted = torch.full((count,), 777, device="cuda", dtype=torch.int64)
        given = (target, drafts, lengths, positions, seeds, warm)
        if rule == "coupled":
            run = lambda: launch.verify_coupled(*given, out, accepted, sizes)  # noqa: E731
        else:
            law = draft if drawn else None
            run = lambda: launch.verify_standard(*given, law, out, accepted, sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            o, a = torch.empty_like(out), torch.empty_like(accepted)
            if rule == "coupled":
                reference.verify_coupled(*given, o, a)
            else:
                reference.verify_standard(*given, draft if drawn else None, o, a)
            assert torch.equal(a, accepted), (a.tolist(), accepted.tolist())
            assert torch.equal(o, out), (o.tolist(), out.tolist())
            assert_repeats(run, out, accepted)
            return {"accepted": float(a.float().mean())}

        size = target.numel() * 4
        if rule == "standard" and drawn:
            size += draft.numel() * 4
        peers = {}
        if not small:
            if rule == "coupled":
                peers["torch"] = eager(coupled_steps, target, drafts)
            elif drawn:
                peers["torch"] = eager(softmax_verify, target, draft, drafts, lengths)
        return Built(run, check, size_bytes=size, peers=peers)

    return build


def ngram(rows: int, length: int, sizes: tuple[int, int]):
    """Builds proposals from texts."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.spec import ngram_propose
        from deepinfer.kernels.triton import spec_launch as launch

        high = 12 if small else 60_000
        tokens = torch.randint(0, high, (rows, length), device="cuda")
        lengths = torch.full((rows,), length, device="cuda")
        if small:
            lengths = torch.randint(0, length + 1, (rows,), device="cuda")
            lengths[:3] = torch.tensor([0, 2, 3])
            tokens[5] = 7
        out = torch.full((rows, 5), 777, device="cuda", dtype=torch.int64)
        matched = torch.full((rows,), 777, device="cuda", dtype=torch.int32)
        run = lambda: launch.ngram(tokens, lengths, 2, 4, 8192, out, matched, sizes)  # noqa: E731

        def check() -> Mapping[str, float]:
            want = ngram_propose(tokens.cpu(), lengths.cpu(), 5, backend="torch")
            assert torch.equal(out.cpu(), want[0])
            assert torch.equal(matched.cpu(), want[1])
            assert_repeats(run, out, matched)
            return {}

        def unfold() -> Callable:
            def steps():
                windows = tokens[:, :-1].unfold(1, 4, 1)
                same = (windows == tokens[:, -4:].unsqueeze(1)).all(-1)
                at = torch.arange(same.shape[1], device="cuda")
                best = torch.where(same, at, -1).amax(-1)
                to = (best.unsqueeze(-1) + 4 + torch.arange(5, device="cuda")).clamp(0, length - 1)
                return torch.where(best.unsqueeze(-1) >= 0, tokens.gather(1, to), -1)

            return steps

        return Built(run, check, size_bytes=rows * length * 8, peers={"torch": unfold})

    return build


def cases() -> list[Case]:
    """The cases."""
    found = []
    for requests in (8, 64):
        shape = f"{requests} x {DRAFTS} drafts x {VOCAB}"
        for sizes in (None, (8192, 8)):
            name = "table" if sizes is None else f"{sizes[0]} w{sizes[1]}"
            for rule, drawn in (("coupled", False), ("standard", True), ("standard", False)):
                form = rule + (" chosen" if rule == "standard" and not drawn else "")
                found.append(
                    Case(
                        "speculative_verify",
                        f"{shape} {form}",
                        name,
                        verify(requests, rule, drawn, sizes),
                    )
                )
    for sizes in ((2048, 8), (4096, 8)):
        found.append(
            Case("ngram_propose", "256 x 4096", f"{sizes[0]} w{sizes[1]}", ngram(256, 4096, sizes))
        )
    return found
