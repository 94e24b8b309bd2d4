"""Cases of the casts and of SwiGLU with its cast."""

from __future__ import annotations

import torch
from harness import Built, Case, assert_repeats, same_bits
from row_checks import (
    apart,
    assert_rows_alone,
    compiled,
    copy_of,
    eager,
    hard_rows,
    same_cast,
    same_codes,
)

HIDDEN, INNER, MANY = 5120, 2304, 8192
NONE = {"fp8": 1, "mxfp4": 2, "nvfp4": 3}


def steps_fp8(x: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast to e4m3 in the operations of torch."""
    g = x.float().unflatten(-1, (-1, group))
    a = g.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0
    bits = (a.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    q = (g / bits.view(torch.float32)).to(torch.float8_e4m3fn).flatten(-2)
    return q, (bits >> 23).to(torch.uint8).squeeze(-1)


def steps_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast of 32x32 blocks in the operations of torch."""
    n, k = w.shape
    g = w.float().view(n // 32, 32, k // 32, 32)
    a = g.abs().amax((1, 3), keepdim=True).clamp_min(1e-4) / 448.0
    bits = (a.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    q = (g / bits.view(torch.float32)).to(torch.float8_e4m3fn).view(n, k)
    return q, (bits >> 23).to(torch.uint8).view(n // 32, k // 32)


def steps_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast to MXFP4 in the operations of torch."""
    g = x.float().unflatten(-1, (-1, 32))
    a = g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6.0
    bits = (a.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    y = (g / bits.view(torch.float32)).flatten(-2)
    return e2m1_bytes(y), (bits >> 23).to(torch.uint8).squeeze(-1)


def e2m1_bytes(y: torch.Tensor) -> torch.Tensor:
    """Values of at most 6 as pairs of codes in the operations of torch."""
    step = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min(1.0) * 0.5
    y = (y / step).round() * step
    size = y.abs()
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(
        torch.uint8
    )
    code = code | (torch.signbit(y).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def steps_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A cast to e2m1 with e4m3 scales in the operations of torch."""
    g = x.float().unflatten(-1, (-1, 16))
    a = g.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9) / 6.0
    scale = a.clamp_max(448.0).to(torch.float8_e4m3fn)
    y = (g / scale.float()).flatten(-2).clamp(-6.0, 6.0)
    return e2m1_bytes(y), scale.squeeze(-1)


STEPS = {"fp8": steps_fp8, "mxfp4": steps_fp4, "nvfp4": steps_nvfp4}


def steps_swiglu(
    x: torch.Tensor, weights: torch.Tensor, format: str = "fp8"
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU with clamp and weights and its cast, in the operations of torch."""
    gate, up = x.float().chunk(2, -1)
    v = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    return STEPS[format]((v * weights.unsqueeze(-1)).to(x.dtype))


def room(rows: int, width: int, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, ...]:
    """A contiguous output between guards, and the guarded buffer."""
    whole = torch.full((rows * width + 256,), 111, device="cuda", dtype=dtype)
    return whole[128 : 128 + rows * width].view(rows, width), whole


def intact(*buffers: torch.Tensor) -> bool:
    """Whether nothing was written around an output."""
    return all(bool((b[:128] == 111).all()) and bool((b[-128:] == 111).all()) for b in buffers)


def cast(format: str, group: int, tuning: tuple[int, ...] | None):
    """Builds a cast of rows."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference.swiglu import cast_rows
        from deepinfer.kernels.triton import quant_launch as launch

        rows = 257 if small else MANY
        x = (
            hard_rows(rows, HIDDEN)
            if small
            else torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        )
        width = HIDDEN if format == "fp8" else HIDDEN // 2
        q, q_all = room(rows, width)
        scale, scale_all = room(rows, HIDDEN // group)
        run = lambda: launch.cast_groups(x, q, scale, NONE[format], group, tuning)  # noqa: E731

        def check():
            codes, factors = cast_rows(x.cpu(), format, group)
            assert same_codes(q, codes), "codes differ"
            assert same_bits(scale.cpu(), factors.view(torch.uint8)), "scales differ"
            assert intact(q_all, scale_all)
            assert_repeats(run, q, scale)
            return {"differing": 0.0}

        f = STEPS[format]
        peers = {"torch": eager(f, x), "compiled": compiled(f, x)} if group < 128 else {}
        size = rows * (HIDDEN * 2 + width + HIDDEN // group)
        return Built(run, check, 0, size, "none", {"copy": copy_of(size), **peers})

    return build


def blocks(block: tuple[int, int], tuning: tuple[int, int] | None):
    """Builds a cast of blocks of a weight."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference.cast import per_block_cast_to_fp8
        from deepinfer.kernels.triton import quant_launch as launch

        rows, columns = (300, 5120 - 16) if small else (MANY, HIDDEN)
        w = (
            hard_rows(rows, columns)
            if small
            else torch.randn(rows, columns, device="cuda").bfloat16()
        )
        q, q_all = room(rows, columns)
        down, across = -(-rows // block[0]), -(-columns // block[1])
        scale, scale_all = room(down, across)
        run = lambda: launch.cast_blocks(w[None], q[None], scale[None], *block, tuning)  # noqa: E731

        def check():
            codes, factors = per_block_cast_to_fp8(w.cpu(), block)
            assert same_codes(q, codes), "codes differ"
            assert same_bits(scale.cpu(), factors.view(torch.uint8)), "scales differ"
            assert intact(q_all, scale_all)
            assert_repeats(run, q, scale)
            return {"differing": 0.0}

        peers = {"torch": eager(steps_blocks, w), "compiled": compiled(steps_blocks, w)}
        size = rows * columns * 3 + down * across
        return Built(
            run,
            check,
            0,
            size,
            "none",
            {"copy": copy_of(size), **(peers if block == (32, 32) else {})},
        )

    return build


def back(format: str, block: tuple[int, int], tuning: tuple[int, int] | None):
    """Builds a cast back to bf16."""

    def build(small: bool) -> Built:
        from deepinfer.kernels import cast_back, per_block_cast_to_fp8
        from deepinfer.kernels.reference.swiglu import cast_rows
        from deepinfer.kernels.triton import quant_launch as launch

        rows = 288 if small else MANY
        x = (
            hard_rows(rows, HIDDEN)
            if small
            else torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        )
        if block[0] > 1:
            q, scale = per_block_cast_to_fp8(x, block)
        else:
            q, scale = cast_rows(x, format, block[1])
        out, whole = room(rows, HIDDEN, torch.bfloat16)
        kind = 2 if format == "nvfp4" else 1
        codes, factors = q.view(torch.uint8), scale.view(torch.uint8)
        packed = format != "fp8"
        run = lambda: launch.cast_back(codes, factors, out, packed, kind, *block, rows, tuning)  # noqa: E731

        def check():
            wanted = cast_back(q.cpu(), scale.cpu(), block=block, dtype=torch.bfloat16)
            found = out.cpu()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert same_bits(found.nan_to_num(1.0), wanted.nan_to_num(1.0)), "values differ"
            assert intact(whole)
            assert_repeats(run, out)
            return {"differing": 0.0}

        def steps(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            g = q.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 32))
            factor = torch.exp2(s.float() - 127.0)
            return (g * factor.unsqueeze(-1)).flatten(-2).bfloat16()

        plain = format == "fp8" and block == (1, 32)
        peers = {"torch": eager(steps, codes, factors), "compiled": compiled(steps, codes, factors)}
        size = q.nbytes + scale.nbytes + out.nbytes
        return Built(
            run, check, 0, size, "none", {"copy": copy_of(size), **(peers if plain else {})}
        )

    return build


def swiglu(
    format: str,
    group: int,
    tuning: tuple[int, ...] | None,
    pairs: bool = True,
    inner: int = INNER,
):
    """Builds SwiGLU with clamp and weights and a cast, or without any of them."""

    def build(small: bool) -> Built:
        from deepinfer.kernels.reference import swiglu as reference
        from deepinfer.kernels.triton import quant_launch as launch

        rows = 257 if small else MANY
        x = torch.randn(rows, 2 * inner, device="cuda").bfloat16() * 4
        if small:
            x[2, 5], x[3, 7], x[4, inner + 9] = float("nan"), float("inf"), float("-inf")
        plain = format == "none"
        weights = None if plain else torch.rand(rows, device="cuda")
        limit = float("inf") if plain else 10.0
        kind = torch.bfloat16 if plain else torch.uint8
        width = inner // 2 if format in ("mxfp4", "nvfp4") else inner
        q, q_all = room(rows, width, kind)
        scale, scale_all = room(rows, inner // group)
        number = 0 if plain else NONE[format]
        run = lambda: launch.swiglu_cast(  # noqa: E731
            x, weights, limit, q, scale, number, group, tuning, pairs
        )

        def check():
            bare = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)
            launch.swiglu_cast(x, weights, limit, bare, scale[:0], 0, group, tuning)
            wanted = reference.silu_and_mul(x, weights, limit)
            apart_ = (bare.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
            apart_ = torch.where(wanted.isnan() & bare.isnan(), 0, apart_)
            assert int(apart_.max()) <= 1, f"values differ by {int(apart_.max())} steps of bf16"
            if tuning and tuning[2] == 2:
                assert int(apart_.max()) == 0, f"{int((apart_ > 0).sum())} values differ"
            if plain:
                assert same_bits(q, bare)
            else:
                codes, factors = reference.cast_rows(bare.cpu(), format, group)
                assert same_codes(q, codes), "codes differ from those of the values"
                assert same_bits(scale.cpu(), factors.view(torch.uint8)), "scales differ"
                assert intact(scale_all)
            assert intact(q_all)
            assert_repeats(run, q, *(() if plain else (scale,)))
            return {"share_that_differs_by_a_step": float((apart_ > 0).float().mean())}

        def flashinfer():
            from flashinfer.activation import silu_and_mul

            out = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)
            return lambda: silu_and_mul(x, out=out)

        def bare_steps(x: torch.Tensor) -> torch.Tensor:
            gate, up = x.float().chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up).to(x.dtype)

        if plain:
            peers = {
                "torch": eager(bare_steps, x),
                "compiled": compiled(bare_steps, x),
                "flashinfer": flashinfer,
            }
        elif group < 128:

            def steps(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return steps_swiglu(x, w, format)

            peers = {"torch": eager(steps, x, weights), "compiled": compiled(steps, x, weights)}
        else:
            peers = {}
        size = x.nbytes + q.nbytes + (0 if plain else scale.nbytes)
        return Built(run, check, 0, size, "none", {"copy": copy_of(size), **peers})

    return build


def layouts(dtype: torch.dtype, width: int):
    """Builds checks of rows that are apart or misaligned, of odd widths, of scales as fp32."""

    def build(small: bool) -> Built:
        from deepinfer import kernels as k
        from deepinfer.kernels.reference import cast as reference
        from deepinfer.kernels.reference.swiglu import cast_rows

        def check():
            x = hard_rows(40, width, dtype)
            for y in (x, apart(x, 64), apart(x, 7, 3)):
                for group in (32, 64, 128):
                    q, s = k.per_token_cast_to_fp8(y, group, backend="triton")
                    q2, s2 = reference.per_token_cast_to_fp8(x.cpu(), group)
                    assert same_cast(q, s, q2, s2), (dtype, width, group)
                    wide = k.per_token_cast_to_fp8(
                        y, group, scale_dtype=torch.float32, backend="triton"
                    )[1]
                    assert torch.equal(wide.cpu().nan_to_num(-1), s2.float().nan_to_num(-1))
                for format, group in (("mxfp4", 32), ("nvfp4", 16)):
                    if width % group == 0:
                        q, s = k.per_token_cast_to_fp4(y, group, backend="triton")
                        q2, s2 = cast_rows(x.cpu(), format, group)
                        assert same_cast(q, s, q2, s2), (
                            dtype,
                            width,
                            format,
                        )
                for block in ((32, 32), (128, 128), (1, 128), (2, 64)):
                    q, s = k.per_block_cast_to_fp8(y, block, backend="triton")
                    q2, s2 = reference.per_block_cast_to_fp8(x.cpu(), block)
                    assert same_cast(q, s, q2, s2), (dtype, width, block)
                    found = k.cast_back(q, s, block=block, backend="triton").cpu()
                    wanted = reference.cast_back(q.cpu(), s2, block=block)
                    assert torch.equal(found.nan_to_num(7e30), wanted.nan_to_num(7e30))
            return {"differing": 0.0}

        return Built(lambda: None, check)

    return build


def contract(small: bool) -> Built:
    """Rows alone, permuted, beside NaN; several weights; every bf16 number; no rows."""
    from deepinfer import kernels as k
    from deepinfer.kernels.reference import cast as reference
    from deepinfer.kernels.reference.swiglu import cast_rows

    def check():
        x = torch.randn(1000, 1280, device="cuda").bfloat16()
        assert_rows_alone(lambda x: k.per_token_cast_to_fp8(x, backend="triton"), [x])
        assert_rows_alone(lambda x: k.per_token_cast_to_fp4(x, backend="triton"), [x])
        assert_rows_alone(lambda x: k.per_token_cast_to_fp4(x, 16, backend="triton"), [x])
        w = torch.rand(1000, device="cuda")
        assert_rows_alone(
            lambda x, w: k.silu_and_mul_quant(x, w, limit=10.0, backend="triton"), [x, w]
        )
        batch = torch.randn(3, 50, 96, device="cuda")
        q, s = k.per_block_cast_to_fp8(batch, (32, 32), backend="triton")
        wanted = reference.cast_back(q.cpu(), s.cpu(), block=(32, 32))
        assert torch.equal(k.cast_back(q, s, block=(32, 32), backend="triton").cpu(), wanted)
        every = (
            torch.arange(65536, device="cuda", dtype=torch.int32)
            .to(torch.int16)
            .view(torch.bfloat16)
        )
        every = every.view(2048, 32)  # each bf16 number, in groups of neighbours
        for format, group in (("fp8", 32), ("mxfp4", 32), ("nvfp4", 16)):
            q, s = (k.per_token_cast_to_fp8(every, backend="triton") if format == "fp8"
                    else k.per_token_cast_to_fp4(every, group, backend="triton"))  # fmt: skip
            q2, s2 = cast_rows(every.cpu(), format, group)
            assert same_cast(q, s, q2, s2), format
        none = torch.empty(0, 128, device="cuda")
        assert k.per_token_cast_to_fp8(none)[1].shape == (0, 4)
        assert k.silu_and_mul_quant(none)[0].shape == (0, 64)
        return {"differing": 0.0}

    return Built(lambda: None, check)


def cases() -> list[Case]:
    """All of them."""
    found = []

    def add(op: str, shape: str, build, tunings, *words: str) -> None:
        for tuning in tunings:
            name = (
                ", ".join(f"{n} {w}" for n, w in zip(tuning, words, strict=False))
                if tuning
                else "table"
            )
            if len(words) == 2 and tuning and len(tuning) > 2:
                name += ", as torch" if tuning[2] == 2 else ", fast"
                name += f", {tuning[3]} pairs" if len(tuning) > 3 else ""
            found.append(Case(op, f"{MANY} x {shape}", name, build(tuning)))

    of_groups = "groups", "warps"
    fp8 = [None]
    add(
        "per_token_cast_to_fp8",
        f"{HIDDEN}, groups of 32",
        lambda t: cast("fp8", 32, t),
        fp8,
        *of_groups,
    )
    add(
        "per_token_cast_to_fp8",
        f"{HIDDEN}, groups of 128",
        lambda t: cast("fp8", 128, t),
        [None],
        *of_groups,
    )
    pairs = [None, (64, 2, 16)]
    add(
        "per_token_cast_to_fp4",
        f"{HIDDEN}, MXFP4",
        lambda t: cast("mxfp4", 32, t),
        pairs,
        *of_groups,
        "pairs",
    )
    pairs = [None, (128, 2, 8)]
    add(
        "per_token_cast_to_fp4",
        f"{HIDDEN}, e4m3 scales",
        lambda t: cast("nvfp4", 16, t),
        pairs,
        *of_groups,
        "pairs",
    )
    side = "side by side", "warps"
    small = [None, (8, 4)]
    add("per_block_cast_to_fp8", f"{HIDDEN}, 32x32", lambda t: blocks((32, 32), t), small, *side)
    add(
        "per_block_cast_to_fp8",
        f"{HIDDEN}, 128x128",
        lambda t: blocks((128, 128), t),
        [None],
        *side,
    )
    for shape, format, block in (
        ("e4m3 1x32", "fp8", (1, 32)), ("e4m3 32x32", "fp8", (32, 32)), ("MXFP4", "mxfp4", (1, 32)),
        ("e2m1 with e4m3 scales", "nvfp4", (1, 16)),
    ):  # fmt: skip
        add(
            "cast_back",
            f"{HIDDEN}, {shape}",
            lambda t, f=format, b=block: back(f, b, t),
            [None],
            *of_groups,
        )
    forms = [None]
    add(
        "silu_and_mul_quant",
        f"{INNER}, fp8 32, clamp, weights",
        lambda t: swiglu("fp8", 32, t),
        forms,
        *of_groups,
    )
    add("silu_and_mul", f"{INNER}", lambda t: swiglu("none", 32, t), [None], *of_groups)
    add(
        "silu_and_mul_quant",
        f"{INNER}, fp8 128, clamp, weights",
        lambda t: swiglu("fp8", 128, t),
        [None],
        *of_groups,
    )
    for format in ("mxfp4", "nvfp4"):
        group = 16 if format == "nvfp4" else 32
        add(
            "silu_and_mul_quant",
            f"{INNER}, {format}, clamp, weights",
            lambda t, f=format, g=group: swiglu(f, g, t),
            [None],
            *of_groups,
        )
    build = swiglu("mxfp4", 32, (16, 1, 2), True)
    name = f"{MANY} x {INNER}, mxfp4, clamp, weights"
    found.append(Case("silu_and_mul_quant", name, "as torch, in pairs", build, check_only=True))
    found.append(Case("quant", "contract", "rows", contract, check_only=True))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for width in (1280, 96, 200):
            name = f"{str(dtype).removeprefix('torch.')}, {width} channels"
            found.append(Case("quant", "contract", name, layouts(dtype, width), check_only=True))
    return found
