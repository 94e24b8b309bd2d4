"""A router before OpenAI-compatible servers, in few lines: each prompt goes where it is expected to be done first.

Run: python examples/router.py 8000 http://127.0.0.1:8001 http://127.0.0.1:8002
"""

import hashlib
import itertools
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from deepinfer.balancers import Fleet, RouteRequest, WorkerSnapshot, WorkerState
from deepinfer.balancers.prefill import EarliestCompletion, PrefillCost, PrefixIndex

BLOCK, CHARS = 512, 4  # tokens of a block, and characters of a token: a guess is enough to route by


class Router(ThreadingHTTPServer):
    """Knows what it sent and what came back; the servers need to report nothing."""

    def __init__(self, port: int, servers: list[str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock, self.numbers, self.index = threading.Lock(), itertools.count(1), PrefixIndex()
        self.rule = EarliestCompletion(PrefillCost.of_rate(20_000), self.index, block_tokens=BLOCK)
        self.fleet = Fleet(WorkerSnapshot(name=server) for server in servers)
        self.open: dict[str, dict[str, float]] = {server: {} for server in servers}

    def take(self, body: bytes) -> tuple[str, str]:
        """A number for the request, and its server."""
        ends = range(BLOCK * CHARS, len(body) + 1, BLOCK * CHARS)
        keys = tuple(hashlib.sha256(body[:end]).digest() for end in ends)
        with self.lock:
            rid, tokens = str(next(self.numbers)), len(body) // CHARS + 1
            request = RouteRequest(rid=rid, prompt_tokens=tokens, block_keys=keys)
            target = self.rule.decide(request, self.fleet).target
            if target is None:
                raise OSError("no server is ready")
            name = self.fleet.names[target]
            self.open[name][rid] = own = float(self.rule.own_seconds(request, self.fleet)[target])
            self.fleet.sent(target, now_s=time.monotonic(), waiting_s=own)
            self.index.assume(name, keys, capacity=100_000)
        return rid, name

    def report(self, name: str, done: str = "", state: WorkerState = WorkerState.READY) -> None:
        """Tells the fleet what is open at a server."""
        with self.lock:
            self.open[name].pop(done, None)
            snapshot = WorkerSnapshot(
                name=name,
                state=state,
                time_s=time.monotonic(),
                num_running=len(self.open[name]),
                waiting_s=sum(self.open[name].values()),
            )
            self.fleet.update(snapshot)
        if state is WorkerState.DEAD:  # try it again in a while
            retry = threading.Timer(5.0, self.report, (name,))
            retry.daemon = True
            retry.start()


class Handler(BaseHTTPRequestHandler):
    """Passes a request on and its answer back, piece by piece."""

    server: Router

    def do_POST(self) -> None:
        """Routes one request."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            rid, name = self.server.take(body)
        except OSError as error:
            return self.send_error(503, str(error))
        state, ask = (
            WorkerState.READY,
            urllib.request.Request(name + self.path, body, method="POST"),
        )
        ask.add_header("Content-Type", self.headers["Content-Type"] or "application/json")
        try:
            with urllib.request.urlopen(ask) as answer:
                self.send_response(answer.status)
                self.end_headers()
                shutil.copyfileobj(answer, self.wfile, 1024)
        except urllib.error.HTTPError as error:
            self.send_error(error.code, error.reason)
        except urllib.error.URLError:
            state = WorkerState.DEAD
            self.send_error(502, f"{name} does not answer")
        finally:
            self.server.report(name, rid, state)


if __name__ == "__main__":
    Router(int(sys.argv[1]), sys.argv[2:]).serve_forever()
