"""Stop strings in streamed text, across any token borders."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from deepinfer.core.protocols import IncrementalDetokenizer

__all__ = ["OutputText", "StopChecker"]


class StopChecker:
    """Lets text through until a stop string is complete.

    The text ends at the stop string that is complete first, as if it came one character at a time, so the result
    does not depend on how the text was cut into pieces; of several that are complete at the same character the
    longest counts. Held back is only the end of the text that may still become a stop string, and what was let
    through is never taken back.

    Args:
        stop: The stop strings, none of them empty.
        include_stop: Let the stop string itself through as well; nothing is held back then.

    Examples:
        >>> checker = StopChecker(["b,c"])
        >>> [checker.push(piece) for piece in ("a b", ",", "c d")], checker.matched
        (['a ', '', ''], 'b,c')
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop))
        self._include = include_stop
        self._borders = [_Borders(text) for text in self._stops]
        self._states = [0] * len(self._stops)
        firsts = "".join(re.escape(text[0]) for text in self._stops)
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, or None."""

    @property
    def held(self) -> str:
        """Text that is held back because it may be the beginning of a stop string."""
        return self._held

    def push(self, text: str) -> str:
        """Takes more text.

        Args:
            text: Any piece of text; ignored once a stop string was found.

        Returns:
            The text that may be shown.
        """
        if self.matched is not None or not text:
            return ""
        if self._first is None:
            return text
        whole = self._held + text
        end = self._scan(text)
        if end is not None:
            end += len(self._held)
            self._held = ""
            matched = self.matched or ""
            shown = whole[: end if self._include else end - len(matched)]
            return shown[len(whole) - len(text) :] if self._include else shown
        if self._include:
            return text
        keep = max(self._states)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """Ends the text.

        Returns:
            What was held back, unless a stop string was found.
        """
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _scan(self, text: str) -> int | None:
        """Advances over the text; the end of the first match in it, or None."""
        states = self._states
        index = 0
        while index < len(text):
            if not any(states):
                found = self._first.search(text, index) if self._first else None
                if found is None:
                    return None
                index = found.start()
            char = text[index]
            index += 1
            best = ""
            for number, stop in enumerate(self._stops):
                state = states[number]
                borders = self._borders[number]
                while state and stop[state] != char:
                    state = borders.of(state)
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    best = max(best, stop, key=len)
                    state = borders.of(state)
                states[number] = state
            if best:
                self.matched = best
                return index
        return None


class _Borders:
    """For each prefix of a text, the length of its longest proper prefix that is also its suffix.

    Computed as far as somebody asks: most stop strings are never begun, and there may be many long ones.
    """

    __slots__ = ("_known", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._known = [0]

    def of(self, length: int) -> int:
        """The border of the first `length` characters, from 1."""
        text, known = self._text, self._known
        state = known[-1]
        for index in range(len(known), length):
            while state and text[index] != text[state]:
                state = known[state - 1]
            state += text[index] == text[state]
            known.append(state)
        return known[length - 1]


class OutputText:
    """Text of one output as its tokens come: detokenised, stopped, and never taken back.

    Args:
        detokenizer: A fresh `IncrementalDetokenizer`.
        stop: Stop strings.
        include_stop: Whether the text ends with the stop string that was found.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._checker = StopChecker(stop, include_stop=include_stop)
        self._has_stops = bool(stop)
        self._shown: list[str] = []
        self._shown_chars = 0
        self._decoded_chars = 0
        self._ids: list[int] = []
        self._ends: list[int] = []

    def push_one(self, token_id: int) -> str:
        """Takes one token; as `push` of it.

        Args:
            token_id: Its id.

        Returns:
            The text that may be shown.

        Raises:
            ConfigError: The id is outside the vocabulary.
        """
        if self._has_stops:
            return self.push((token_id,))
        text = self._detokenizer.push(token_id)
        self._ids.append(token_id)
        if text:
            self._shown.append(text)
        return text

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; those after the one that completes a stop string are not taken.

        Args:
            token_ids: Their ids.

        Returns:
            The text that may be shown.

        Raises:
            ConfigError: An id is outside the vocabulary.
        """
        out: list[str] = []
        for token in token_ids:
            if self.stop_reason is not None:
                break
            piece = self._detokenizer.push(token)
            self._decoded_chars += len(piece)
            self._ids.append(token)
            self._ends.append(self._decoded_chars)
            out.append(self._checker.push(piece))
        return self._show("".join(out))

    def finish(self) -> str:
        """Ends the output: lets out what was held back and what is left of an unfinished character.

        Returns:
            The last text; nothing after a stop string, and nothing when called again.
        """
        if self.stop_reason is not None:
            return ""
        return self._show(self._checker.push(self._detokenizer.finish()) + self._checker.finish())

    def _show(self, text: str) -> str:
        self._shown_chars += len(text)
        if text:
            self._shown.append(text)
        return text

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._shown)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found, or None."""
        return self._checker.matched

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens taken; the last one completed the stop string when there is a stop reason."""
        return tuple(self._ids)

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """The shortest prefix of `token_ids` whose decoding starts with `text`.

        Its last token may also spell the beginning of the stop string, because tokens cannot be cut.
        """
        if self.stop_reason is None:
            return self.token_ids
        if not self._shown_chars:
            return ()
        return tuple(self._ids[: bisect_left(self._ends, self._shown_chars) + 1])
