"""`python -m contract_tests.snapshot [RELEASE…]`: read releases from the index and write their snapshots."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from email.parser import BytesHeaderParser

from packaging.requirements import InvalidRequirement, Requirement

from contract_tests.declared import uses_of
from contract_tests.homes import GENERATORS, called_homes, homes_in
from contract_tests.kept import keep_reading, kept_reading
from contract_tests.readers.bodies import fingerprint
from contract_tests.readers.found import Reading
from contract_tests.readers.library import Library
from contract_tests.readers.resolve import Resolver
from contract_tests.recorded import FOLDER, OTHERS, recorded, rendered, rendered_uses
from contract_tests.sources import Settings, SourceTree, known_release, open_release, released
from contract_tests.sources.store import Store
from contract_tests.sources.trees import METADATA_FILES
from contract_tests.uses import Use
from contract_tests.watched import WATCHED
from shims.errors import SpecshimError
from shims.releases import known
from shims.versions import newest_first, within

# The oldest transformers that any vLLM release in the table admits.
_OLDEST_TRANSFORMERS = ">=4.55.2"
# Distribution, import package, releases: whose source is read for what it uses.
CONSUMER_SOURCES = (("speculators", "speculators", GENERATORS), ("hs-connectors", "hs_connectors", ("0.9.0",)))
_WATCHED = ("torch", "transformers")
# Parsing is what takes the time; a process is worth its start from a few releases on.
_MOST_PROCESSES = 4
_WORTH_A_PROCESS = 5


def read_release(package: str, release: str, settings: Settings) -> Reading:
    """Read one release from the index, or from the cache.

    Raises:
        SourceError: it cannot be fetched.
    """
    tree = open_release(package, release, settings)
    kept = kept_reading(tree)
    if kept is not None:
        return kept
    tree.prefetch(_likely_files(package, release))
    reading = read_tree(tree, package, release, Store(settings.cache))
    reading.distribution = tree.distribution.filename
    tree.save()
    keep_reading(tree, reading)
    return reading


def _likely_files(package: str, release: str) -> set[str]:
    """Files that reading a release will ask for: the homes', and those that its, or the newest, snapshot names."""
    homes = [*homes_in(package), *(entry.home for entry in WATCHED if package == "vllm")]
    modules = {home.partition(":")[0].replace(".", "/") for home in homes}
    likely = {f"{module}{end}" for module in modules for end in (".py", "/__init__.py")}
    if package == "vllm":
        snapshots = [name for name in (release, known()[-1]) if (FOLDER / f"{name}.json").is_file()]
        likely |= set(recorded(snapshots[0]).files) if snapshots else set()
    return likely


def read_tree(tree: SourceTree, package: str, release: str, store: Store | None = None) -> Reading:
    """Read every name of interest in a tree of files.

    Raises:
        SourceError: a file that the release has cannot be fetched.
    """
    return read_library(Library(tree, store), package, release)


def read_library(library: Library, package: str, release: str) -> Reading:
    """The same, of modules that may have been read before.

    Raises:
        SourceError: a file that the release has cannot be fetched.
    """
    resolver = Resolver(library)
    found = {home: resolver.find(home) for home in homes_in(package)}
    called = called_homes()
    found = {home: entry if home in called else entry.without_signature() for home, entry in found.items()}
    watched = [entry.home for entry in WATCHED] if package == "vllm" else []
    fingerprints = {home: body for home in watched if (body := fingerprint(library, home))}
    return Reading(package, release, "", _requirements(library.tree), found, fingerprints, library.files)


def _requirements(tree: SourceTree) -> dict[str, str]:
    """What the release asks for of the packages that are read beside it, by its metadata or its lists."""
    wanted: dict[str, str] = {}
    for line in _requirement_lines(tree):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name in _WATCHED and not re.search(r"\bextra\b", str(requirement.marker)):
            # A CPU build asks for `torch==2.13.0+cpu`: the label says how it was built, not what it is.
            wanted.setdefault(requirement.name, re.sub(r"(==[^,+]+)\+[^,]+", r"\1", str(requirement.specifier)))
    return wanted


def _requirement_lines(tree: SourceTree) -> list[str]:
    paths = sorted(tree.paths())
    metadata = [path for path in paths if path.endswith(".dist-info/METADATA") or path == "PKG-INFO"]
    for path in metadata:
        lines = BytesHeaderParser().parsebytes(tree.read(path)).get_all("Requires-Dist", [])
        if lines:
            return [str(line) for line in lines]
    lists = [path for path in paths if path in METADATA_FILES and path.endswith(".txt")]
    text = "\n".join(tree.read(path).decode("utf-8", "replace") for path in lists)
    return [line.partition(" #")[0].strip() for line in text.splitlines()]


def read_releases(package: str, releases: Iterable[str], settings: Settings) -> list[Reading]:
    """Several releases at once, in the order asked for.

    Raises:
        SourceError: one of them cannot be fetched.
    """
    wanted = list(releases)
    unread = [release for release in wanted if not _is_kept(package, release, settings)]
    processes = min(os.cpu_count() or 1, _MOST_PROCESSES, len(unread) // _WORTH_A_PROCESS)
    if processes < 2:
        return _read_chunk(package, wanted, settings)
    # Neighbours share most files, and each file is parsed once: chunks are runs of releases.
    size = -(-len(unread) // processes)
    chunks = [unread[i : i + size] for i in range(0, len(unread), size)]
    share = replace(settings, connections=max(1, settings.connections // processes))
    # `spawn`: a fork would copy this process's threads' locks in whatever state they are.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_read_chunk, package, chunk, share) for chunk in chunks]
        read = {reading.release: reading for part in parts for reading in part.result()}
    return [read.get(release) or read_release(package, release, settings) for release in wanted]


def _is_kept(package: str, release: str, settings: Settings) -> bool:
    tree = known_release(package, release, settings)
    return tree is not None and kept_reading(tree) is not None


def _read_chunk(package: str, releases: list[str], settings: Settings) -> list[Reading]:
    with ThreadPoolExecutor(settings.connections) as pool:
        return list(pool.map(lambda release: read_release(package, release, settings), releases))


def other_releases(package: str, settings: Settings, vllm: Iterable[Reading]) -> list[str]:
    """Which releases of a package beside vLLM are looked at, oldest first."""
    if package == "speculators":
        return list(GENERATORS)
    if package == "torch":
        pins = {reading.requires.get("torch", "").removeprefix("==") for reading in vllm} - {""}
        return newest_first(pins)[::-1]
    return [version for version in released(package, settings) if within(version, _OLDEST_TRANSFORMERS)]


def read_uses(settings: Settings) -> dict[str, list[Use]]:
    """What each consumer that is looked at uses, from its own source.

    Raises:
        SourceError: one of them cannot be fetched.
    """
    found: dict[str, list[Use]] = {}
    for package, root, releases in CONSUMER_SOURCES:
        for release in releases:
            tree = open_release(package, release, settings)
            found[f"{package} {release}"] = uses_of(tree, root)
            tree.save()
    return found


def render_others(readings: Iterable[Reading]) -> str:
    """The snapshot of a package beside vLLM. The name of the file that was read stands for its contents."""
    return rendered({reading.release: replace(reading, files={}).as_dict() for reading in readings})


def main(arguments: list[str] | None = None) -> int:
    """Write the snapshots; returns the exit code (2: something could not be read)."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.snapshot", description=__doc__)
    parser.add_argument("releases", nargs="*", help="vLLM releases (default: all of releases.toml, and the others)")
    parser.add_argument("--offline", action="store_true", help="from the cache alone")
    options = parser.parse_args(arguments)
    settings = Settings.from_environment(options.offline)
    FOLDER.mkdir(exist_ok=True)
    try:
        for reading in read_releases("vllm", options.releases or known(), settings):
            (FOLDER / f"{reading.release}.json").write_text(rendered(reading.as_dict()), encoding="utf-8")
            print(f"vllm {reading.release}: {len(reading.found)} names in {len(reading.files)} files")
        if not options.releases:
            recorded.cache_clear()
            vllm = [recorded(release) for release in known()]
            for package in OTHERS:
                readings = read_releases(package, other_releases(package, settings, vllm), settings)
                (FOLDER / f"{package}.json").write_text(render_others(readings), encoding="utf-8")
                print(f"{package}: {len(readings)} releases")
            (FOLDER / "uses.json").write_text(rendered_uses(read_uses(settings)), encoding="utf-8")
    except SpecshimError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
