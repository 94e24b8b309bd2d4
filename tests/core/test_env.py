from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deepinfer import __version__, env
from deepinfer.__main__ import main


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_json_report_from_the_command_line() -> None:
    done = run("-m", "deepinfer", "env", "--json", DEEPINFER_ACELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["deepinfer"]["version"] == __version__
    assert report["python"]["executable"]
    assert report["platform"]["cores"] >= 1
    assert report["packages"]["torch"]
    assert any("DEEPINFER_ACELERATOR" in problem for problem in report["problems"])


def test_the_module_runs_by_itself_too() -> None:
    done = run("-m", "deepinfer.env")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("deepinfer\n  version")


def test_report_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("this machine is odd")

    for name in ("platform.platform", "importlib.metadata.version", "shutil.which", "os.sysconf"):
        monkeypatch.setattr(name, broken)
    report = env.collect({})
    for section in ("platform", "packages"):
        assert report[section] == "not found: RuntimeError: this machine is odd"
    assert report["accelerators"]["nvidia"].startswith("not found")
    json.dumps(report)
    assert "this machine is odd" in env.format_report(report)


def test_problems_are_one_a_line() -> None:
    environ = {"DEEPINFER_ACCELERATOR": "abacus", "DEEPINFER_ACCELLERATOR": "cpu"}
    report = env.format_report({"problems": env.collect(environ)["problems"]}).splitlines()
    assert report[0] == "problems"
    assert [line.split()[0] for line in report[1:]] == list(environ)
    assert all(line.startswith("  ") for line in report[1:])
    assert env.format_report({"problems": []}) == "problems: none"


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(env, "_run", lambda *command: "GPU A, 80 GiB, 9.0, 1.2\n")
    report = env.collect({})
    assert report["accelerators"]["nvidia"] == [
        {
            "name": "GPU A",
            "memory.total": "80 GiB",
            "compute_cap": "9.0",
            "driver_version": "1.2",
        }
    ]
    assert "name GPU A, memory.total 80 GiB" in env.format_report(report)


def test_a_hanging_tool_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        env._run("sleep", "5")


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert main(["env"]) == 0
    assert "problems" in capsys.readouterr().out
    for arguments in ([], ["unknown"]):
        with pytest.raises(SystemExit):
            main(arguments)


@pytest.mark.parametrize("command", [["env"], ["env", "--json"], ["models"]])
@pytest.mark.parametrize(
    ("shell", "status"),
    [
        ("{} | true; exit ${{PIPESTATUS[0]}}", 0),
        ("{} >&-", 0),
        ("{} > /dev/full", 1),
        ("PYTHONIOENCODING=ascii HF_HOME=/é {}", 0),
        ("env -u HOME {} < /dev/null", 0),
    ],
)
def test_any_standard_output_will_do(command: list[str], shell: str, status: int) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full and a shell")
    line = shell.format(" ".join([sys.executable, "-m", "deepinfer", *command]))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
