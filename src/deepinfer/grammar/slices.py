"""Parts of a vocabulary whose masks are made once: tokens that are all digits, all letters, all plain string text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.grammar.trie import TokenTrie

if TYPE_CHECKING:
    from deepinfer.grammar.mask_splits import TrieSplits

__all__ = ["CharacterSet", "Residue", "Slice", "build_slices"]

DEAD = 0
BOUNDARY = 1


@dataclass(frozen=True)
class CharacterSet:
    """A set of characters as a table over bytes.

    Attributes:
        name: What it is called.
        table: Next state of each state and byte, shape [states, 256], uint8: state 0 is dead, 1 stands between two
            characters, the others are inside of one.
    """

    name: str
    table: NDArray[np.uint8]

    @cached_property
    def first_bytes(self) -> bytes:
        """The bytes that begin a character."""
        return np.flatnonzero(self.table[BOUNDARY]).astype(np.uint8).tobytes()

    @cached_property
    def rows(self) -> list[list[int]]:
        """The table as Python lists."""
        out: list[list[int]] = self.table.tolist()
        return out

    @cached_property
    def groups(self) -> list[list[tuple[int, bytes]]]:
        """Per state: (next state that is not dead, the bytes that lead to it)."""
        return [
            [
                (int(after), np.flatnonzero(row == after).astype(np.uint8).tobytes())
                for after in np.unique(row)
                if after != DEAD
            ]
            for row in self.table
        ]


@dataclass(frozen=True)
class Residue:
    """Tokens, by what is left of them behind a common kind of beginning.

    Attributes:
        trie: Trie over the distinct remaining strings.
        offset: Shape [strings + 1], int32: the tokens of remaining string r are `ranks[offset[r] : offset[r + 1]]`.
        ranks: Ranks of the tokens in the vocabulary, int32.
    """

    trie: TokenTrie
    offset: NDArray[np.int32]
    ranks: NDArray[np.int32]

    @cached_property
    def splits(self) -> TrieSplits:
        """Splits of the trie's subtrees."""
        from deepinfer.grammar.mask_splits import TrieSplits

        return TrieSplits(self.trie)


@dataclass(frozen=True)
class Slice:
    """The tokens over a set of characters, and what the other tokens look like behind such characters.

    A token is inside when it is a sequence of whole characters of the set, the last of which may be incomplete. Other
    tokens split into the longest beginning of whole characters and the rest.

    Attributes:
        characters: The set.
        num_chars: Characters of each string of the vocabulary, an incomplete one included; 0 for strings that are not
            inside. Shape [ranks], uint8.
        rests: Tokens outside by the rest behind the beginning. With `covers_start`, tokens whose beginning is empty are
            among them; otherwise they must be walked from the root of the vocabulary's trie, where they are those whose
            first byte begins no character.
        covers_start: As said.
        outside: Tokens outside as whole strings, or None where `covers_start` is False.
    """

    characters: CharacterSet
    num_chars: NDArray[np.uint8]
    rests: Residue
    covers_start: bool
    outside: Residue | None


def _ascii(name: str, members: Iterable[int]) -> CharacterSet:
    table = np.zeros((2, 256), dtype=np.uint8)
    table[BOUNDARY, list(members)] = BOUNDARY
    return CharacterSet(name, table)


def _string_text() -> CharacterSet:
    """What a JSON string holds unescaped: any character but controls, the quote and the backslash, in UTF-8."""
    table = np.zeros((9, 256), dtype=np.uint8)
    one, two, three, after_e0, after_ed, after_f0, after_f4 = range(2, 9)
    table[BOUNDARY, 0x20:0x80] = BOUNDARY
    table[BOUNDARY, [ord('"'), ord("\\")]] = DEAD
    table[BOUNDARY, 0xC2:0xE0] = one
    table[BOUNDARY, 0xE1:0xF0] = two
    table[BOUNDARY, 0xE0] = after_e0
    table[BOUNDARY, 0xED] = after_ed
    table[BOUNDARY, 0xF0] = after_f0
    table[BOUNDARY, 0xF1:0xF4] = three
    table[BOUNDARY, 0xF4] = after_f4
    table[one, 0x80:0xC0] = BOUNDARY
    table[two, 0x80:0xC0] = one
    table[three, 0x80:0xC0] = two
    table[after_e0, 0xA0:0xC0] = one
    table[after_ed, 0x80:0xA0] = one
    table[after_f0, 0x90:0xC0] = two
    table[after_f4, 0x80:0x90] = two
    return CharacterSet("string text", table)


@cache
def any_text() -> CharacterSet:
    """Every character, in UTF-8."""
    table = _string_text().table.copy()
    table[BOUNDARY, :0x80] = BOUNDARY
    return CharacterSet("any text", table)


@cache
def other_characters() -> CharacterSet:
    """The characters of more than one byte."""
    table = _string_text().table.copy()
    table[BOUNDARY, :0x80] = DEAD
    return CharacterSet("other characters", table)


@cache
def _character_sets() -> tuple[CharacterSet, ...]:
    digits = range(ord("0"), ord("9") + 1)
    lower = range(ord("a"), ord("z") + 1)
    upper = range(ord("A"), ord("Z") + 1)
    return (
        _string_text(),
        _ascii("word characters", [*digits, *lower, *upper, ord("_")]),
        _ascii("letters", [*lower, *upper]),
        _ascii("small letters", lower),
        _ascii("digits", digits),
        _ascii("white space", b" \t\n\r"),
    )


def build_slices(trie: TokenTrie, strings: Sequence[bytes]) -> tuple[Slice, ...]:
    """Sorts a vocabulary by each of the built-in sets of characters.

    Args:
        trie: Trie over the strings.
        strings: The distinct strings of the vocabulary in byte order.

    Returns:
        The slices; those over larger sets first.
    """
    sets = _character_sets()
    return tuple(_build(trie, strings, members, n == 0) for n, members in enumerate(sets))


def _build(
    trie: TokenTrie, strings: Sequence[bytes], characters: CharacterSet, covers_start: bool
) -> Slice:
    size = len(trie)
    state = np.zeros(size, dtype=np.uint8)
    chars = np.zeros(size, dtype=np.uint8)
    cut = np.zeros(size, dtype=np.uint8)  # bytes of the longest beginning of whole characters
    state[0] = BOUNDARY
    flat = characters.table.ravel()
    starts = trie.level_start.tolist()
    for level in range(1, len(starts) - 1):
        here = slice(starts[level], starts[level + 1])
        above = trie.parent[here]
        before = state[above]
        now = flat[before.astype(np.int32) * 256 + trie.label_bytes[here]]
        state[here] = now
        chars[here] = chars[above] + ((before == BOUNDARY) & (now != DEAD))
        cut[here] = np.where(now == BOUNDARY, min(level, 255), cut[above])
    nodes, ranks = trie.leaf_nodes
    inside = state[nodes] != DEAD
    num_chars = np.zeros(len(strings), dtype=np.uint8)
    num_chars[ranks[inside]] = chars[nodes[inside]]
    other = ~inside if covers_start else ~inside & (cut[nodes] > 0)
    cuts = cut[nodes[other]].tolist()
    split = [(strings[r][c:], r) for r, c in zip(ranks[other].tolist(), cuts, strict=True)]
    whole = [(strings[r], r) for r in ranks[other].tolist()] if covers_start else None
    return Slice(
        characters,
        num_chars,
        residue_of(split),
        covers_start,
        None if whole is None else residue_of(whole),
    )


def residue_of(pairs: list[tuple[bytes, int]]) -> Residue:
    """Groups strings with ranks by the string."""
    pairs.sort()
    texts: list[bytes] = []
    offset: list[int] = []
    for place, (text, _) in enumerate(pairs):
        if not texts or texts[-1] != text:
            texts.append(text)
            offset.append(place)
    offset.append(len(pairs))
    return Residue(
        TokenTrie.build(texts),
        np.asarray(offset, dtype=np.int32),
        np.asarray([rank for _, rank in pairs], dtype=np.int32),
    )


def slice_arrays(part: Slice) -> dict[str, NDArray[Any]]:
    """The arrays of a slice, for storing it; `slice_from_arrays` takes them."""
    out: dict[str, NDArray[Any]] = {"num_chars": part.num_chars}
    for name, residue in (("rests", part.rests), ("outside", part.outside)):
        if residue is not None:
            out |= {f"{name}.{key}": value for key, value in residue.trie.arrays().items()}
            out |= {f"{name}.offset": residue.offset, f"{name}.ranks": residue.ranks}
    return out


def slices_from_arrays(parts: Sequence[dict[str, NDArray[Any]]]) -> tuple[Slice, ...]:
    """Makes the slices again from what `slice_arrays` returned for each, in order.

    Raises:
        KeyError: An array is missing.
    """
    out = []
    for number, (members, arrays) in enumerate(zip(_character_sets(), parts, strict=True)):
        residues: list[Residue | None] = []
        for name in ("rests", "outside"):
            inner = {
                key.removeprefix(f"{name}."): value
                for key, value in arrays.items()
                if key.startswith(f"{name}.")
            }
            residues.append(
                Residue(TokenTrie.from_arrays(inner), inner["offset"], inner["ranks"])
                if inner
                else None
            )
        rests = residues[0]
        if rests is None:
            raise KeyError("rests")
        out.append(Slice(members, arrays["num_chars"], rests, number == 0, residues[1]))
    return tuple(out)
