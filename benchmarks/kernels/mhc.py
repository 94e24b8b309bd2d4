"""Cases of hyper-connections."""

from __future__ import annotations

import torch
from harness import Built, Case, assert_repeats, calc_diff
from quant import intact, room
from row_checks import assert_rows_alone, compiled, copy_of, eager

HIDDEN, MANY, ITERATIONS = 5120, 8192, 20


def steps_sinkhorn(scores: torch.Tensor) -> torch.Tensor:
    """Doubly stochastic matrices in the operations of torch."""
    k = torch.softmax(scores, -1) + 1e-6
    k = k / (k.sum(-2, keepdim=True) + 1e-6)
    for _ in range(ITERATIONS - 1):
        k = k / (k.sum(-1, keepdim=True) + 1e-6)
        k = k / (k.sum(-2, keepdim=True) + 1e-6)
    return k


def steps_pre(
    streams: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Coefficients and the sum of the streams, in the operations of torch; in the dtype of `fn`."""
    wide = streams.to(fn.dtype)
    flat = wide.flatten(1)
    m = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    following = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + 1e-6
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    mix = steps_sinkhorn((m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)))
    summed = (wide * pre.unsqueeze(-1)).sum(1)
    return summed.to(streams.dtype), post, mix, following


def steps_post(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """Streams behind a sublayer, in the operations of torch."""
    added = post.unsqueeze(-1) * output.to(post.dtype).unsqueeze(1)
    moved = (mix.unsqueeze(-1) * streams.to(post.dtype).unsqueeze(2)).sum(1)
    return (added + moved).to(streams.dtype)


def steps_head(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The weighted sum of streams, in the operations of torch."""
    return (streams.to(pre.dtype) * pre.unsqueeze(-1)).sum(1).to(streams.dtype)


def given(tokens: int) -> tuple[torch.Tensor, ...]:
    """Streams and parameters as a trained model has them, roughly."""
    streams = torch.randn(tokens, 4, HIDDEN, device="cuda").bfloat16()
    pre = torch.rand(tokens, 4, device="cuda")
    fn = torch.randn(24, 4 * HIDDEN, device="cuda") * 0.02
    return streams, pre, fn, torch.randn(24, device="cuda"), torch.rand(3, device="cuda")


def sinkhorn(tuning: tuple[int, int]):
    """Builds the normalisation of 4x4 matrices."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import mhc_launch as launch

        tokens = 257 if small else MANY
        scores = torch.randn(tokens, 4, 4, device="cuda") * 3
        flat, whole = room(tokens, 16, torch.float32)
        out = flat.view(tokens, 4, 4)
        run = lambda: launch.sinkhorn(scores, ITERATIONS, 1e-6, out, tuning)  # noqa: E731

        def check():
            wanted = steps_sinkhorn(scores.double())
            error = float((out - wanted).abs().max())
            assert error < 2e-6, error
            assert intact(whole)
            assert_repeats(run, out)
            return {"error": error}

        peers = {
            "torch": eager(steps_sinkhorn, scores),
            "compiled": compiled(steps_sinkhorn, scores),
        }
        return Built(
            run,
            check,
            tokens * 1300,
            2 * scores.nbytes,
            "none",
            {"copy": copy_of(2 * scores.nbytes), **peers},
        )

    return build


def pre(
    tokens: int,
    tuning: tuple[int, ...] | None,
    products: int,
    finish: tuple[int, int] | None = None,
    prepared: bool = False,
):
    """Builds coefficients and the sum of streams."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.mhc import prepare_mhc_projection
        from deepinfer.kernels.triton import mhc_launch as launch

        # Many tokens and few are spread over programs in other ways.
        count = (1100 if tokens == MANY else 257) if small else tokens
        streams, weights, fn, base, scale = given(count)
        projection = prepare_mhc_projection(fn) if prepared else fn
        following, post = (torch.empty(count, 4, device="cuda") for _ in range(2))
        mix = torch.empty(count, 4, 4, device="cuda")
        out, whole = room(count, HIDDEN, torch.bfloat16)
        run = lambda: launch.mhc_pre(  # noqa: E731
            streams,
            weights,
            projection,
            base,
            scale,
            ITERATIONS,
            1e-20,
            1e-6,
            following,
            post,
            mix,
            out,
            tuning,
            products,
            finish,
        )

        def check():
            wanted = steps_pre(streams, *(t.double() for t in (weights, fn, base, scale)))
            bound = 5e-5
            errors = [
                float((a.double() - b).abs().max())
                for a, b in zip((post, mix, following), wanted[1:], strict=True)
            ]
            assert max(errors) < bound, errors
            assert calc_diff(out, wanted[0]) < 5e-6, calc_diff(out, wanted[0])
            assert intact(whole)
            assert_repeats(run, out, post, mix, following)
            return {"error": max(errors), "calc_diff": calc_diff(out, wanted[0])}

        arguments = (streams, weights, fn, base, scale)
        peers = {}
        if tokens == MANY and prepared:
            peers = {
                "torch": eager(steps_pre, *arguments),
                "compiled": compiled(steps_pre, *arguments),
            }
        size = streams.nbytes + out.nbytes + fn.nbytes + count * 28 * 4
        return Built(
            run, check, 2 * count * 4 * HIDDEN * 24, size, "none", {"copy": copy_of(size), **peers}
        )

    return build


def post(tuning: tuple[int, int] | None, evict: str):
    """Builds the step behind a sublayer."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import mhc_launch as launch

        tokens = 257 if small else MANY
        streams = torch.randn(tokens, 4, HIDDEN, device="cuda").bfloat16()
        output = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        weights, mix = torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 4, 4, device="cuda")
        flat, whole = room(tokens * 4, HIDDEN, torch.bfloat16)
        out = flat.view(tokens, 4, HIDDEN)
        run = lambda: launch.mhc_post(streams, output, weights, mix, out, tuning, evict)  # noqa: E731

        def check():
            wanted = (weights.double().unsqueeze(-1) * output.double().unsqueeze(1)
                      + torch.einsum("tij,tic->tjc", mix.double(), streams.double()))  # fmt: skip
            error = (out.double() - wanted).abs() / (wanted.abs() * 2**-8 + 1e-5)
            assert float(error.max()) < 1.02, float(error.max())
            assert intact(whole)
            assert_repeats(run, out)
            return {"half_steps": float(error.max())}

        arguments = (streams, output, weights, mix)
        peers = {
            "torch": eager(steps_post, *arguments),
            "compiled": compiled(steps_post, *arguments),
        }
        return Built(
            run,
            check,
            tokens * HIDDEN * 40,
            2 * streams.nbytes + output.nbytes,
            "none",
            {"copy": copy_of(2 * streams.nbytes + output.nbytes), **peers},
        )

    return build


def head(tuning: tuple[int, int] | None, evict: str):
    """Builds the sum of the streams."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import mhc_launch as launch

        tokens = 257 if small else MANY
        streams = torch.randn(tokens, 4, HIDDEN, device="cuda").bfloat16()
        weights = torch.rand(tokens, 4, device="cuda")
        out, whole = room(tokens, HIDDEN, torch.bfloat16)
        run = lambda: launch.mhc_head(streams, weights, out, tuning, evict)  # noqa: E731

        def check():
            wanted = torch.einsum("ti,tic->tc", weights.double(), streams.double())
            error = (out.double() - wanted).abs() / (wanted.abs() * 2**-8 + 1e-5)
            assert float(error.max()) < 1.02, float(error.max())
            assert intact(whole)
            assert_repeats(run, out)
            return {"half_steps": float(error.max())}

        peers = {
            "torch": eager(steps_head, streams, weights),
            "compiled": compiled(steps_head, streams, weights),
        }
        return Built(
            run,
            check,
            tokens * HIDDEN * 8,
            streams.nbytes + out.nbytes,
            "none",
            {"copy": copy_of(streams.nbytes + out.nbytes), **peers},
        )

    return build


def contract(small: bool) -> Built:
    """Tokens alone, permuted, beside NaN, apart; no tokens; other widths and dtypes; the fused step is its parts."""
    from deepinfer import kernels as k
    from deepinfer.kernels.reference import mhc as reference

    def check():
        streams, weights, fn, base, scale = given(MANY + 70)
        whole = k.mhc_pre(streams, weights, fn, base, scale, backend="triton")
        streams, weights = streams[:1000], weights[:1000]
        assert_rows_alone(
            lambda x, p: k.mhc_pre(x, p, fn, base, scale, backend="triton"), [streams, weights]
        )
        # A program of many tokens takes several pieces of the channels one after the other.
        part = k.mhc_pre(streams, weights, fn, base, scale, backend="triton")
        assert all(torch.equal(a, b[:1000]) for a, b in zip(part, whole, strict=True))
        few = k.mhc_pre(streams[:300], weights[:300], fn, base, scale, backend="triton")
        assert all(torch.equal(a, b[:300]) for a, b in zip(few, whole, strict=True))
        y = torch.randn(1000, HIDDEN, device="cuda").bfloat16()
        mix = torch.rand(1000, 4, 4, device="cuda")
        assert_rows_alone(
            lambda x, y, p, m: (k.mhc_post(x, y, p, m, backend="triton"),),
            [streams, y, weights, mix],
        )
        assert_rows_alone(lambda x, p: (k.mhc_head(x, p, backend="triton"),), [streams, weights])
        assert_rows_alone(lambda s: (k.sinkhorn(s, backend="triton"),), [mix])
        gains = torch.randn(HIDDEN, device="cuda").bfloat16()
        normed = k.mhc_pre(
            streams, weights, fn, base, scale, norm_weight=gains, norm_eps=1e-6, backend="triton"
        )[0]
        bare = k.mhc_pre(streams, weights, fn, base, scale, norm_eps=1e-6, backend="triton")[0]
        assert torch.equal(normed, k.rms_norm(bare, gains, 1e-6, backend="triton"))
        torch.backends.cuda.matmul.allow_tf32 = False
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for width in (320, 512, 7168):
                wide = torch.randn(40, 6, width + 32, device="cuda").to(dtype)
                x = wide[:, 1:5, :width]
                p, f = torch.rand(40, 4, device="cuda"), torch.randn(24, 4 * width, device="cuda")
                found = k.mhc_pre(x, p, f, base, scale, backend="triton")
                wanted = reference.mhc_pre(x, p, f, base, scale)
                for a, b in zip(found, wanted, strict=True):
                    assert torch.allclose(a.float(), b.float(), rtol=8e-3, atol=1e-4), (
                        dtype,
                        width,
                    )
                z = torch.randn(40, width, device="cuda").to(dtype)
                m = torch.rand(40, 4, 4, device="cuda")
                a, b = k.mhc_post(x, z, p, m, backend="triton"), reference.mhc_post(x, z, p, m)
                assert torch.allclose(a.float(), b.float(), rtol=8e-3, atol=1e-4), (dtype, width)
        none = torch.empty(0, 4, 64, device="cuda")
        assert k.mhc_head(none, torch.empty(0, 4, device="cuda")).shape == (0, 64)
        return {"differing": 0.0}

    return Built(lambda: None, check)


def cases() -> list[Case]:
    """All of them."""
    found = [
        Case("sinkhorn", f"{MANY} x 4 x 4, 20 iterations", "table", sinkhorn((32, 1))),
    ]
    for tokens in (MANY, 256, 64):
        shape = f"{tokens} x 4 x {HIDDEN}"
        split = f"{shape}, projection split before"
        found.append(Case("mhc_pre", split, "table", pre(tokens, None, 2, None, True)))
        if tokens != 256:
            found.append(Case("mhc_pre", shape, "table", pre(tokens, None, 2)))
    shape = f"{MANY} x 4 x {HIDDEN}"
    entry = (64, 64, 10, 4, 2)
    name = "64 tokens, 64 x 10 channels, 4 warps, 2 stages, 2 products"
    found.append(Case("mhc_pre", f"257 x 4 x {HIDDEN}", name, pre(257, entry, 2), check_only=True))
    found.append(Case("mhc_post", f"{MANY} x 4 x {HIDDEN}", "table", post(None, "")))
    found.append(Case("mhc_head", f"{MANY} x 4 x {HIDDEN}", "table", head(None, "")))
    found.append(Case("mhc", "contract", "all", contract, check_only=True))
    return found
