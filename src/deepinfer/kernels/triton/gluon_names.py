"""Names of Gluon that changed between the versions of Triton that are supported."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

__all__ = ["block_barrier", "copy_elements", "load_tile", "write_tile", "written_tiles"]

# Called async_copy_global_to_shared and thread_barrier up to Triton 3.6; the same arguments.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copies a tile from global to shared memory through a tensor descriptor, and counts its bytes at a barrier."""

write_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Copies a tile from shared to global memory through a tensor descriptor while the threads go on."""

written_tiles = tma.store_wait
"""Waits until all but the last some tiles that `write_tile` copies were read, so that their room is free."""

block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Makes the threads of a program wait for each other."""

copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Copies elements from pointers to shared memory while the threads go on."""
