"""Parts of `nano_quality.py`: how good a checkpoint is, as figures that can be recorded and compared."""
