"""The tags of a tool block in a text that comes piece by piece."""

from __future__ import annotations

import re

from deepinfer.engine.chat_format import DSML, EOS

__all__ = ["TAG_STARTS", "TagBuffer", "read_tag"]

TAG_STARTS = (f"<{DSML}", f"</{DSML}")
"""How every tag begins."""

_MAX_TAG_CHARS = 1024
_TAG = re.compile(rf"<(/?){DSML}\s*(\w+)((?:\s+\w+=\"[^\"]*\")*)\s*>")
_ATTRIBUTE = re.compile(r"(\w+)=\"([^\"]*)\"")


def read_tag(tag: str) -> tuple[bool, str, dict[str, str]]:
    """Takes a tag apart.

    Args:
        tag: What `TagBuffer.tag_at` returned.

    Returns:
        Whether it closes, its name ("" when it is only the start of one) and its attributes.
    """
    match = _TAG.fullmatch(tag)
    if not match:
        return False, "", {}
    return bool(match.group(1)), match.group(2), dict(_ATTRIBUTE.findall(match.group(3)))


class TagBuffer:
    """Text that was received and not yet read.

    Every question is answered in a way that later text cannot change, or with "not yet"; after `close` nothing
    more comes, so what might have become a marker is text.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        """Characters consumed so far."""
        self.closed = False

    def close(self) -> None:
        """Notes that no more text comes."""
        self.closed = True

    def consume(self, count: int) -> str:
        """Takes characters off the front.

        Args:
            count: How many.

        Returns:
            Those characters.
        """
        text, self.text = self.text[:count], self.text[count:]
        self.position += len(text)
        return text

    def skip_space(self) -> None:
        """Takes white space off the front."""
        self.consume(len(self.text) - len(self.text.lstrip()))

    def find(self, markers: tuple[str, ...]) -> tuple[int, str]:
        """Looks for the first of some markers.

        Args:
            markers: What to look for.

        Returns:
            Its place and itself; without one, the number of characters that can be no part of one, and "".
        """
        best, found = len(self.text), ""
        for marker in markers:
            at = self.text.find(marker)
            if at != -1 and at < best:
                best, found = at, marker
        if found or self.closed:
            return best, found
        return self.safe_length(markers, best), ""

    def safe_length(self, markers: tuple[str, ...], end: int) -> int:
        """Number of characters before an end that may be the beginning of a marker.

        Args:
            markers: The markers.
            end: Where to look, a place in the text.

        Returns:
            From 0 to `end`.
        """
        longest = max(map(len, markers)) - 1
        for start in range(max(0, end - longest), end):
            tail = self.text[start:end]
            if any(marker.startswith(tail) for marker in markers):
                return start
        return end

    def before_newlines(self, at: int) -> int:
        """Steps back over newlines that belong to a tool block when one follows.

        Args:
            at: A place in the text.

        Returns:
            That place, or up to two newlines before it.
        """
        if self.closed and at == len(self.text):
            return at
        start = at
        while start > 0 and at - start < 2 and self.text[start - 1] == "\n":
            start -= 1
        return start

    def drop_cut_tag(self) -> bool:
        """Drops a tag at the front that the end of the text, or the end-of-sentence token, cut off.

        Returns:
            Whether there was one.
        """
        end = len(self.text) if self.closed else -1
        at = self.text.find(EOS)
        end = at if at != -1 else end
        if end == -1 or ">" in self.text[:end] or end >= _MAX_TAG_CHARS:
            return False
        self.consume(end)
        return True

    def tag_at(self, at: int) -> str | None:
        """Reads a tag.

        Args:
            at: Where one of `TAG_STARTS` stands.

        Returns:
            The whole tag; None while it may still come, or might have come when the text ended; the start alone
            when it can be no tag.
        """
        rest = self.text[at : at + _MAX_TAG_CHARS]
        match = _TAG.match(rest)
        if match:
            return match.group()
        end = rest.find(">")
        might_come = end == -1 or rest[:end].count('"') % 2 == 1
        if might_come and len(rest) < _MAX_TAG_CHARS:
            return None
        return next(start for start in TAG_STARTS if rest.startswith(start))
