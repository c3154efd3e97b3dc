"""A disk that is too small, that gets full, and that has room again."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_fixtures import FakeEngine, write_conversations, write_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from pipeline import disk  # noqa: E402
from pipeline import extract as extract_module  # noqa: E402
from pipeline.config import ConvertConfig, ExtractConfig, PrepareConfig, VerifyConfig  # noqa: E402
from pipeline.convert import convert  # noqa: E402
from pipeline.prepare import prepare  # noqa: E402
from pipeline.verify import verify  # noqa: E402
from shims.errors import UsageError  # noqa: E402

HIDDEN, ROWS = 2048, 30  # rows of about 60 tokens, 4 layers, float32: 55 MB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    yield folder
    # Lazily: the frames of an expected error keep its files open until the garbage is collected.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An extraction that does not fit into 40 MB."""
    monkeypatch.setattr(extract_module, "open_engine", lambda name, options: FakeEngine(options))
    model = write_model(tmp_path / "model", hidden=HIDDEN)
    write_conversations(tmp_path / "conversations.jsonl", count=ROWS)
    prepare(PrepareConfig(str(model), tmp_path / "conversations.jsonl", tmp_path / "prepared"))
    return {
        "model_path": str(model),
        "prepared_data": tmp_path / "prepared" / "tokenized_data.jsonl",
        "min_free_gib": 0.0,
        "engine": "stock",
        "rows_per_file": 8,
    }


def test_what_does_not_fit_is_refused_before_the_model_loads(small_disk: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"space for .* MB") as caught:
        extract_module.extract(ExtractConfig(output_dir=small_disk / "states", **options))
    assert "40" in caught.value.found or "41" in caught.value.found
    assert not (small_disk / "states").exists()


def test_a_shard_counts_what_the_others_need(small_disk: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"space for .* MB"):
        extract_module.extract(ExtractConfig(output_dir=small_disk / "states", shard="1/2", **options))
    assert extract_module.extract(
        ExtractConfig(output_dir=small_disk / "states", shard="1/2", store_dtype="bfloat16", **options)
    ).computed_rows


@pytest.mark.parametrize("form", ["hs_safetensors", "sharded", "speculators-0.4"])
def test_a_full_disk_stops_cleanly_and_goes_on_when_there_is_room(
    small_disk: Path, options: dict[str, Any], form: str, tmp_path: Path
) -> None:
    config = ExtractConfig(output_dir=small_disk / "states", format=form, ignore_space=True, **options)
    # Another user of the disk takes what the estimate of each batch still allowed.
    low = ExtractConfig(**(vars(config) | {"min_free_gib": 10e6 / disk.GIB}))
    with pytest.raises(disk.DiskFull, match="left free") as caught:
        extract_module.extract(low)
    assert "same command" in caught.value.next_step and disk.free_bytes(small_disk) >= 10e6
    kept = extract_module.status(config).done
    assert kept and not extract_module.status(config).damaged
    (small_disk / "ballast").write_bytes(bytes(disk.free_bytes(small_disk) - 1_500_000))
    with pytest.raises(disk.DiskFull, match="free"):
        extract_module.extract(config)
    assert extract_module.status(config).done >= kept and not extract_module.status(config).damaged
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    result = extract_module.extract(config)
    assert result.complete and result.kept_rows >= kept
    assert not verify(VerifyConfig(small_disk / "states")).faults
    undisturbed = ExtractConfig(output_dir=tmp_path / "undisturbed", format=form, **options)
    extract_module.extract(undisturbed)
    assert rows_of(small_disk / "states") == rows_of(tmp_path / "undisturbed")


def test_no_space_at_the_write_itself_is_the_same_clean_stop(
    small_disk: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is blind here, as it is to another process that fills the disk meanwhile."""
    monkeypatch.setattr(disk.Space, "stop_at_low_water", lambda *arguments: None)
    for form in ("hs_safetensors", "sharded", "speculators-0.4"):
        config = ExtractConfig(output_dir=small_disk / form, format=form, ignore_space=True, **options)
        with pytest.raises(disk.DiskFull, match="No space left on device") as caught:
            extract_module.extract(config)
        assert "MB still missing" in caught.value.next_step
        found = extract_module.status(config)
        assert found.done and found.missing and not found.damaged
        assert json.loads((small_disk / form / "manifest.json").read_text())["complete"] is False
        subprocess.run(["rm", "-r", str(small_disk / form)], check=True)


def test_a_conversion_stops_and_goes_on_alike(small_disk: Path, options: dict[str, Any], tmp_path: Path) -> None:
    extract_module.extract(ExtractConfig(output_dir=tmp_path / "states", **options))
    config = ConvertConfig(tmp_path / "states", small_disk / "moved", "speculators-0.4", min_free_gib=0)
    with pytest.raises(UsageError, match="space for"):
        convert(config)
    forced = ConvertConfig(**(vars(config) | {"ignore_space": True}))
    with pytest.raises(disk.DiskFull):
        convert(forced)
    subprocess.run(["mount", "-o", "remount,size=400m", str(small_disk)], check=True)
    done = convert(config)
    assert done.kept and done.written and done.kept + done.written == ROWS
    assert not verify(VerifyConfig(small_disk / "moved")).faults


def rows_of(folder: Path) -> list[bytes]:
    return [
        path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in {".safetensors", ".tar", ".pt"}
    ]


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (57_344, "57.3 kB"), (11.7e12, "11.7 TB"), (2.5e15, "2500 TB")]
)
def test_sizes_for_a_person(size: float, words: str) -> None:
    assert disk.human(size) == words


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_the_estimate_is_near_what_is_written(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    config = ExtractConfig(output_dir=tmp_path / "states", store_dtype=dtype, **options)
    job = extract_module.plan_job(config)
    estimated = job.row_bytes.total(job.rows().lengths(range(ROWS)))
    extract_module.extract(config)
    written = sum(map(len, rows_of(tmp_path / "states")))
    assert written <= estimated <= 1.05 * written


def test_a_checkpoint_that_does_not_fit_says_so(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline import training_checkpoint
    from pipeline.__main__ import main

    def build_vocab(config: object) -> None:
        tensors = {"a": torch.zeros(1 << 20)}
        training_checkpoint.write(small_disk, training_checkpoint.Progress(), tensors, {"b": torch.zeros(1 << 24)}, 1)

    monkeypatch.setattr("pipeline.vocab.build_vocab", build_vocab)
    with pytest.raises(SystemExit):
        main(["vocab", "--prepared", "x", "--draft-vocab-size", "2"])
    said = capsys.readouterr().err
    assert "71.3 MB for a checkpoint" in said and "step-00000000" in said and "Traceback" not in said
    # Where the disk fills up on the way, by another's hand: torch's own message is about a position in the file.
    monkeypatch.setattr(training_checkpoint, "free_bytes", lambda folder: 1 << 40)
    with pytest.raises(SystemExit):
        main(["vocab", "--prepared", "x", "--draft-vocab-size", "2"])
    said = capsys.readouterr().err
    assert "space on the disk" in said and "Traceback" not in said
