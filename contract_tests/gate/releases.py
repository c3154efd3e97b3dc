"""The two releases that a gate compares, and how much is known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

from contract_tests.gate.targets import Target, is_supported
from contract_tests.judge import Judgement
from contract_tests.kept import same_as_recorded
from contract_tests.readers.found import Reading
from contract_tests.readers.library import Library
from contract_tests.recorded import recorded
from contract_tests.snapshot import read_release, read_releases, read_tree
from contract_tests.sources import Settings, SourceError, open_release
from contract_tests.sources.release import ReleaseTree
from contract_tests.sources.store import Store
from contract_tests.support_page import live, results
from shims.errors import UsageError
from shims.releases import known, lender
from shims.versions import at_or_below, is_exact_release, parse, spelled, within

UNKNOWN, STATIC, VERIFIED, NOT_READ = "unknown", "static", "verified", "not read"


@dataclass
class Release:
    """A vLLM release as the gate looks at it: its reading, and its modules where more is asked for."""

    name: str
    version: str
    reading: Reading
    open_library: Callable[[], Library]
    notes: tuple[str, ...] = ()
    judged: dict[tuple[str, int], list[Judgement]] = field(default_factory=dict, repr=False)  # see `judging.judged`

    @cached_property
    def library(self) -> Library:
        """The modules.

        Raises:
            SourceError: the sources cannot be had.
        """
        return self.open_library()


def read_target(target: Target, settings: Settings) -> Release:
    """What a target holds.

    Raises:
        SourceError: it cannot be read.
        UsageError: it is older than what the tables cover.
    """
    if not is_supported(target.version):
        wanted, found = f"vLLM {known()[0]} or newer", target.version
        raise UsageError(target.name, wanted, found, "gate a newer release, or say --version if this one is mistaken")
    store = Store(settings.cache)
    if isinstance(target.tree, ReleaseTree) and target.tree.package == "vllm":
        same = same_as_recorded(target.tree)
        reading = recorded(target.version) if same else read_release("vllm", target.version, settings)
    else:
        reading = read_tree(target.tree, "vllm", target.version, store)
    _refuse_if_hollow(target, reading)
    notes = [f"{target.name} does not say its version; taken for {target.version} (--version)"] * target.assumed
    if is_exact_release(target.version) and (neighbour := lender(base_of(target.version))) is not None:
        notes.append(f"run live on the CPU kernels of {neighbour}, since it has no CPU build that loads")
    return Release(target.name, target.version, reading, lambda: Library(target.tree, store), tuple(notes))


def fetch_together(releases: Sequence[str], settings: Settings) -> None:
    """Fetch several releases of vLLM side by side, and read those that are not as they were recorded.

    Raises:
        SourceError: one of them cannot be read.
    """

    def same(release: str) -> bool:
        return same_as_recorded(open_release("vllm", release, settings))

    with ThreadPoolExecutor(settings.connections) as pool:
        known_ones = list(pool.map(same, releases))
    read_releases("vllm", [r for r, is_same in zip(releases, known_ones, strict=True) if not is_same], settings)


def _refuse_if_hollow(target: Target, reading: Reading) -> None:
    """Refuse what bears the name but has next to nothing of vLLM: to call each name broken would mislead.

    Raises:
        SourceError: it is hollow.
    """
    modules = {home.partition(":")[0] for home in reading.found if "." in home.partition(":")[0]}
    paths = target.tree.paths()
    folders = {path.rpartition("/")[0] for path in paths}
    there = [m for m in modules if f"{m.replace('.', '/')}.py" in paths or m.replace(".", "/") in folders]
    if len(there) < len(modules) // 3:
        wanted, found = "the sources of vLLM", f"{len(there)} of the {len(modules)} modules that are used of it"
        raise SourceError(target.name, wanted, found, "name a vLLM release, file or checkout")


def read_baseline(version: str, settings: Settings) -> Release:
    """A release to compare with: its snapshot if there is one, else read from the index.

    Raises:
        SourceError: it cannot be read.
    """
    base = spelled(version.partition("+")[0], known())
    reading = recorded(base) if base in known() else read_release("vllm", base, settings)

    def library() -> Library:
        return Library(open_release("vllm", base, settings), Store(settings.cache))

    return Release(f"vllm {base}", base, reading, library)


def state_of(version: str, speculators: str) -> str:
    """How much is known of a release: see `Report.state`."""
    base = version.partition("+")[0]
    if base not in known() or not is_exact_release(version):
        return UNKNOWN
    cases = results(base).get("cases", [])
    outcomes = {live(cases, speculators, device)[0] for device in ("cpu", "gpu")} - {""}
    return VERIFIED if outcomes == {"pass"} else STATIC


def default_baseline(version: str, speculators: str) -> str:
    """The newest verified release at or below `version`; where none is, the newest known one below it."""
    verified = [release for release in known() if state_of(release, speculators) == VERIFIED]
    below = [release for release in known() if within(release, f"<{base_of(version)}")]
    return at_or_below(version, verified) or (below[-1] if below else known()[0])


def between(baseline: str, target: str) -> list[str]:
    """Known releases after the one and up to the other, oldest first."""
    return [r for r in known() if within(r, f">{base_of(baseline)},<={base_of(target)}")]


def base_of(version: str) -> str:
    """The release that a version leads to or was built from: `0.33.0` of `0.33.0.dev5+gabc`."""
    return parse(version).base_version
