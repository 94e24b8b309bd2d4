"""Kernels in Triton for CUDA GPUs; each has a twin of the same name in `deepinfer.kernels.reference`."""
