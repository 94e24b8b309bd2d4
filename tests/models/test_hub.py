"""Names to folders: local paths never use the network; a hub repository is downloaded once and then cached."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer.core.errors import CheckpointMissing, ConfigError, HubOffline
from deepinfer.models import load_model, resolve_checkpoint

COMMIT = "a" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub client."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return cache


def cached(cache: Path, repo: str, files: dict[str, bytes], revision: str = "main") -> Path:
    """Puts a snapshot into the cache, laid out as the hub client does."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return snapshot


@pytest.mark.usefixtures("no_network")
class TestLocal:
    def test_folders_in_every_spelling(
        self, save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = save_tiny()
        load_model(folder)
        load_model(str(folder))
        load_model(f"{folder}/")
        monkeypatch.chdir(folder.parent.parent)
        # as "owner/name" reads, but it is there
        load_model(f"{folder.parent.name}/{folder.name}")
        monkeypatch.setenv("HOME", str(folder.parent))
        assert resolve_checkpoint(f"~/{folder.name}") == folder

    def test_loading_is_the_same_in_offline_mode(
        self, save_tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        load_model(save_tiny())

    def test_near_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "checkpoints" / "coder-small").mkdir(parents=True)
        with pytest.raises(CheckpointMissing, match=r"Did you mean .*coder-small'") as caught:
            resolve_checkpoint(tmp_path / "checkpoints" / "coder-smal")
        assert caught.value.path == tmp_path / "checkpoints" / "coder-smal"
        with pytest.raises(
            CheckpointMissing, match=r"has no folder 'chekpoints'\)\. Did you mean .*/checkpoints'"
        ):
            resolve_checkpoint(tmp_path / "chekpoints" / "coder-small")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointMissing, match=r"Did you mean 'checkpoints/coder-small'"):
            resolve_checkpoint("checkpoints/coder-smol")
        with pytest.raises(CheckpointMissing, match="Did you mean 'nano'"):
            resolve_checkpoint("nanoo")
        with pytest.raises(
            CheckpointMissing, match="Give 'nano', a checkpoint folder, or a repository"
        ):
            resolve_checkpoint("zzzzzz")

    @pytest.mark.parametrize(
        "name", ["", " ", "/", "a/b/c/d", "../no/such", "/no/such/folder", "owner/na me", "owner/"]
    )
    def test_what_is_no_repository_never_goes_to_the_hub(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointMissing):
            load_model(name)

    @pytest.mark.parametrize("name", [None, 5, b"nano", ["nano"]])
    def test_what_is_no_name(self, name: object) -> None:
        with pytest.raises(ConfigError, match="the checkpoint is"):
            resolve_checkpoint(name)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000, "a\0b", "\ud800"])
    def test_what_no_file_system_can_hold(self, name: str) -> None:
        with pytest.raises(CheckpointMissing) as caught:
            resolve_checkpoint(name)
        assert len(str(caught.value)) < 400

    def test_a_file_is_not_a_folder(self, save_tiny: Callable[..., Path]) -> None:
        folder = save_tiny(max_shard_bytes=10**9)
        with pytest.raises(CheckpointMissing, match=f"is a file.*{folder}$"):
            load_model(folder / "model.safetensors")

    def test_a_folder_has_no_revision(self, save_tiny: Callable[..., Path]) -> None:
        with pytest.raises(ConfigError, match="revision is 'v2'"):
            load_model(save_tiny(), revision="v2")

    def test_cached_repository_in_offline_mode(
        self, save_tiny: Callable[..., Path], hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {path.name: path.read_bytes() for path in save_tiny().iterdir()}
        snapshot = cached(hub_cache, "owner/tiny", files)
        load_model("owner/tiny", offline=True)
        assert resolve_checkpoint("owner/tiny", offline=True) == snapshot
        assert resolve_checkpoint("owner/tiny", COMMIT, offline=True) == snapshot
        monkeypatch.setenv("HF_HUB_OFFLINE", "true")
        assert resolve_checkpoint("owner/tiny") == snapshot
        with pytest.raises(HubOffline, match="at revision 'v9'"):
            resolve_checkpoint("owner/tiny", "v9")

    def test_offline_names_the_file(self, save_tiny: Callable[..., Path], hub_cache: Path) -> None:
        with pytest.raises(
            HubOffline, match=r"config\.json of owner/tiny is not in the local cache"
        ) as caught:
            resolve_checkpoint("owner/tiny", offline=True)
        assert (caught.value.repo, caught.value.file) == ("owner/tiny", "config.json")
        files = {path.name: path.read_bytes() for path in save_tiny().iterdir()}
        shard = next(name for name in files if "00002-of" in name)
        del files[shard]
        cached(hub_cache, "owner/partial", files)
        with pytest.raises(HubOffline, match=shard) as caught:
            load_model("owner/partial", offline=True)
        assert caught.value.file == shard
        cached(hub_cache, "owner/bare", {"config.json": b"{}"})
        with pytest.raises(HubOffline, match=r"model\.safetensors of owner/bare"):
            load_model("owner/bare", offline=True)


class Hub:
    """The few pages of the hub that a download needs, on this machine."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                path = self.path.partition("?")[0]
                headers = {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
                name = path.rpartition("/")[2]
                if path == "/api/models/owner/tiny/revision/none":
                    return self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b"")
                if path.startswith("/api/models/owner/tiny/revision/"):
                    siblings = [{"rfilename": file} for file in files]
                    body = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
                    return self.answer(200, headers, json.dumps(body).encode())
                if path.startswith("/api/models/owner/tiny/tree/"):
                    tree = [
                        {
                            "type": "file",
                            "path": file,
                            "size": len(data),
                            "oid": hashlib.sha1(data).hexdigest(),
                        }
                        for file, data in files.items()
                    ]
                    return self.answer(200, headers, json.dumps(tree).encode())
                if path.startswith("/owner/tiny/resolve/") and name in files:
                    headers["ETag"] = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                    return self.answer(200, headers, files[name])
                return self.answer(404, {"X-Error-Code": "RepoNotFound"}, b"")

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(
        {
            "config.json": b"{}",
            "model.safetensors": b"weights",
            "README.md": b"#",
            "photo.png": b"no",
        }
    )
    yield hub
    hub.close()


CODE = """
import sys
from deepinfer.models import resolve_checkpoint
for name, revision in [pair.split("@") for pair in sys.argv[1:]]:
    try:
        folder = resolve_checkpoint(name, revision or None)
        print(sorted(path.name for path in folder.iterdir()))
    except Exception as error:
        print(type(error).__name__, error)
assert "torch" not in sys.modules
"""


def resolve(url: str, home: Path, *pairs: str) -> list[str]:
    """Runs the real client in a process of its own, since it reads its settings once, at import."""
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    run = subprocess.run(
        [sys.executable, "-c", CODE, *pairs],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "bars are for terminals only"
    return run.stdout.splitlines()


def test_download_then_cache_then_no_network(hub: Hub, tmp_path: Path) -> None:
    first = resolve(hub.url, tmp_path, "owner/tiny@", "owner/none@", "owner/tiny@none")
    assert first[0] == "['README.md', 'config.json', 'model.safetensors']"
    assert first[1].startswith(
        "CheckpointMissing There is no folder and no hub repository 'owner/none'"
    )
    assert (
        first[2]
        == "CheckpointMissing owner/tiny has no revision 'none'. Check the branch, tag or commit."
    )
    assert not any("photo.png" in request for request in hub.requests)

    hub.requests.clear()
    assert resolve(hub.url, tmp_path, "owner/tiny@")[0] == first[0]
    assert not any("model.safetensors" in request and "GET" in request for request in hub.requests)

    dead = "http://127.0.0.1:9"
    unreachable = resolve(dead, tmp_path, "owner/tiny@", "owner/other@")
    assert unreachable[0] == first[0]
    assert unreachable[1].startswith(
        "HubOffline config.json of owner/other is not in the local cache, and the hub"
    )
