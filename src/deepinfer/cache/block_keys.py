"""Names of blocks: chained digests of everything that their content depends on.

The key of a block is the digest of its parent's key, its token ids as little-endian int32, and the images and other
media that overlap it. The key of the first block's parent, the root, names the model, its weights, the layout of a
block, the adapter, the tenant, and the class of determinism. What changes no content stays out: windows, step depth,
chunk sizes, degrees of parallelism.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepinfer.core.errors import InvariantBroken

__all__ = [
    "BlockHasher",
    "CacheIdentity",
    "HashFn",
    "MediaSpan",
    "block_key",
    "encode_media",
    "sha256",
]

HashFn = Callable[[bytes], bytes]
"""Digest of some bytes; all digests of one function have the same length."""

_VERSION = b"deepinfer-kv-1"


def sha256(data: bytes) -> bytes:
    """SHA-256, the digest that keys are made with.

    Args:
        data: Any bytes.

    Returns:
        32 bytes.
    """
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """Positions of a sequence that stand for an image or other media.

    Attributes:
        start: First position.
        end: Position after the last one.
        digest: Digest of the content and of how it is preprocessed.
    """

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Everything besides tokens and media that the content of a block depends on.

    Attributes:
        model: Fingerprint of weights and number formats, `ModelInfo.fingerprint`.
        revision: Revision of the weights; changes when they are replaced while the engine runs.
        layout: `CacheLayout.fingerprint()`.
        adapter: Name and revision of an adapter such as a LoRA, or "".
        determinism: Class of the numbers: entries of different classes are never mixed.
    """

    model: bytes = b""
    revision: str = ""
    layout: bytes = b""
    adapter: str = ""
    determinism: str = "default"

    def root_key(self, salt: str | None = None, hash_fn: HashFn = sha256) -> bytes:
        """The key that the first block of a sequence has as its parent.

        Args:
            salt: `Request.cache_salt`: sequences share entries only when it is equal.
            hash_fn: Digest to use.

        Returns:
            The key.
        """
        fields = (
            self.model,
            self.revision.encode(),
            self.layout,
            self.adapter.encode(),
            self.determinism.encode(),
            b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass"),
        )
        return hash_fn(_VERSION + b"".join(struct.pack("<I", len(f)) + f for f in fields))


def block_key(
    parent: bytes,
    token_ids: Sequence[int],
    media: Sequence[tuple[int, bytes]] = (),
    hash_fn: HashFn = sha256,
) -> bytes:
    """The key of one block.

    Args:
        parent: Key of the block before it, or the root key.
        token_ids: Its token ids, each from 0 to 2**31 - 1.
        media: Offset in the block, negative when it began in an earlier one, and digest of each piece of media that
            overlaps it.
        hash_fn: Digest to use.

    Returns:
        The key.

    Examples:
        >>> root = CacheIdentity().root_key()
        >>> block_key(root, [1, 2, 3, 4]) == BlockHasher(root, 4).extend([1, 2, 3, 4], 1)[0]
        True
    """
    ids = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hash_fn(parent + ids + encode_media(media))


def encode_media(media: Sequence[tuple[int, bytes]]) -> bytes:
    """Media of a block as bytes, sorted by offset, then by digest; empty without any.

    Args:
        media: Offset and digest of each piece.

    Returns:
        The bytes that enter the block's key.
    """
    return b"".join(
        struct.pack("<qI", offset, len(digest)) + digest for offset, digest in sorted(media)
    )


class BlockHasher:
    """Keys of the full blocks of one growing sequence; each block is hashed once, when it is asked for.

    Args:
        root: Key before the first block.
        block_size: Tokens in one block.
        media: Media in the sequence.
        hash_fn: Digest to use; another one than SHA-256 is for tests of collisions.

    Attributes:
        keys: Keys of the blocks hashed so far.
        ids: Token ids of these blocks, each as little-endian int32 bytes.
        extras: What media adds to each key, empty for most.

    Examples:
        >>> hasher = BlockHasher(b"root", 2)
        >>> len(hasher.extend([7, 8, 9, 10, 11], 2)), len(hasher.extend([7, 8, 9, 10, 11, 12], 3))
        (2, 3)
    """

    __slots__ = ("_media", "_pack", "block_size", "extras", "hash_fn", "ids", "keys", "root")

    def __init__(
        self,
        root: bytes,
        block_size: int,
        *,
        media: Sequence[MediaSpan] = (),
        hash_fn: HashFn = sha256,
    ) -> None:
        self.root = root
        self.block_size = block_size
        self.hash_fn = hash_fn
        self.keys: list[bytes] = []
        self.ids: list[bytes] = []
        self.extras: list[bytes] = []
        self._media = tuple(media)
        # Unsigned, so that packing refuses the negative ids that stand for tokens not known yet.
        self._pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """Hashes the blocks that are missing from the first `num_blocks`.

        Args:
            token_ids: The sequence from its beginning: a contiguous buffer of int32 (`array("i")`, NumPy), which is
                fastest, or any sequence of integers.
            num_blocks: Blocks wanted; ids behind them are not looked at.

        Returns:
            The keys of all blocks hashed so far, the same list each time.

        Raises:
            InvariantBroken: An id is negative or above 2**31 - 1, or there are too few.
        """
        size = self.block_size
        keys, count = self.keys, len(self.keys)
        if count >= num_blocks:
            return keys
        if len(token_ids) < num_blocks * size:
            raise InvariantBroken(
                f"{num_blocks} blocks of {size} tokens were asked for, and there are "
                f"{len(token_ids)} tokens."
            )
        raw = _int32_bytes(token_ids, count * size, num_blocks * size)
        plain = self.hash_fn is sha256
        parent = keys[-1] if keys else self.root
        for index in range(count, num_blocks):
            start = index * size
            if raw is None:
                ids = self._packed(token_ids[start : start + size], start)
            else:
                ids = raw[(start - count * size) * 4 : (start - count * size + size) * 4]
            if not ids[3::4].isascii():  # the high bytes: an id with the highest bit set is none
                _refuse_ids(start, size)
            extras = self._extras(start) if self._media else b""
            data = parent + ids + extras if extras else parent + ids
            parent = hashlib.sha256(data).digest() if plain else self.hash_fn(data)
            keys.append(parent)
            self.ids.append(ids)
            self.extras.append(extras)
        return keys

    def matches(self, token_ids: Sequence[int], first: int, end: int) -> bool:
        """Whether the hashed blocks `first` to `end` are those of `token_ids`.

        Args:
            token_ids: A sequence from its beginning.
            first: First block to compare.
            end: Block after the last one to compare; those not hashed yet are skipped.

        Returns:
            Whether all compared ids are equal.
        """
        size = self.block_size
        return all(
            self._packed(token_ids[i * size : (i + 1) * size], i * size) == self.ids[i]
            for i in range(first, min(end, len(self.ids)))
        )

    def truncate(self, num_blocks: int) -> None:
        """Forgets all but the first blocks.

        Args:
            num_blocks: Blocks to keep.
        """
        del self.keys[num_blocks:], self.ids[num_blocks:], self.extras[num_blocks:]

    def _packed(self, token_ids: Sequence[int], start: int) -> bytes:
        try:
            return self._pack(*token_ids)
        except struct.error:
            return _refuse_ids(start, len(token_ids))

    def _extras(self, start: int) -> bytes:
        end = start + self.block_size
        return encode_media(
            [(m.start - start, m.digest) for m in self._media if m.start < end and m.end > start]
        )


def _refuse_ids(start: int, count: int) -> bytes:
    raise InvariantBroken(
        f"an id among the {count} tokens from position {start} is not from 0 to 2**31 - 1: a token that "
        f"is not known yet was taken for a final one."
    )


def _int32_bytes(token_ids: Sequence[int], first: int, end: int) -> bytes | None:
    """The bytes of a part of a contiguous little-endian int32 buffer, or None for anything else."""
    if isinstance(token_ids, list | tuple) or sys.byteorder != "little":
        return None
    try:
        view = memoryview(token_ids)  # type: ignore[arg-type]
    except TypeError:
        return None
    if (view.format, view.itemsize, view.ndim) != ("i", 4, 1) or not view.c_contiguous:
        return None
    return bytes(view[first:end])
