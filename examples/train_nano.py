"""Trains the embedded `nano` checkpoint from scratch.

    python examples/train_nano.py data --out build/nano            # on any machine, a minute
    python examples/train_nano.py train --data build/nano --out build/nano-out    # one GPU, about 20 minutes
    python examples/train_nano.py export --train-out build/nano-out --data build/nano --out my-nano

`data` reads the running interpreter's standard library (and, if given, the documentation's sources
and further releases' standard libraries), writes generated documents, trains the tokenizer and
stores token streams. `train` fits the trunk, then the DSpark draft on the frozen trunk. `export`
writes the published, quantised layout.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    data = commands.add_parser("data", help="collect text, train the tokenizer, encode")
    data.add_argument("--out", type=Path, required=True)
    data.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    data.add_argument(
        "--more-stdlib", type=Path, nargs="*", default=[], help="other releases' lib folders"
    )
    data.add_argument("--docs", type=Path, help="folder of the Python documentation's .rst sources")
    data.add_argument("--task-characters", type=int, default=24_000_000)
    data.add_argument("--seed", type=int, default=0)

    train = commands.add_parser("train", help="train trunk and draft on one GPU")
    train.add_argument("--data", type=Path, required=True)
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--steps", type=int, default=3000)
    train.add_argument("--draft-steps", type=int, default=1500)
    train.add_argument(
        "--own-rows", type=int, default=2048, help="own continuations the draft learns from"
    )
    train.add_argument("--batch", type=int, default=16)
    train.add_argument("--context", type=int, default=2048)
    train.add_argument("--muon-lr", type=float, default=4e-3)
    train.add_argument("--adam-lr", type=float, default=2e-3)
    train.add_argument("--dropout", type=float, default=0.1)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--eager", action="store_true", help="without torch.compile")
    train.add_argument("--log-every", type=int, default=50)
    train.add_argument("--resume-trunk", type=Path, help="skip trunk training, load these weights")

    export = commands.add_parser("export", help="write the published layout")
    export.add_argument("--data", type=Path, required=True)
    export.add_argument("--train-out", type=Path, required=True)
    export.add_argument("--out", type=Path, required=True)
    return parser


def main() -> None:
    """Runs one command."""
    options = build_parser().parse_args()
    if options.command == "data":
        from nano.data import prepare

        prepare(options)
    elif options.command == "train":
        from nano.training import train

        train(options)
    else:
        from nano.data import export_folder

        export_folder(options)


if __name__ == "__main__":
    main()
