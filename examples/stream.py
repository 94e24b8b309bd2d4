"""Shows text as it is generated, and stops early: closing a stream aborts its request.

Run: python examples/stream.py ["a prompt"] [--model nano]
"""

from __future__ import annotations

import argparse
import asyncio
import os

from deepinfer import AsyncEngine, Engine, SamplingParams


def stream(engine: Engine, prompt: str) -> None:
    """Prints pieces until the text holds three lines."""
    lines = 0
    with engine.stream(prompt, SamplingParams(temperature=0, max_tokens=200)) as deltas:
        print(prompt, end="")
        for delta in deltas:
            print(delta.text, end="", flush=True)
            lines += delta.text.count("\n")
            if lines >= 3:
                break
    print(f"\n[aborted or finished; unfinished requests: {engine.load.num_running}]\n")


async def stream_together(engine: AsyncEngine, prompts: list[str]) -> None:
    """Reads several streams at once; the engine batches them."""

    async def read(prompt: str) -> str:
        params = SamplingParams(temperature=0, max_tokens=24)
        return "".join([delta.text async for delta in engine.stream(prompt, params)])

    async with engine:
        for prompt, text in zip(prompts, await asyncio.gather(*map(read, prompts)), strict=True):
            print(f"{prompt!r} -> {text!r}")


def main() -> None:
    """Streams one prompt, then several at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def main():\n")
    parser.add_argument("--model", default=os.environ.get("DEEPINFER_HF_MODEL_DIR") or "nano")
    args = parser.parse_args()
    engine = Engine.from_pretrained(args.model)
    stream(engine, args.prompt)
    asyncio.run(
        stream_together(AsyncEngine(engine), ["import ", "class A", "for i in ", "return "])
    )


if __name__ == "__main__":
    main()
