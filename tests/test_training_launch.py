"""`specshim train --nnodes`: the launchers start equal processes that find each other, and tell of those that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import refusal, training_launch
from pipeline.training_launch import Launch, launch, parse, torchrun, wanted
from shims.errors import SpecshimError, UsageError
from shims.guardian import identity

RANKS = str(Path(__file__).parent / "ranks.py")


def test_only_a_training_on_nodes_is_launched() -> None:
    assert wanted(["train", "--data", "d", "--nnodes", "2"]) and wanted(["train", "--nnodes=2"])
    assert not wanted(["train", "--data", "d"]) and not wanted(["extract", "--nnodes", "2"]) and not wanted([])


def test_the_launchers_options_are_taken_and_the_rest_is_passed_on() -> None:
    how, rest = parse(
        ["--data", "d", "--nnodes", "2", "--nproc-per-node=8", "--lr", "1e-4", "--rdzv-endpoint", "head:29500"]
    )
    assert how == Launch(2, 8, rdzv_endpoint="head:29500")
    assert rest == ["--data", "d", "--lr", "1e-4"]
    command = torchrun(how, ["-m", "pipeline", "train", *rest])
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=head:29500", "--rdzv-backend=c10d"} <= set(command)
    assert command[-7:] == ["-m", "pipeline", "train", "--data", "d", "--lr", "1e-4"]
    assert "--standalone" in torchrun(Launch(1, 2), ["x.py"])


def test_the_launchers_options_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--nnodes", "2", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--rdzv-endpoint" in said and "--max-restarts" in said


def test_processes_are_one_a_gpu_where_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert parse(["--nnodes", "1"])[0].nproc_per_node == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse(["--nnodes", "1"])[0].nproc_per_node == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nnodes", "0"], "--nnodes"),
        (["--nnodes", "x"], "invalid int value"),
        (["--nnodes", "2"], "--rdzv-endpoint"),
        (["--nnodes", "1", "--nproc-per-node", "0"], "--nproc-per-node"),
        (["--nnodes", "1", "--launcher", "slurm"], "invalid choice"),
        (["--nnodes", "1", "--max-restarts", "-1"], "--max-restarts"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launch(arguments)


def test_torchrun_starts_processes_that_find_each_other(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "seen.json"
    launch(["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0", str(out), "--lr", "1"], [RANKS])
    assert json.loads(out.read_text()) == {"size": 2, "total": 3, "local": "0", "given": ["--lr", "1"]}
    with pytest.raises(SpecshimError, match="exit code"):
        launch(["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "0", str(out), "--fail"], [RANKS])


def train_refused(tmp_path: Path, *flags: str) -> list[str]:
    """Launch a training without data; returns the lines of its stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    flags = ("--nnodes=1", "--nproc-per-node=1", "--max-restarts=2", *flags)
    command = [sys.executable, "-m", "pipeline", "train", *flags]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.splitlines()


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    inputs = ("--data=nowhere", "--vocab=v", "--model=m", "--output-dir=out", "--device=cpu")
    lines = train_refused(tmp_path, *inputs)
    refused = [number for number, line in enumerate(lines) if line == "--data nowhere"]
    assert len(refused) == 2, "\n".join(lines)  # by the process, and as the last word
    assert lines[refused[1] :] == lines[refused[0] : refused[0] + 4]
    unknown = train_refused(tmp_path, *inputs, "--no-such-flag")
    assert sum("No such option" in line for line in unknown) == 1 and "train --help" in unknown[-1]


def test_what_was_accepted_once_may_be_refused_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that died may hold the folder for a moment more."""
    file = tmp_path / "refusal.json"
    error = UsageError("--output-dir", "a folder that no other run is writing to", "process 7", "wait")
    monkeypatch.setenv(refusal.VARIABLE, str(file))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refusal.tell(error)
    assert refusal.told(file) is None
    refusal.end_if_told()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    refusal.tell(error)
    assert refusal.told(file) == error.args
    with pytest.raises(SystemExit, match="2"):
        refusal.end_if_told()


LAUNCH = """
import sys
from pipeline.__main__ import _signals_raise
from pipeline.training_launch import launch
with _signals_raise():
    launch(sys.argv[2:], sys.argv[1:2])
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_the_command_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    arguments = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=0", str(tmp_path / "pid.x"), "--wait"]
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, RANKS, *arguments], env=environment)
    places = [tmp_path / f"pid.{rank}" for rank in (0, 1)]
    ends = time.monotonic() + 300
    while not all(place.exists() and place.read_text() for place in places) and time.monotonic() < ends:
        time.sleep(0.05)
    ranks = [int(place.read_text()) for place in places]
    process.send_signal(how)
    process.wait()
    ends = time.monotonic() + 60
    while any(map(identity, ranks)) and time.monotonic() < ends:
        time.sleep(0.05)
    left = [pid for pid in ranks if identity(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_ray_train_starts_the_same_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ray.train")
    monkeypatch.setenv("RAY_TRAIN_STORAGE_PATH", str(tmp_path))
    out = tmp_path / "seen.json"
    common = ["--nnodes", "1", "--nproc-per-node", "2", "--launcher", "ray", "--ray-address", "local"]
    launch([*common, "--max-restarts", "0", str(out), "--lr", "1"], [RANKS])
    assert json.loads(out.read_text()) == {"size": 2, "total": 3, "local": "0", "given": ["--lr", "1"]}
    with pytest.raises(SpecshimError, match="exit code 3"):
        launch([*common, "--max-restarts", "0", str(out), "--fail"], [RANKS])
    with pytest.raises(UsageError, match="nowhere"):
        launch([*common, "--max-restarts", "3", "--data=nowhere", "--vocab=v", "--model=m", "--output-dir=out"])
    with pytest.raises(UsageError, match="CPU cores"):
        launch(["--nnodes", "9", "--nproc-per-node", "99", *common[4:]], [RANKS])


def test_the_program_is_the_training() -> None:
    assert training_launch.PROGRAM == ("-m", "pipeline", "train")
