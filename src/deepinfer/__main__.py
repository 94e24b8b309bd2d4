"""Command line: `python -m deepinfer env|models`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer import __version__, env

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Command-line arguments; the process's own when None.

    Returns:
        Exit status, 0 for success.
    """
    parser = argparse.ArgumentParser(prog="python -m deepinfer", description="Tools of deepinfer.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("env", help="report the environment")
    report.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("models", help="list the checkpoints that come with the package")
    options = parser.parse_args(argv)
    if options.command == "env":
        return env.main(["--json"] if options.json else [])
    return env.write_out(
        "\n".join(f"{name}  {size / 2**20:.1f} MiB" for name, size in _embedded_models())
    )


def _embedded_models() -> list[tuple[str, int]]:
    folder = Path(__file__).parent / "assets"
    return [
        (config.parent.name, sum(f.stat().st_size for f in config.parent.iterdir() if f.is_file()))
        for config in sorted(folder.glob("*/config.json"))
    ]


if __name__ == "__main__":
    sys.exit(main())
