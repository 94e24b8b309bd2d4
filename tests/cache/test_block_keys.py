from __future__ import annotations

import dataclasses
import hashlib
import struct
from array import array

import numpy as np
import pytest

from deepinfer.cache import BlockHasher, CacheIdentity, MediaSpan, block_key
from deepinfer.core.errors import InvariantBroken


def test_keys_are_chained_sha256_of_little_endian_ids() -> None:
    root = CacheIdentity().root_key()
    ids = [1, 70_000, 3, 2**31 - 1]
    first = hashlib.sha256(root + struct.pack("<2i", *ids[:2])).digest()
    second = hashlib.sha256(first + struct.pack("<2i", *ids[2:])).digest()
    assert BlockHasher(root, 2).extend(ids, 2) == [first, second]
    assert block_key(first, ids[2:]) == second


def test_every_field_of_the_identity_and_the_salt_change_the_root() -> None:
    base = CacheIdentity(model=b"m", revision="r", layout=b"l", adapter="a", determinism="d")
    roots = {base.root_key(), base.root_key("tenant"), base.root_key("other")}
    for field in dataclasses.fields(base):
        value = getattr(base, field.name)
        roots.add(dataclasses.replace(base, **{field.name: value + value}).root_key())
    # A field that ends where the next one begins must not look the same.
    roots.add(dataclasses.replace(base, model=b"mr", revision="").root_key())
    assert len(roots) == 3 + 5 + 1


@pytest.mark.parametrize("convert", [list, tuple, lambda x: array("i", x), np.int32, np.int64])
def test_any_sequence_of_ids_gives_the_same_keys(convert) -> None:
    ids = [(i * 7919) % 129_280 for i in range(40)]
    hasher = BlockHasher(b"root", 4)
    given = np.array(ids, dtype=convert) if isinstance(convert, type(np.int32)) else convert(ids)
    hasher.extend(given, 3)
    assert hasher.extend(given, 10) == BlockHasher(b"root", 4).extend(ids, 10)


def test_a_strided_buffer_is_read_by_its_elements() -> None:
    wide = np.arange(32, dtype=np.int32)
    assert BlockHasher(b"r", 4).extend(wide[::2], 4) == BlockHasher(b"r", 4).extend(
        list(range(0, 32, 2)), 4
    )


def test_only_new_full_blocks_are_hashed() -> None:
    calls = []

    def counting(data: bytes) -> bytes:
        calls.append(data)
        return hashlib.sha256(data).digest()

    hasher = BlockHasher(b"root", 4, hash_fn=counting)
    ids = list(range(11))
    hasher.extend(ids, 1)
    hasher.extend(ids, 2)
    hasher.extend(ids, 2)
    assert len(calls) == 2
    with pytest.raises(InvariantBroken, match="3 blocks of 4 tokens were asked for"):
        hasher.extend(ids, 3)
    hasher.truncate(1)
    assert len(hasher.extend(ids, 2)) == 2
    assert hasher.matches(ids, 0, 9)
    assert not hasher.matches([*ids[:5], 99, *ids[6:]], 0, 2)


@pytest.mark.parametrize("convert", [list, lambda x: array("i", x), lambda x: np.array(x, "i4")])
def test_ids_that_are_not_known_yet_are_refused(convert) -> None:
    with pytest.raises(InvariantBroken, match="from position 4 is not from 0"):
        BlockHasher(b"root", 4).extend(convert([1, 2, 3, 4, 5, -1, 7, 8]), 2)
    with pytest.raises(InvariantBroken):
        BlockHasher(b"root", 1).extend([2**31], 1)


def test_media_enter_the_blocks_that_they_overlap() -> None:
    ids = [5] * 16
    plain = BlockHasher(b"root", 4).extend(ids, 4)
    image = BlockHasher(b"root", 4, media=[MediaSpan(start=5, end=9, digest=b"x")])
    keys = image.extend(ids, 4)
    assert keys[0] == plain[0]
    assert image.extras[0] == image.extras[3] == b""
    assert image.extras[1] != image.extras[2] != b""
    other = BlockHasher(b"root", 4, media=[MediaSpan(start=5, end=9, digest=b"y")])
    assert set(other.extend(ids, 4)[1:]).isdisjoint(keys)
    moved = BlockHasher(b"root", 4, media=[MediaSpan(start=6, end=10, digest=b"x")])
    assert set(moved.extend(ids, 4)[1:]).isdisjoint(keys)
    assert block_key(keys[0], ids[4:8], [(1, b"x")]) == keys[1]
    assert block_key(keys[1], ids[8:12], [(-3, b"x")]) == keys[2]
    assert block_key(b"p", [1], [(2, b"b"), (1, b"c")]) == block_key(
        b"p", [1], [(1, b"c"), (2, b"b")]
    )
