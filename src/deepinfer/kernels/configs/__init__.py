"""Sizes of tiles for shapes and devices, measured beforehand: nothing is tuned while it runs."""
