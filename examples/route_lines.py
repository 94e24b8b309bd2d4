"""A router as a filter, in 40 lines and without torch: JSON lines in, one decision a request out.

{"name": "a", "time_s": 1.0, "waiting_s": 0.3}                    a worker reports its load
{"worker": "a", "sequence": 0, "stored": ["k1"], "removed": []}    a worker's cache changed
{"rid": "1", "prompt_tokens": 900, "block_keys": ["k1", "k2"]}     a request to place

Run: python examples/route_lines.py < lines.jsonl
"""

import json
import sys
import time

from deepinfer.balancers import (
    CacheUpdate,
    EarliestCompletion,
    Fleet,
    PrefillCost,
    PrefixIndex,
    RouteRequest,
    WorkerSnapshot,
)

index, fleet = PrefixIndex(), Fleet()
rule = EarliestCompletion(PrefillCost.of_rate(20_000), index, block_tokens=512)
for line in sys.stdin:
    told = json.loads(line)
    told |= {key: tuple(told[key]) for key in ("stored", "removed", "block_keys") if key in told}
    if "name" in told:
        fleet.update(WorkerSnapshot(**{"time_s": time.monotonic(), **told}))
    elif "worker" in told and not index.apply(CacheUpdate(**told)):
        print(json.dumps({"snapshot_wanted": index.stale()}), flush=True)
    elif "rid" in told:
        request = RouteRequest(**told)
        choice = rule.decide(request, fleet)
        if choice.target is not None:
            own = float(rule.own_seconds(request, fleet)[choice.target])
            fleet.sent(choice.target, now_s=time.monotonic(), waiting_s=own)
        worker = None if choice.target is None else fleet.names[choice.target]
        print(json.dumps({"rid": told["rid"], "worker": worker, "why": choice.reason}), flush=True)
