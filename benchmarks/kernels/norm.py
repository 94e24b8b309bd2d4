"""Cases of the norms and the rotation."""

from __future__ import annotations

import torch
from harness import Built, Case, assert_repeats, same_bits
from quant import STEPS, intact, room
from row_checks import apart, assert_rows_alone, compiled, copy_of, eager, hard_rows, same_cast

HIDDEN, MANY, EPS = 5120, 8192, 1e-6


def steps_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """RMS norm in the operations of torch."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


def steps_add_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Addition and RMS norm in the operations of torch."""
    total = (r.float() + x.float()).to(x.dtype)
    return total, steps_norm(total, w)


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """RMS norm in fp64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * w.double()


def steps_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error in units of a step of bf16 at the value wanted, less the half of rounding."""
    error = (found.double() - wanted).abs() / (wanted.abs() * 2.0**-8 + 1e-30)
    return float(error.max())


def norm(channels: int, rows: int, tuning: tuple[int, int] | None, evict: str = ""):
    """Builds an RMS norm."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import norm_launch as launch

        count = 257 if small else rows
        x = torch.randn(count, channels, device="cuda").bfloat16() * 3
        w = torch.randn(channels, device="cuda").bfloat16()
        out, whole = room(count, channels, torch.bfloat16)
        run = lambda: launch.rms_norm(x, None, w, EPS, out, tuning, evict)  # noqa: E731

        def check():
            worst = steps_of(out, exact(x, w))
            assert worst < 1.02, f"{worst} half steps of bf16"
            assert intact(whole)
            assert_repeats(run, out)
            return {"half_steps": worst}

        def flashinfer():
            from flashinfer.norm import rmsnorm

            other = torch.empty_like(x)
            return lambda: rmsnorm(x, w, EPS, out=other)

        def aten():
            return lambda: torch.nn.functional.rms_norm(x, (channels,), w, EPS)

        peers = {
            "torch": eager(steps_norm, x, w),
            "aten": aten,
            "compiled": compiled(steps_norm, x, w),
            "flashinfer": flashinfer,
        }
        return Built(run, check, 0, 2 * x.nbytes, "none", {"copy": copy_of(2 * x.nbytes), **peers})

    return build


def add_norm(channels: int, rows: int, tuning: tuple[int, int] | None, evict: str = ""):
    """Builds an RMS norm behind an addition, in place."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.triton import norm_launch as launch

        count = 257 if small else rows
        x = torch.randn(count, channels, device="cuda").bfloat16() * 3
        r = torch.randn(count, channels, device="cuda").bfloat16()
        w = torch.randn(channels, device="cuda").bfloat16()
        given = x.clone(), r.clone()
        run = lambda: launch.rms_norm(x, r, w, EPS, x, tuning, evict)  # noqa: E731

        def check():
            x.copy_(given[0])
            r.copy_(given[1])
            run()
            total, _ = steps_add_norm(*given, w)
            assert same_bits(r, total), "sums differ"
            worst = steps_of(x, exact(total, w))
            assert worst < 1.02, f"{worst} half steps of bf16"
            first = x.clone()
            for _ in range(20):
                x.copy_(given[0])
                r.copy_(given[1])
                run()
                assert same_bits(x, first), "repeats differ"
                assert same_bits(r, total)
            return {"half_steps": worst}

        def flashinfer():
            from flashinfer.norm import fused_add_rmsnorm

            a, b = given[0].clone(), given[1].clone()
            return lambda: fused_add_rmsnorm(a, b, w, EPS)

        peers = {
            "torch": eager(steps_add_norm, *given, w),
            "compiled": compiled(steps_add_norm, *given, w),
            "flashinfer": flashinfer,
        }
        return Built(run, check, 0, 4 * x.nbytes, "none", {"copy": copy_of(4 * x.nbytes), **peers})

    return build


def phases_of(places: int, pairs: int = 32) -> torch.Tensor:
    """Cosine and sine of random angles."""
    angles = torch.randn(places, pairs, device="cuda") * 9
    return torch.stack((angles.cos(), angles.sin()), -1)


def steps_rope(x: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
    """Rotation in the operations of torch."""
    width = 2 * phases.shape[1]
    even, odd = x[..., -width:].float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = phases[:, None, :, 0], phases[:, None, :, 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def rope(heads: int, in_place: bool, tuning: tuple[int, int] | None):
    """Builds the rotation of 64 of 512 channels."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference.rope import apply_rope
        from deepinfer.kernels.triton import norm_launch as launch

        tokens = 65 if small else MANY
        x = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
        phases = phases_of(tokens)
        given = x.clone()
        out = x if in_place else torch.full_like(x, 7.0)
        run = lambda: launch.rope(x, phases, None, False, out, tuning)  # noqa: E731

        def check():
            places = torch.randint(0, tokens, (tokens,), device="cuda")
            for inverse in (False, True):
                for where in (None, places, places.int()):
                    x.copy_(given)
                    launch.rope(x, phases, where, inverse, out, tuning)
                    wanted = apply_rope(given, phases, where, inverse)
                    assert same_bits(out, wanted), (inverse, where is None)
            return {"differing": 0.0}

        size = tokens * heads * (64 if in_place else 512) * 4 + phases.nbytes
        peers = (
            {}
            if in_place
            else {
                "torch": eager(steps_rope, given, phases),
                "compiled": compiled(steps_rope, given, phases),
            }
        )
        return Built(run, check, 0, size, "none", {"copy": copy_of(size), **peers})

    return build


def norm_rope_cast(heads: int, format: str, tuning: tuple[int, ...] | None, pairs: bool = True):
    """Builds norm, rotation and cast of rows of 512 channels."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import norm as public
        from deepinfer.kernels.reference import norm as reference
        from deepinfer.kernels.reference.rope import apply_rope
        from deepinfer.kernels.reference.swiglu import cast_rows
        from deepinfer.kernels.triton import norm_launch as launch

        tokens = 65 if small else MANY
        group = 16 if format == "nvfp4" else 32
        x = torch.randn(tokens, heads, 512, device="cuda").bfloat16() * 3
        w = torch.randn(512, device="cuda").bfloat16()
        phases = phases_of(tokens)
        q, q_all = room(tokens * heads, 512 if format == "fp8" else 256)
        scale, scale_all = room(tokens * heads, 512 // group)
        number = {"fp8": 1, "mxfp4": 2, "nvfp4": 3}[format]
        run = lambda: launch.norm_rope_cast(  # noqa: E731
            x, w, EPS, phases, None, q, scale, number, group, tuning, pairs
        )

        def check():
            codes, _ = reference.rms_norm_rope_quant(x, w, EPS, phases, None, format)
            differing = (codes.view(torch.uint8).view(q.shape) != q).float().mean()
            assert float(differing) < 2e-3, f"{float(differing)} of the codes differ"
            assert intact(q_all, scale_all)
            assert_repeats(run, q, scale)
            # without a norm nothing is summed, and every bit must be the reference's
            hard = hard_rows(tokens, heads * 512).view(tokens, heads, 512)
            for values, turns in ((x, phases), (x, None), (hard, None)):
                a, b = public.rms_norm_rope_quant(
                    values, None, EPS, turns, format=format, backend="triton"
                )
                rotated = values if turns is None else apply_rope(values, turns)
                c, d = cast_rows(rotated.cpu(), format, group)
                assert same_cast(a, b, c, d), "bits differ without a norm"
            return {"share_of_codes_that_differ": float(differing)}

        def steps(
            x: torch.Tensor, w: torch.Tensor, phases: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            return STEPS[format](steps_rope(steps_norm(x, w), phases))

        peers = {"torch": eager(steps, x, w, phases), "compiled": compiled(steps, x, w, phases)}
        size = x.nbytes + q.nbytes + scale.nbytes + phases.nbytes
        return Built(
            run,
            check,
            0,
            size,
            "none",
            {"copy": copy_of(size), **peers},
        )

    return build


def contract_casts(small: bool) -> Built:
    """Norm, rotation and cast: other widths, heads apart, positions; hard values; rows alone."""
    from deepinfer import kernels as k
    from deepinfer.kernels.reference.norm import rms_norm_rope_quant as plain

    def check():
        x = torch.randn(1000, 512, device="cuda").bfloat16()
        w, phases = torch.randn(512, device="cuda").bfloat16(), phases_of(50)
        places = torch.randint(0, 50, (1000,), device="cuda")
        for format in ("fp8", "mxfp4", "nvfp4"):
            assert_rows_alone(
                lambda x, p, f=format: k.rms_norm_rope_quant(
                    x, w, EPS, phases, p, format=f, backend="triton"
                ),
                [x, places],
            )
        for width, turned, format in (
            (96, 32, "fp8"), (128, 128, "mxfp4"), (64, 16, "fp8"), (1536, 64, "nvfp4"), (352, 0, "mxfp4"),
        ):  # fmt: skip
            wide = hard_rows(40, 6 * (width + 32)).view(40, 6, width + 32)
            for heads in (wide[:, 1:5, :width], wide[:, 2, 16 : 16 + width]):
                turns = torch.randn(50, turned // 2, 2, device="cuda") if turned else None
                at = torch.randint(0, 50, (40,), device="cuda") if turned else None
                given = (heads[12:], None, EPS, turns, at if at is None else at[12:])
                a, b = k.rms_norm_rope_quant(*given, format=format, backend="triton")
                c, d = plain(*given, format)
                assert same_cast(a, b, c, d), (width, format)
                given = (heads[12:], torch.rand(width, device="cuda").bfloat16(), *given[2:])
                a, _ = k.rms_norm_rope_quant(*given, format=format, backend="triton")
                c, _ = plain(*given, format)
                differing = (a.view(torch.uint8) != c.view(torch.uint8)).float().mean()
                assert float(differing) < 5e-3, (width, format, float(differing))
        return {"differing": 0.0}

    return Built(lambda: None, check)


def contract(small: bool) -> Built:
    """Rows alone, permuted, beside NaN, apart and misaligned; no rows; other widths and dtypes."""
    from deepinfer import kernels as k

    def check():
        for width in (5120, 512, 1280, 7168, 96):
            x = torch.randn(1000, width, device="cuda").bfloat16()
            r = torch.randn(1000, width, device="cuda").bfloat16()
            w = torch.randn(width, device="cuda")
            assert_rows_alone(lambda x, w=w: (k.rms_norm(x, w, backend="triton"),), [x])
            assert_rows_alone(
                lambda x, r, w=w: k.fused_add_rms_norm(x.clone(), r.clone(), w, backend="triton"),
                [x, r],
            )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in (5120, 4608, 1280, 512, 128, 7168, 100, 20000):
                x = torch.randn(33, width, device="cuda").to(dtype)
                w = torch.randn(width, device="cuda")
                wanted = exact(x, w)
                for y in (x, apart(x, 64), apart(x, 7, 3)):
                    found = k.rms_norm(y, w, EPS, backend="triton")
                    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}[
                        dtype
                    ]
                    assert bool(((found - wanted).abs() <= bound * wanted.abs() + 1e-5).all()), (
                        dtype,
                        width,
                    )
        assert k.rms_norm(
            torch.empty(0, 64, device="cuda"), torch.ones(64, device="cuda")
        ).shape == (0, 64)
        assert k.apply_rope(torch.empty(0, 2, 128, device="cuda"), phases_of(0)).shape == (
            0,
            2,
            128,
        )
        heads = torch.randn(40, 6, 640, device="cuda").bfloat16()[:, 1:5, :512]
        turned = k.apply_rope(heads, phases_of(40), backend="triton")
        assert turned.shape == (40, 4, 512)
        return {"differing": 0.0}

    return Built(lambda: None, check)


def cases() -> list[Case]:
    """All of them."""
    found = []
    shape = f"{MANY} x {HIDDEN}"
    found.append(Case("rms_norm", shape, "table", norm(HIDDEN, MANY, None)))
    found.append(Case("fused_add_rms_norm", shape, "table", add_norm(HIDDEN, MANY, None, "")))
    found.append(Case("rms_norm", "65536 x 512", "table", norm(512, 65536, None)))
    found.append(Case("rms_norm", "64 x 5120", "table", norm(HIDDEN, 64, None)))
    found.append(Case("apply_rope", f"{MANY} x 64 x 512, in place", "table", rope(64, True, None)))
    found.append(Case("apply_rope", f"{MANY} x 64 x 512", "table", rope(64, False, None)))
    for format in ("fp8", "mxfp4", "nvfp4"):
        shape = f"{MANY} x 16 x 512, {format}"
        for tuning in (None, (4, 1, 8, True, format != "fp8")):
            name = "table"
            if tuning:
                name = f"{tuning[0]} rows, {tuning[1]} warps{', ahead' * tuning[4]}"
            found.append(
                Case("rms_norm_rope_quant", shape, name, norm_rope_cast(16, format, tuning))
            )
    shape = f"{MANY} x 16 x 512, fp8"
    build = norm_rope_cast(16, "fp8", (8, 4), False)
    name = "8 rows, 4 warps, one at a time"
    found.append(Case("rms_norm_rope_quant", shape, name, build, check_only=True))
    for format in ("fp8", "nvfp4"):
        shape = f"{MANY} x 1 x 512, {format}"
        found.append(Case("rms_norm_rope_quant", shape, "table", norm_rope_cast(1, format, None)))
    found.append(Case("norm", "contract", "all", contract, check_only=True))
    found.append(Case("norm", "contract", "casts", contract_casts, check_only=True))
    return found
