"""The example router: prompts that share a beginning share a server, and a dead server gets no more."""

from __future__ import annotations

import importlib.util
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "router.py"
    spec = importlib.util.spec_from_file_location("example_router", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(404 if body["prompt"] == "missing" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"server": self.server.server_port}).encode())

    def log_message(self, *values: Any) -> None:
        pass


@pytest.fixture
def fleet(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, list[HTTPServer]]]:
    monkeypatch.setattr(example.Handler, "log_message", Server.log_message)
    servers = [HTTPServer(("127.0.0.1", 0), Server) for _ in range(2)]
    router = example.Router(0, [f"http://127.0.0.1:{server.server_port}" for server in servers])
    running = [*servers, router]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in running]
    for thread in threads:
        thread.start()
    yield router, servers
    for server in running:
        server.shutdown()
        server.server_close()
    for thread in threads:
        thread.join()


def ask(router: Any, prompt: str) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{router.server_port}/v1/completions",
        json.dumps({"prompt": prompt}).encode(),
    )
    with urllib.request.urlopen(request) as answer:
        return int(json.load(answer)["server"])


def test_a_conversation_stays_and_others_spread(fleet: tuple[Any, list[HTTPServer]]) -> None:
    router, servers = fleet
    first = ask(router, "a" * 10_000)
    assert {ask(router, "a" * 10_000 + "b" * i) for i in range(0, 9000, 1000)} == {first}
    assert {ask(router, str(i) * 300) for i in range(20)} == {s.server_port for s in servers}
    assert not any(router.open.values())


def test_errors_pass_through_and_dead_servers_get_no_more(
    fleet: tuple[Any, list[HTTPServer]],
) -> None:
    router, servers = fleet
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        ask(router, "missing")
    caught.value.close()
    port = servers[0].server_port
    router.report(
        f"http://127.0.0.1:{port}", state=type(router).take.__globals__["WorkerState"].DEAD
    )
    assert {ask(router, str(i)) for i in range(10)} == {servers[1].server_port}
