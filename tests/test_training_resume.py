"""Killed at any step, a training goes on from its last checkpoint and ends where an undisturbed one ends."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import held, write_states

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("speculators")

from pipeline import training_checkpoint as checkpoints  # noqa: E402
from pipeline import training_run  # noqa: E402
from pipeline.config import ConvertConfig, TrainConfig  # noqa: E402
from pipeline.convert import convert  # noqa: E402
from pipeline.formats.arrays import npy_bytes  # noqa: E402
from pipeline.lock import exclusive  # noqa: E402
from pipeline.progress import stage_progress  # noqa: E402
from pipeline.train import train  # noqa: E402
from pipeline.training_checkpoint import Progress  # noqa: E402
from pipeline.training_metrics import read_metrics  # noqa: E402
from pipeline.vocab import load_mapping, mapping_arrays  # noqa: E402
from shims.errors import SpecshimError, UsageError  # noqa: E402

STEPS = 24
SETTINGS: dict[str, Any] = {
    "epochs": 30, "max_steps": STEPS, "save_steps": 4, "val_steps": 6, "lr": 3e-3, "max_seq_len": 256, "ttt_steps": 2,
    "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("training")
    write_states(root, rows=16)
    return root


def settings(place: Path, name: str, **changed: Any) -> TrainConfig:
    return TrainConfig(place / "states", place / "prepared", str(place / "model"), place / name, **SETTINGS | changed)


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    train(settings(place, "undisturbed"))
    return place / "undisturbed"


def killed(place: Path, name: str, at: int) -> None:
    """Train in another process and kill it when ``at`` steps are in the metrics, and before the last one is."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()]
    inputs = {"data": "states", "vocab": "prepared", "model": "model", "output-dir": name}
    flags += [f"--{key}={place / value}" for key, value in inputs.items()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", held(STEPS - 1), "train", *flags],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    metrics = place / name / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"kind": "train"') >= at:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()


def test_a_killed_training_ends_where_an_undisturbed_one_ends(place: Path, undisturbed: Path) -> None:
    at = random.randrange(1, STEPS - 4)
    killed(place, "killed", at)
    assert not json.loads((place / "killed" / "manifest.json").read_text())["complete"]
    found = checkpoints.latest(place / "killed" / "checkpoints")
    begun = checkpoints.read_progress(found).step if found else 0
    assert begun >= (at - 1) // 4 * 4, f"killed after {at} steps, the checkpoint has {begun}"
    result = train(settings(place, "killed"))
    wanted, lines = (read_metrics(folder / "metrics.jsonl") for folder in (undisturbed, place / "killed"))
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6), (at, begun, line["step"])
    assert result.steps == STEPS
    mine, theirs = weights(place / "killed" / "draft"), weights(undisturbed / "draft")
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(mine[name].float(), value.float(), atol=1e-6), (at, begun, name)


READING = """
import sys, time
from pathlib import Path
from pipeline.lock import exclusive
from pipeline.training_batches import BatchStream

class Rows:
    def __getitem__(self, groups):
        return {"tokens": 1}

with exclusive(Path(sys.argv[1])):
    for _ in BatchStream(Rows(), [[[0], [1], [2]]], workers=1):
        print("reading", flush=True)
        time.sleep(60)
"""


def test_what_reads_ahead_for_a_killed_training_does_not_keep_its_lock(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", READING, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        with exclusive(tmp_path):
            pass


def test_random_numbers_go_on_where_there_are_fewer_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    state, taken = checkpoints.random_state(), list[Any]()
    state["cuda"] = ["first", "second"]
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.append)
    checkpoints.set_random_state(state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    checkpoints.set_random_state(state)
    assert taken == [[], ["first"]]


def test_a_finished_training_leaves_no_checkpoint_and_one_picture(undisturbed: Path) -> None:
    assert not (undisturbed / "checkpoints").exists()
    record = json.loads((undisturbed / "manifest.json").read_text())
    assert record["complete"] and record["metrics"]["best"]["loss"] <= record["metrics"]["end"]["loss"]
    events = [path.stat().st_size for path in undisturbed.glob("tensorboard/events*")]
    assert bool(events and all(events)) == bool(find_spec("tensorboard"))
    pytest.importorskip("matplotlib")
    assert (undisturbed / "training.png").read_bytes().startswith(b"\x89PNG")


def test_going_on_with_other_settings_is_refused(place: Path) -> None:
    config = settings(place, "other", max_steps=6, save_steps=2)
    stopped = Exception("stopped after the second checkpoint")
    written = checkpoints.write

    def write_twice(folder: Path, progress: Progress, *rest: Any) -> Path:
        path: Path = written(folder, progress, *rest)
        if progress.step == 4:
            raise stopped
        return path

    checkpoints.write = write_twice
    try:
        with pytest.raises(Exception, match="stopped after the second"):
            train(config)
    finally:
        checkpoints.write = written
    assert sorted(path.name for path in (place / "other" / "checkpoints").iterdir()) == [
        "step-00000002", "step-00000004",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="lr"):
        train(settings(place, "other", max_steps=6, save_steps=2, lr=1e-3))
    # Of one size, and of the same prepared rows: only what they hold differs.
    with pytest.raises(UsageError, match=r"inputs\.vocab"):
        train(replace(config, vocab=_other_vocabulary(place)))
    with pytest.raises(UsageError, match=r"inputs\.states\.store_dtype = \"float32\""):
        train(replace(config, data=_rounded(place)))
    damaged = place / "other" / "checkpoints" / "step-00000004" / "optimizer.pt"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(SpecshimError, match="remove that checkpoint"):
        train(config)
    for path in damaged.parent.iterdir():
        path.unlink()
    assert train(config).steps == 6


def _other_vocabulary(place: Path) -> Path:
    shutil.copytree(place / "prepared", place / "otherwise")
    (place / "otherwise" / "token_freq.pt").unlink()
    d2t, t2d = load_mapping(place / "prepared")
    size, chosen = len(d2t), t2d.nonzero()[0].tolist()
    unused = next(token for token in range(len(t2d)) if not t2d[token])
    record = json.loads((place / "otherwise" / f"vocab-{size}.json").read_text())
    for name, array in zip(record["outputs"], mapping_arrays(sorted([*chosen[1:], unused]), len(t2d)), strict=True):
        (place / "otherwise" / name).write_bytes(npy_bytes(array))
        record["outputs"][name] = hashlib.sha256(npy_bytes(array)).hexdigest()
    (place / "otherwise" / f"vocab-{size}.json").write_text(json.dumps(record))
    return place / "otherwise"


def _rounded(place: Path) -> Path:
    convert(ConvertConfig(place / "states", place / "rounded", "hs_safetensors", store_dtype="bfloat16"))
    return place / "rounded"


def test_a_finished_training_whose_draft_was_cut_is_not_called_finished(place: Path) -> None:
    config = settings(place, "cut", max_steps=2)
    train(config)
    assert train(config).steps == 2
    file = place / "cut" / "draft" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(UsageError, match="as the finished training wrote it"):
        train(config)
    file.write_bytes(whole)
    assert train(config).steps == 2


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.new").mkdir()
    (tmp_path / "step-00000008").mkdir()  # killed while it was removed
    for step in (1, 2, 3):
        checkpoints.write(tmp_path, Progress(step=step), {"a": torch.ones(2)}, {"b": [torch.zeros(1)]}, keep=2)
    found = checkpoints.latest(tmp_path)
    assert found is not None and found.name == "step-00000003"
    assert not list(tmp_path.glob(".*"))
    tensors, rest = checkpoints.read(found)
    assert torch.equal(tensors["a"], torch.ones(2)) and torch.equal(rest["b"][0], torch.zeros(1))
    assert checkpoints.read_progress(found) == Progress(step=3)


def test_patience_ends_a_training_that_no_longer_gets_better(place: Path) -> None:
    result = train(settings(place, "patient", lr=3.0, max_steps=0, val_steps=2, patience=2, scheduler="none"))
    assert "--patience" in result.stopped and result.steps < 30 * 2
    lines = [line for line in read_metrics(result.metrics) if line["kind"] == "val"]
    best = min(lines[1:], key=lambda line: float(line["loss"]))
    assert result.best_step == best["step"] and result.best["loss"] == best["loss"]


def test_the_bar_counts_the_steps_that_there_are(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch packs its rows anew, into a batch more or less: 18 of 20 steps were the end."""
    shown: list[Any] = []

    @contextmanager
    def kept(*given: Any, **options: Any) -> Iterator[Any]:
        with stage_progress(*given, **options) as bar:
            shown.append((bar, bar.total))
            yield bar

    monkeypatch.setattr(training_run, "stage_progress", kept)
    result = train(settings(place, "counted", seed=1, epochs=4, max_steps=0, val_steps=0, save_steps=0))
    [(bar, at_first)] = shown
    assert bar.rows == bar.total == result.steps != at_first
    train(settings(place, "few", epochs=1, max_steps=500, val_steps=0, save_steps=0))
    assert shown[1][0].rows == shown[1][0].total < 500
