"""Products of many bf16 tokens on Hopper, in the order of `triton_linear`.

`linear_kernel` and `gemm_tall_kernel` give every element the same sum in fp32: the tensor cores add 16 channels at a
time, from the first to the last, of each part of the weight's channels, and the sums of the parts are added from the
first to the last. That one has the weights as its left operand and this one the tokens makes no difference to a sum of
products. So the number of tokens may choose between them; the parts hang on the weight's shape alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels import contract
from deepinfer.kernels.configs import gemm as configs

__all__ = ["MANY_TOKENS", "multiply", "serves"]

MANY_TOKENS = 513
"""From so many tokens on, the kernel for many tokens is the faster one."""


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel for many tokens takes this product.

    Args:
        x: Rows, shape [tokens, in_channels], last stride 1.
        weight: Matrix, shape [out_channels, in_channels], last stride 1.
    """
    if len(x) < MANY_TOKENS or x.dtype is not torch.bfloat16 or weight.shape[0] <= 1024:
        return False
    if x.shape[1] % 16 or not weight.is_contiguous() or x.stride(0) % 8:
        return False
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    return contract.gluon_refusal(x, weight) is None


def multiply(x: Tensor, weight: Tensor, out: Tensor, part_k: int) -> None:
    """Writes the product.

    Args:
        x: Rows, shape [tokens, in_channels], bf16.
        weight: Matrix, shape [out_channels, in_channels], bf16.
        out: Shape [tokens, out_channels], bf16, last stride 1.
        part_k: Channels of a part, a multiple of 64 or all of them.
    """
    from deepinfer.kernels.triton.gemm_launch import TallTuning, gemm_tall

    sizes = TallTuning(
        *configs.TALL_BF16[-1][4]
    )  # of tiles: the order of a sum is the same in all of them
    gemm_tall(x, None, weight[None], None, None, out, sizes, part_k)
