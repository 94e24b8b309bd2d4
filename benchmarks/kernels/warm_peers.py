"""Compiles FlashInfer's kernels that the benchmarks call, so that timing does not wait for them; run it beside the checks."""

from __future__ import annotations

import os
import time
import traceback

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
os.environ.setdefault("MAX_JOBS", "12")

import torch


def main() -> None:
    """Calls each function once on small data."""
    import flashinfer as fi

    x = torch.randn(2, 4096, device="cuda")
    h = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.ones(512, device="cuda", dtype=torch.bfloat16)
    calls = {
        "top_k bf16": lambda: fi.top_k(x.bfloat16(), 64),
        "top_k fp32": lambda: fi.top_k(x, 64),
        "sampling": lambda: fi.sampling.top_k_top_p_sampling_from_logits(x, 50, 0.95),
        "sampling_from_logits": lambda: fi.sampling.sampling_from_logits(x),
        "rmsnorm": lambda: fi.norm.rmsnorm(h, w),
        "fused_add_rmsnorm": lambda: fi.norm.fused_add_rmsnorm(h, h.clone(), w),
        "silu_and_mul": lambda: fi.activation.silu_and_mul(h),
    }
    for name, call in calls.items():
        begin = time.time()
        try:
            call()
            torch.cuda.synchronize()
            print(f"warm {name} {time.time() - begin:.0f} s", flush=True)
        except Exception:
            print(f"cold {name}: {traceback.format_exc()[-700:]}", flush=True)


if __name__ == "__main__":
    main()
