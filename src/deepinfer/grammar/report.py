"""What a front end did with each part of its input: enforced, approximated, or left aside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Report", "ReportEntry", "Status"]

Status = Literal["enforced", "approximated", "ignored"]
"""What happened to one part of the input.

"enforced": every output obeys it. "approximated": the grammar accepts fewer outputs than the input allows, or more; the
note says which. "ignored": it restricts nothing.
"""


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One keyword, directive or construct of the input.

    Attributes:
        path: Where it stands: a JSON pointer in a schema, `line:column` in a grammar text.
        keyword: The keyword or construct, such as "minLength" or "priority".
        status: What happened to it.
        note: Why, in words; empty when there is nothing to say.
    """

    path: str
    keyword: str
    status: Status
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.path or '/'}: {self.keyword} {self.status}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, slots=True)
class Report:
    """The entries of one grammar, in the order of the input.

    Attributes:
        entries: The entries. Front ends whose whole input is enforced list nothing.
    """

    entries: tuple[ReportEntry, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether everything listed is enforced."""
        return all(entry.status == "enforced" for entry in self.entries)

    def by_status(self, status: Status) -> tuple[ReportEntry, ...]:
        """Entries of one status.

        Args:
            status: The status.

        Returns:
            The entries that have it, in order.
        """
        return tuple(entry for entry in self.entries if entry.status == status)

    def __iter__(self) -> Iterator[ReportEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __add__(self, other: Report) -> Report:
        return Report(self.entries + other.entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries))
