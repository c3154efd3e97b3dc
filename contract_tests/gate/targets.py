"""What is to be judged, in all the forms in which a person may name it, as a tree of sources.

Nothing is installed, imported or unpacked to disk.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from contract_tests.sources import (
    FolderTree,
    Settings,
    SourceError,
    SourceTree,
    known_release,
    open_release,
    released,
)
from contract_tests.sources.release import open_url, unreadable_as
from contract_tests.sources.trees import TarTree, ZipTree, open_zip
from shims.errors import UsageError
from shims.releases import known
from shims.versions import DISTRIBUTIONS, newest_first, parse, spelled, within

FORMS = "vllm==X, vllm==latest, a wheel or sdist file, a URL, a checkout folder, installed, or all"
LATEST = "latest"
_VERSION_LINE = re.compile(r"^__version__\s*(?:=\s*version\s*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_METADATA_VERSION = re.compile(r"^Version:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """One thing to judge.

    Args:
        name: for messages, as the user knows it.
        package: import package that is looked at.
        version: what it says it is, or what is assumed.
        tree: its sources.
        assumed: whether the version is a guess, because the sources do not tell.
        published: whether it is a release of the index.
    """

    name: str
    package: str
    version: str
    tree: SourceTree
    assumed: bool = False
    published: bool = False


class Checked:
    """A tree whose every failure is a `SourceError`, whatever its archive or folder raises."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree, self.label = tree, tree.label

    def paths(self) -> frozenset[str]:
        return self._tree.paths()

    def read(self, path: str) -> bytes:
        with unreadable_as(f"{self.label}, {path}"):
            return self._tree.read(path)


def open_target(text: str, settings: Settings, package: str = "vllm", version: str = "", pre: bool = False) -> Target:
    """The sources that `text` names.

    Args:
        text: one of the FORMS, except `all`.
        settings: index, cache, offline.
        package: import package that they should hold.
        version: what to take them for, where they do not tell.
        pre: whether `latest` may be a pre-release.

    Raises:
        UsageError: `text` is none of the forms.
        SourceError: the sources cannot be read, or hold no such package.
    """
    if text == "installed":
        target = _installed(package)
    elif re.match(r"[a-z+]+://", text):
        target = _url(text, settings, package, version)
    elif Path(text).is_dir():
        target = _folder(Path(text), package, version)
    elif Path(text).is_file():
        target = _file(Path(text), package, version)
    else:
        target = _release(text, settings, package, pre)
        if version:
            found = f"{version}, for {target.name}"
            raise UsageError("--version", "a folder or a file that does not say its version", found, "leave it out")
    _refuse_other_packages(target)
    return target


def _refuse_other_packages(target: Target) -> None:
    start = (f"{target.package}/", f"{target.package}.py")
    paths = target.tree.paths()
    if not any(path.startswith(start) for path in paths):
        held = sorted({p.partition("/")[0] for p in paths if p.endswith(".py") and "/" in p})
        found = f"{', '.join(held[:5])}{' …' if len(held) > 5 else ''}" if held else "no Python package"
        raise SourceError(target.name, f"the package {target.package}", found, f"name a {target.package} ({FORMS})")


# --- a release of the index ----------------------------------------------------------------------


def _release(text: str, settings: Settings, package: str, pre: bool) -> Target:
    distribution, version = _requirement(text, package)
    if version == LATEST:
        versions = released(distribution, settings, final=not pre)
        if not versions:
            raise SourceError(distribution, "a release on the index", "it has none", "check the name and the index")
        version = versions[-1]
    elif known_release(distribution, version, settings) is None:
        version = spelled(version, released(distribution, settings, final=False))
    tree = open_release(distribution, version, settings)
    return Target(f"{distribution} {version}", package, version, tree, published=True)


def _requirement(text: str, package: str) -> tuple[str, str]:
    """(distribution, version or `latest`) of `name==version`, or of a version alone."""
    names = DISTRIBUTIONS.get(package, (package,))
    if text == LATEST or re.fullmatch(r"v?\d+([.+-]\w+)*", text):
        return names[0], LATEST if text == LATEST else str(parse(text, "TARGET"))
    name, equals, version = text.partition("==")
    if equals and version.strip() == LATEST:
        return name.strip(), LATEST
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    exact = requirement is not None and re.fullmatch(r"={2,3}[^*,]+", str(requirement.specifier))
    if requirement is None or not exact or (package == "vllm" and requirement.name.lower() not in names):
        next_step = "name a release, or a file or folder that exists"
        raise UsageError("TARGET", FORMS.replace("vllm", package), repr(text), next_step)
    return requirement.name, str(parse(str(requirement.specifier).lstrip("="), "TARGET"))


# --- files and URLs ------------------------------------------------------------------------------


def _file(path: Path, package: str, version: str) -> Target:
    return _versioned(path.name, package, file_tree(path), version or _version_of_filename(path.name))


def file_tree(path: Path) -> SourceTree:
    """A wheel or a source distribution of this machine.

    Raises:
        UsageError: it is neither, by its name.
        SourceError: it cannot be read.
    """
    name = path.name
    with unreadable_as(name):
        if name.endswith(".whl"):
            return ZipTree(open_zip(path.open("rb"), name), name)
        if name.endswith((".tar.gz", ".tgz")):

            def open_file() -> IO[bytes]:
                return path.open("rb")

            return TarTree(open_file, name)
    raise UsageError(str(path), "a wheel (.whl) or a source distribution (.tar.gz)", name, "name another file")


def _url(url: str, settings: Settings, package: str, version: str) -> Target:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return open_target(url2pathname(parts.path), settings, package, version)
    name = unquote(parts.path).rpartition("/")[2]
    if parts.scheme not in ("http", "https") or not name.endswith((".whl", ".tar.gz", ".tgz")):
        next_step = "clone the repository and name the folder, or give the address of a wheel or an sdist"
        raise UsageError("TARGET", "http(s)://…/NAME.whl or .tar.gz", repr(url), next_step)
    return _versioned(name, package, open_url(url, name, settings), version or _version_of_filename(name))


def _version_of_filename(name: str) -> str:
    try:
        if name.endswith(".whl"):
            return str(parse_wheel_filename(name)[1])
        return str(parse_sdist_filename(name.removesuffix(".tgz") + (".tar.gz" if name.endswith(".tgz") else ""))[1])
    except (InvalidWheelFilename, InvalidSdistFilename):
        return ""


# --- folders -------------------------------------------------------------------------------------


def _folder(folder: Path, package: str, version: str) -> Target:
    inner = folder / "src" if (folder / "src" / package).is_dir() else folder
    label = str(folder)
    if not (inner / package).is_dir():
        # The package's own folder is as good a name for it.
        if folder.name == package and (folder / "__init__.py").is_file():
            inner = folder.resolve().parent
        else:
            next_step = f"name the folder that holds {package}/"
            raise SourceError(label, f"a folder {package}/ in it, or in its src/", "neither", next_step)
    tree = FolderTree(inner, label, package, confined=True)
    return _versioned(label, package, tree, version or _version_of_tags(folder))


def _version_of_tags(folder: Path) -> str:
    """The version whose tag stands at the commit of a git checkout, '' where none does. Runs no git."""
    git = folder / ".git"
    if not git.is_dir():
        return ""
    commit = _text(git / "HEAD")
    if commit.startswith("ref: "):
        name = commit.removeprefix("ref: ")
        lines = (line.partition(" ") for line in _text(git / "packed-refs").splitlines())
        packed = {ref: sha for sha, _, ref in lines}
        commit = (_text(git / name) if ".." not in name else "") or packed.get(name, "")
    tags = {_text(path): path.name for path in (git / "refs" / "tags").glob("v*") if path.is_file()}
    packed_lines: Sequence[str] = _text(git / "packed-refs").splitlines()
    for line, peeled in zip(packed_lines, [*packed_lines[1:], ""], strict=True):
        sha, _, name = line.partition(" ")
        if name.startswith("refs/tags/v"):
            tags[peeled[1:] if peeled.startswith("^") else sha] = name.rpartition("/")[2]
    version = tags.get(commit, "") if commit else ""
    return version.removeprefix("v") if newest_first([version.removeprefix("v")]) else ""


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""


def _installed(package: str) -> Target:
    """What this Python would import; found by looking, not by importing."""
    names = DISTRIBUTIONS.get(package, (package,))
    found = next((d for name in names for d in importlib.metadata.distributions(name=name)), None)
    if found is None:
        next_step = f"run the gate in the environment that has {package}, or name a release"
        raise SourceError("installed", f"{' or '.join(names)} in this environment", "not installed", next_step)
    label = f"{found.metadata['Name']} {found.version}, installed"
    direct = json.loads(found.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        folder = Path(url2pathname(urlsplit(direct["url"]).path))
        inner = folder / "src" if (folder / "src" / package).is_dir() else folder
    else:
        inner = Path(str(found.locate_file("")))
    return Target(label, package, found.version, Checked(FolderTree(inner, label, package)))


def _versioned(name: str, package: str, tree: SourceTree, version: str) -> Target:
    """A target with the version that was given, or that its files state, or else the newest known one."""
    tree = Checked(tree)
    stated = version or _stated(tree, package)
    if stated:
        return Target(name, package, str(parse(stated, name)), tree)
    if package != "vllm":
        return Target(name, package, "0", tree, assumed=True)
    return Target(name, package, known()[-1], tree, assumed=True)


def _stated(tree: SourceTree, package: str) -> str:
    places = (("PKG-INFO", _METADATA_VERSION), (f"{package}/_version.py", _VERSION_LINE))
    metadata = [(path, _METADATA_VERSION) for path in tree.paths() if path.endswith(".dist-info/METADATA")]
    for path, pattern in (*metadata, *places):
        if path in tree.paths():
            match = pattern.search(tree.read(path).decode("utf-8", "replace"))
            if match and newest_first([match[1]]):
                return match[1]
    return ""


def is_supported(version: str) -> bool:
    """Whether the tables say anything about this vLLM."""
    return not within(version, f"<{known()[0]}")
