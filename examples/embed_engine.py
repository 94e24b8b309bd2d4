"""The engine inside your own loop: add requests, run steps, take deltas, abort; and a part of your own.

Run: python examples/embed_engine.py [--model toy]

The default model is a toy of exact arithmetic that needs no weights; give nano or a folder for real text.
"""

from __future__ import annotations

import argparse
import os

from deepinfer import Engine, SamplingParams
from deepinfer.core import StepPlan
from deepinfer.scheduling import Scheduler
from deepinfer.testing import ToyModel, ToyTokenizer


class PrintingScheduler(Scheduler):
    """The usual scheduler, which also shows its plans: a plan is plain data."""

    def launch(self, plan: StepPlan) -> StepPlan:
        """Prints a plan and commits to it."""
        print(f"  {plan}")
        return super().launch(plan)


def main() -> None:
    """Runs three requests by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "toy")
    args = parser.parse_args()
    options = {"max_num_seqs": 2, "prefill_chunk_tokens": 8}
    if args.model == "toy":
        engine = Engine(model=ToyModel(), tokenizer=ToyTokenizer(), config=options)
    else:
        engine = Engine.from_pretrained(args.model, config=options)
    engine = engine.replace(scheduler=PrintingScheduler)

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("first prompt", params, rid="first")
    engine.add_request("second", params.replace(max_tokens=50), rid="second")
    engine.add_request("third waits for a slot", params, rid="third")
    texts = {"first": "", "second": "", "third": ""}
    while engine.has_unfinished:
        for delta in engine.step():
            texts[delta.rid] += delta.text
            if delta.finished:
                print(f"{delta.rid} ended by {delta.finish_reason}: {texts[delta.rid]!r}")
        if len(texts["second"]) > 3 and engine.abort("second"):
            print("second has said enough")
        engine.check()  # every book adds up after every step
    stats = engine.stats()
    print(
        f"{stats.generated_tokens} tokens in {stats.steps} steps, ended by {stats.requests_finished}; "
        f"{1e3 * stats.overhead_seconds / stats.steps:.2f} ms of a step are not the model"
    )
    engine.close()


if __name__ == "__main__":
    main()
