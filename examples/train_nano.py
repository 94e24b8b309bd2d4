"""Trains the embedded `nano` checkpoint from scratch.

    python examples/train_nano.py data --out build/nano            # on any machine, a minute
    python examples/train_nano.py train --data build/nano --out build/nano-out    # one GPU, about 20 minutes
    python examples/train_nano.py export --train-out build/nano-out --data build/nano --out my-nano

`data` reads the running interpreter's standard library (and, if given, the documentation's sources
and further releases' standard libraries), writes generated documents, trains the tokenizer and
stores token streams. `train` fits the trunk, then the DSpark draft on the frozen trunk; it saves as it
goes, writes a checkpoint in the published layout after each of the two, and leaves one report.json.
`export` writes that checkpoint again from the saved states.
"""

from __future__ import annotations

import argparse
import math
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
    trunk = train.add_argument_group("trunk")
    trunk.add_argument("--steps", type=int, default=4400)
    trunk.add_argument(
        "--max-seconds", type=float, default=math.inf, help="of the trunk, compiling included"
    )
    trunk.add_argument("--batch", type=int, default=16)
    trunk.add_argument("--context", type=int, default=2048)
    trunk.add_argument("--dropout", type=float, default=0.1)
    trunk.add_argument(
        "--resume-trunk", type=Path, help="a run's --out: train the draft on its newest trunk"
    )
    trunk.add_argument(
        "--continue-trunk",
        action="store_true",
        help="with --resume-trunk: train it to the end first",
    )
    draft = train.add_argument_group("draft")
    draft.add_argument("--draft-steps", type=int, default=30_000)
    draft.add_argument("--draft-max-seconds", type=float, default=math.inf)
    draft.add_argument(
        "--own-rows", type=int, default=2048, help="own continuations the draft learns from"
    )
    draft.add_argument("--own-max-seconds", type=float, default=60.0)
    both = train.add_argument_group("both")
    both.add_argument("--muon-lr", type=float, default=4e-3)
    both.add_argument("--adam-lr", type=float, default=2e-3)
    both.add_argument("--seed", type=int, default=0)
    both.add_argument(
        "--compile", choices=["auto", "inductor", "aot_eager", "off"], default="auto",
        help="auto: inductor on a GPU",
    )  # fmt: skip
    both.add_argument("--log-every", type=int, default=50)
    both.add_argument("--save-every", type=int, default=500, help="steps between two saves")

    export = commands.add_parser("export", help="write the published layout")
    export.add_argument("--data", type=Path, required=True)
    export.add_argument("--train-out", type=Path, required=True, help="a run's --out")
    export.add_argument("--out", type=Path, required=True)
    export.add_argument("--untrained-draft", action="store_true", help="leave the run's draft out")
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
        from nano.export import export_folder

        export_folder(options)


if __name__ == "__main__":
    main()
