"""Plain torch implementations: what every faster kernel is compared with."""

from __future__ import annotations

__all__: list[str] = []
