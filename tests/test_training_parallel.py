"""Two processes take the same steps as one with two batches a step; the loss curves agree within float noise."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline_fixtures import held, write_states

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("speculators")

from pipeline import train as train_module  # noqa: E402
from pipeline.config import TrainConfig  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_launch import PROGRAM  # noqa: E402
from pipeline.training_metrics import read_metrics  # noqa: E402
from pipeline.training_parallel import Ranks, joined, sharding  # noqa: E402
from pipeline.training_run import readers  # noqa: E402
from pipeline.training_stacking import merged, stacking  # noqa: E402
from shims.errors import UsageError  # noqa: E402
from shims.guardian import below  # noqa: E402

try:
    from speculators.train.distributed import apply_fully_sharded
except ImportError:
    from speculators.train.utils import apply_fully_sharded

SETTINGS: dict[str, Any] = {"epochs": 4, "lr": 3e-3, "max_seq_len": 128, "ttt_steps": 2, "val_share": 0.3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States to train on, and a training of two processes that nothing disturbed, in `two`."""
    root = tmp_path_factory.mktemp("parallel")
    write_states(root, rows=16)
    output, errors = _two_processes(root, root / "two").communicate(timeout=600)
    assert (root / "two" / "draft").is_dir(), errors[-4000:]
    assert output.count("draft -> ") == 1, "one process tells"
    return root


def _two_processes(root: Path, output: Path, program: Sequence[str] = PROGRAM[:-1]) -> subprocess.Popen[str]:
    places = {"data": root / "states", "vocab": root / "prepared", "model": root / "model", "output-dir": output}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**SETTINGS, **places}.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [*program, "train", *flags, "--save-steps=2", "--device=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )


def test_two_processes_go_on_where_one_was_killed(root: Path) -> None:
    killed = root / "killed"
    (root / "held.py").write_text(held(8))
    run = _two_processes(root, killed, ["held.py"])
    metrics, ends = killed / "metrics.jsonl", time.monotonic() + 200
    while run.poll() is None and time.monotonic() < ends:
        if metrics.is_file() and metrics.read_text().count('"train"') >= 3:
            break
        time.sleep(0.02)
    ranks = {_rank(pid): pid for pid in below(run.pid)}
    os.kill(ranks["1"], signal.SIGKILL)
    errors = run.communicate(timeout=300)[1]
    assert run.returncode != 0
    assert "SIGKILL" in errors or "exitcode  : -9" in errors  # torchrun's word for it
    assert "forcefully" not in errors, "torchrun waits half a minute for the other one to end"
    errors = _two_processes(root, killed).communicate(timeout=600)[1]
    assert read_metrics(metrics) == read_metrics(root / "two" / "metrics.jsonl"), errors[-4000:]


def _rank(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return ""
    return next((text.removeprefix("RANK=") for text in variables if text.startswith("RANK=")), "")


def test_two_processes_train_as_one_with_two_batches(root: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "accumulate": 2, "device": "cpu"}
    one = train(TrainConfig(root / "states", root / "prepared", str(root / "model"), root / "one", **settings))
    mine, theirs = read_metrics(root / "two" / "metrics.jsonl"), read_metrics(one.metrics)
    assert len(mine) == len(theirs) > 8
    for line, other in zip(mine, theirs, strict=True):
        assert (line["kind"], line["step"], line.get("tokens")) == (other["kind"], other["step"], other.get("tokens"))
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4), line
        assert line["full_acc_0"] == pytest.approx(other["full_acc_0"], abs=0.05), line
    assert one.end["loss"] < 0.9 * one.start["loss"]
    record = json.loads((root / "two" / "manifest.json").read_text())
    assert record["complete"] and record["batches_per_step"] == 2
    from safetensors.torch import load_file

    two = load_file(root / "two" / "draft" / "model.safetensors")
    for name, value in load_file(one.draft / "model.safetensors").items():
        assert torch.allclose(two[name].float(), value.float(), atol=2e-2), name


SLOW = """
import datetime, os, time
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from pipeline import train as training
from pipeline.config import TrainConfig

def looked_at(config, lengths=None):
    if lengths is None:
        time.sleep(10)
    return SimpleNamespace(lengths=lengths or {7: 11})

init = dist.init_process_group
def init_together(backend):
    # One may have been loading for longer than the other waits.
    Path(os.environ["RANK"]).touch()
    while not all(Path(rank).exists() for rank in "01"):
        time.sleep(0.01)
    init(backend, timeout=datetime.timedelta(seconds=5))

dist.init_process_group = init_together
training.check_inputs = looked_at
training._train = lambda config, data, ranks, device: print(f"rank {ranks.rank} has {data.lengths}\\n", end="")
training.train(TrainConfig(Path("x"), Path("x"), "x", Path("out"), device="cpu"))
"""


def test_the_others_wait_while_the_first_looks_at_the_rows(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "slow.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert said == ["rank 0 has {7: 11}", "rank 1 has {7: 11}"]


def test_each_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    second = Ranks(rank=1, size=2, local=1)
    assert second.device("auto") == second.device("cuda") == "cuda:1"
    assert second.device(second.device("auto")) == "cuda:1"  # the run asks again for what the command asked for
    with pytest.raises(UsageError, match="each process takes its own"):
        second.device("cuda:0")
    assert Ranks().device("auto") == "cuda" and Ranks().device("cuda:1") == "cuda:1"


def test_more_processes_than_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module.console, "quiet", False)  # a further rank's is: not the tests' after this
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (("RANK", "2"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="it has 2 of them"):
        train(TrainConfig(tmp_path, tmp_path, "model", tmp_path / "draft"))


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("auto", []), ("cpu", [])])
def test_a_gpu_that_is_named_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, current: list[str]
) -> None:
    found = list[str]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda named: found.append(str(named)))
    monkeypatch.setattr(train_module, "check_inputs", lambda config: None)
    monkeypatch.setattr(train_module, "_train", lambda *given: list(found))
    assert train(TrainConfig(tmp_path, tmp_path, "model", tmp_path / "draft", device=device)) == current


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_fails_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    # NCCL's destroy_process_group returns when every process has called it; the others are in the training.
    ended = list[bool]()
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: ended.append(True))
    with contextlib.suppress(UsageError), joined(Ranks(rank=0, size=2), "cpu"):
        if fails:
            raise UsageError("--lr", "1", "2", "repeat")
    assert ended == ([] if fails else [True])


@pytest.mark.parametrize(
    ("wanted", "device", "processes", "shared", "found"),
    [
        (None, "cpu", 1, 1 << 30, 0),
        (None, "cuda", 1, 1 << 30, 4),
        (None, "cuda:1", 8, 1 << 30, 1),
        (None, "cuda:1", 16, 1 << 30, 0),
        (None, "cuda:1", 2, 64 << 20, 2),  # as a container has it: 16 batches, for 2 processes with 2 streams each
        (6, "cpu", 1, 64 << 20, 6),
    ],
)
def test_rows_are_read_ahead_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, device: str, processes: int, shared: int, found: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=shared))
    assert readers(wanted, device, batch_bytes=4 << 20) == found


def test_a_sharded_draft_computes_in_the_type_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        model = torch.nn.Module()

        def setup_model(self) -> None:
            self.model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])

    found = list[Any]()
    module = inspect.getmodule(apply_fully_sharded)
    monkeypatch.setattr(module, "fully_shard", lambda part, mp_policy=None: found.append(mp_policy))
    sharding(Trainer, torch.float32)().setup_model()
    assert [policy.param_dtype for policy in found if policy] == [torch.float32] * sum(map(bool, found)) != []


@pytest.mark.parametrize("sharded", [False, True])
def test_a_stack_has_the_mean_loss_and_its_gradients(sharded: bool) -> None:
    # In float64: of random numbers in float32, one sum in a thousand cancels out to more than the tolerance.
    weight, unused = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    calls = []

    def forward(hidden_states: Any, lengths: Any, scale: float) -> Any:
        calls.append(1)
        loss = (hidden_states[0] * weight).sum() * scale + lengths.sum() * weight[0]
        return None, loss, {"right_sum": loss.detach(), "right_total": torch.ones(()), "loss": loss.detach()}

    states, lengths = torch.randn(2, 3, dtype=torch.float64), torch.tensor([[1, 2], [4, 0]])
    stacked = stacking(forward, counted=True, weights=[weight, unused], sharded=sharded)
    _, loss, metrics = stacked(hidden_states=states, lengths=lengths, scale=2.0)
    assert weight.grad is None  # until the trainer's own backward pass, which clears them first
    (3 * loss).backward()
    # Computing a sequence anew is compiling it anew, on a GPU: its activations are others then.
    assert len(calls) == 2
    each = [forward(states[i : i + 1], lengths[i], 2.0)[1].detach() for i in range(2)]
    assert torch.allclose(loss, (each[0] + each[1]) / 2)
    assert weight.grad is not None and unused.grad is None
    assert torch.allclose(weight.grad, 3 * (states.sum(0) + torch.tensor([3.5, 0.0, 0.0])))
    assert torch.allclose(metrics["right_sum"], each[0] + each[1]) and metrics["right_total"] == 2
    assert torch.allclose(metrics["loss"], (each[0] + each[1]) / 2)
    assert merged([{"a_sum": 1.0}, {"a_sum": 3.0}], counted=False) == {"a_sum": 2.0}
    with torch.no_grad():  # validation
        assert torch.allclose(stacked(hidden_states=states, lengths=lengths, scale=2.0)[1], loss)


TAKEN_OVER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pipeline.training_parallel import optimizer_states, restore_optimizers

class Draft(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(6, 8).requires_grad_(False)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])

    def forward(self, ids):
        states = self.embed(ids)
        for layer in self.layers:
            states = layer(states)
        return states

def made(sharded):
    draft = Draft()
    if sharded:
        for part in (*draft.layers, draft):
            fully_shard(part)
    return draft, torch.optim.AdamW(draft.named_parameters(), lr=1e-2)

def kept(draft, optimizer, sharded):
    box = [optimizer_states(draft, [optimizer], sharded)]
    dist.broadcast_object_list(box, src=0)
    return box[0]

def numbers(state):
    return [value for of in state["state"].values() for _, value in sorted(of.items())]

dist.init_process_group("gloo")
before, after = (word == "sharded" for word in sys.argv[1:])
draft, optimizer = made(before)
for step in range(3):
    optimizer.zero_grad()
    draft(torch.arange(6)).pow(2).sum().backward()
    optimizer.step()
optimizer.param_groups[0]["lr"] = 5e-3
states = kept(draft, optimizer, before)
draft, optimizer = made(after)
restore_optimizers(draft, [optimizer], states, after)
mine, theirs = numbers(kept(draft, optimizer, after)[0]), numbers(states[0])
assert len(mine) == len(theirs) == 12 and all(map(torch.equal, mine, theirs)), (mine, theirs)
assert optimizer.param_groups[0]["lr"] == 5e-3
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", ["sharded", "whole"])
@pytest.mark.parametrize("after", ["sharded", "whole"])
def test_a_training_goes_on_sharded_or_whole(tmp_path: Path, before: str, after: str) -> None:
    (tmp_path / "over.py").write_text(TAKEN_OVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "over.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, before, after], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
