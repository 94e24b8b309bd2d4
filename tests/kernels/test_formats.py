"""Byte formats of caches: sizes of the published tables, offsets that neither overlap nor leave a page."""

from __future__ import annotations

import pytest

from deepinfer.core.errors import ConfigError
from deepinfer.kernels.formats import KVCacheFormat

SIZES = {
    "V32_FP8": (656, 576),
    "V4_FP8": (584, 512),
    "V41_MXFP8": (528, 512),
    "V41_NVFP4": (288, 512),
    "INDEXER_FP8": (132, 128),
    "INDEXER_MXFP4": (68, 128),
}


@pytest.mark.parametrize("form", list(KVCacheFormat), ids=lambda f: f.name)
def test_sizes_are_the_published_ones(form: KVCacheFormat) -> None:
    assert (form.bytes_per_token, form.channels) == SIZES[form.name]


def test_members_are_not_aliases_of_each_other() -> None:
    assert len(list(KVCacheFormat)) == len(SIZES)


@pytest.mark.parametrize("page_size", [1, 2, 5, 61, 64, 256])
@pytest.mark.parametrize("form", list(KVCacheFormat), ids=lambda f: f.name)
def test_rows_tile_a_page(form: KVCacheFormat, page_size: int) -> None:
    size = form.page_bytes(page_size)
    used = bytearray(size)
    for slot in range(page_size, 2 * page_size):
        page, row = form.row_offset(slot, page_size)
        page_of_scale, scale = form.scale_offset(slot, page_size)
        assert page == page_of_scale == 1
        parts = [
            (row, form.code_bytes),
            (row + form.tail_offset, 2 * form.tail_channels),
            (scale, form.scale_bytes),
        ]
        for at, count in parts:
            assert at + count <= size
            for i in range(at, at + count):
                used[i] += 1
    assert max(used) == 1
    assert sum(used) == page_size * form.bytes_per_token


def test_pages_of_the_v4_record_are_padded() -> None:
    assert KVCacheFormat.V4_FP8.page_bytes(64) == 65 * 576
    assert KVCacheFormat.V4_FP8.page_bytes(72) == 73 * 576
    assert KVCacheFormat.V41_MXFP8.page_bytes(64) == 64 * 528


def test_a_page_has_a_row() -> None:
    with pytest.raises(ConfigError, match="page_size is 0"):
        KVCacheFormat.V41_MXFP8.page_bytes(0)
