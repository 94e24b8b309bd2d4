"""Sizes of tiles for shapes and devices, measured beforehand: nothing is tuned while it runs."""

from __future__ import annotations

__all__: list[str] = []
