"""Another project that uses vLLM: what it imports, calls and derives from, gated like speculators' own uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from contract_tests.candidates import helpful
from contract_tests.gate import moves
from contract_tests.gate.changes import Change, changes, misplaced
from contract_tests.gate.releases import Release, between, read_baseline, state_of
from contract_tests.gate.report import Finding, Level, Report
from contract_tests.gate.targets import file_tree
from contract_tests.homes import GENERATORS
from contract_tests.judge import Judgement, fits, override_fits, subclass_fits
from contract_tests.readers.found import ABSENT, FOUND, OPAQUE, Found
from contract_tests.readers.library import Library
from contract_tests.readers.modules import MOST_PARSED
from contract_tests.readers.resolve import Resolver
from contract_tests.sources import FolderTree, Settings, SourceError, SourceTree, open_release
from contract_tests.sources.release import ReleaseTree, unreadable_as
from contract_tests.uses import UNKNOWN, Subclass, Use, uses_and_subclasses_in
from shims.contract import Call, Signature, Verdict
from shims.errors import UsageError
from shims.touchpoints import Touchpoint

PACKAGE = "vllm"
_NOT_ASYNC = "it is no coroutine function any more, and a call awaits it"


@dataclass(frozen=True)
class Consumer:
    """A project, as far as it uses vLLM.

    Args:
        name: for messages.
        uses, subclasses: in the order of its files.
        notes: what could not be read or followed.
    """

    name: str
    uses: tuple[Use, ...]
    subclasses: tuple[Subclass, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Asked:
    """One thing to judge: a use or an inherited method, with the places where it stands."""

    touchpoint: Touchpoint
    places: tuple[tuple[str, int], ...]
    guarded: bool
    awaited: bool = False
    takes: Signature | None = None  # what the consumer's own method takes, of an override
    defined: tuple[str, ...] = ()  # methods that a subclass defines

    @property
    def call(self) -> Call | None:
        return self.touchpoint.call_for(None)


def open_consumer(text: str, settings: Settings) -> Consumer:
    """Read a project.

    Args:
        text: a folder, a wheel or source distribution, or NAME==VERSION of the index.
        settings: index, cache, offline.

    Raises:
        UsageError: it is none of these, or does not use vLLM.
        SourceError: it cannot be read.
    """
    path = Path(text)
    tree: SourceTree
    if path.is_dir():
        tree = FolderTree(path, text, confined=True)
    elif path.is_file():
        tree = file_tree(path)
    elif "==" in text:
        name, _, version = text.partition("==")
        tree = open_release(name.strip(), version.strip(), settings)
    else:
        wanted = "a folder, a wheel or sdist, or NAME==VERSION"
        raise UsageError("--consumer", wanted, repr(text), "name a project that exists")
    consumer = _read(text if not path.is_file() else path.name, tree)
    if isinstance(tree, ReleaseTree):
        tree.save()
    if not consumer.uses and not consumer.subclasses:
        found = "; ".join(consumer.notes) or "no import of it"
        raise UsageError("--consumer", "a project that uses vllm", f"{text}: {found}", "name the folder of its sources")
    return consumer


def _read(name: str, tree: SourceTree) -> Consumer:
    uses: list[Use] = []
    subclasses: list[Subclass] = []
    unread: list[str] = []
    paths = sorted(p for p in tree.paths() if p.endswith(".py") and not p.startswith(f"{PACKAGE}/"))
    if isinstance(tree, ReleaseTree):
        tree.prefetch(paths)
    for path in paths:
        with unreadable_as(f"{name}, {path}"):
            content = tree.read(path)
        if PACKAGE.encode() not in content:
            continue
        if len(content) > MOST_PARSED:
            unread.append(f"{path} is larger than a module can be: {len(content)} bytes")
            continue
        try:
            found = uses_and_subclasses_in(content.decode("utf-8-sig"), path, (PACKAGE,))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread.append(f"{path} cannot be parsed by this Python: {type(error).__name__}: {error}")
            continue
        uses += (use for use in found[0] if not use.name.startswith(UNKNOWN) and not _is_pythons(use.name))
        subclasses += found[1]
    return Consumer(name, tuple(uses), tuple(subclasses), tuple(unread))


def _is_pythons(name: str) -> bool:
    """Whether a name ends in what every class, module or function has."""
    last = name.rpartition(".")[2]
    return last.startswith("__") and last.endswith("__") and last != "__version__"


def gate_consumer(target: Release, baseline: Release, consumer: Consumer, settings: Settings) -> Report:
    """Judge what a project uses.

    Raises:
        SourceError: something that the judgement needs cannot be read.
    """
    started = time.perf_counter()
    gating = _Gating(target, baseline, settings)
    findings = tuple(gating.finding(asked) for asked in gating.asked(consumer))
    return Report(
        target.name, target.version, baseline.version, consumer.name, state_of(target.version, GENERATORS[-1]),
        findings, notes=(*consumer.notes, *moves.companions(target, baseline, findings)),
        seconds=time.perf_counter() - started,
    )  # fmt: skip


class _Gating:
    def __init__(self, target: Release, baseline: Release, settings: Settings) -> None:
        self.target, self.baseline, self.settings = target, baseline, settings
        self._now, self._then = Resolver(target.library), Resolver(baseline.library)
        self._between = [r for r in between(baseline.version, target.version) if r != target.version]
        self._others: dict[str, Resolver] = {}

    # --- from uses to names ---------------------------------------------------------------------

    def asked(self, consumer: Consumer) -> Iterator[_Asked]:
        """Each name once, with all places of the same use."""
        grouped: dict[tuple[str, Call | None], list[Use]] = {}
        for use in consumer.uses:
            grouped.setdefault((use.name, use.call), []).append(use)
        for (name, call), uses in grouped.items():
            kind = "name" if call is None else "call"
            key = f"{name}{call or ''}"
            # One place that is not prepared for its absence is enough.
            bare = [use for use in uses if not use.guarded]
            places = tuple((use.file, use.line) for use in bare or uses)
            touchpoint = self._touchpoint(key, name, kind, places[0][0], call)
            yield _Asked(touchpoint, places, not bare, any(use.awaited for use in uses))
        for subclass in consumer.subclasses:
            yield from self._inherited(subclass)

    def _inherited(self, subclass: Subclass) -> Iterator[_Asked]:
        place = ((subclass.file, subclass.line),)
        names = tuple(name for name, _ in subclass.methods)
        touchpoint = self._touchpoint(f"class of {subclass.base}", subclass.base, "subclass", subclass.file, None)
        yield _Asked(touchpoint, place, subclass.guarded, defined=names)
        for name, takes in subclass.methods:
            home = f"{touchpoint.home}.{name}"
            # Methods of its own are nobody's business, and a constructor is called by whoever makes it.
            if takes is None or name.startswith("__") or self._then.find(home).status != FOUND:
                continue
            own = Touchpoint(f"override of {subclass.base}.{name}", home, "override", subclass.file, "use", (), "")
            yield _Asked(own, place, subclass.guarded, takes=takes)

    def _touchpoint(self, key: str, name: str, kind: str, file: str, call: Call | None) -> Touchpoint:
        return Touchpoint(key, self._home(name), kind, file, "use", (("", call),) if call is not None else (), "")

    def _home(self, name: str) -> str:
        """`vllm.config.CacheConfig.block_size` -> `vllm.config:CacheConfig.block_size`, as either release has it."""
        homes = [_home_in(release.library, name.split(".")) for release in (self.baseline, self.target)]
        # The release that knows more of the way tells better where the module ends.
        return max(homes, key=lambda home: len(home.partition(":")[0]) if home else 0)

    # --- from names to findings -----------------------------------------------------------------

    def finding(self, asked: _Asked) -> Finding:
        """One use, on both releases."""
        home = asked.touchpoint.home
        old, new = self._then.find(home), self._now.find(home)
        if old.is_async:
            # Whoever called it knew: awaited, handed on, or run by other means.
            gone = new.status == FOUND and not new.is_async and asked.awaited
            old = replace(old, is_async=False)
            new = replace(new, is_async=False) if not gone else replace(new, shape=OPAQUE, detail=_NOT_ASYNC)
        (then, _), (now, why) = self._judged(asked, old), self._judged(asked, new)
        if now is Verdict.HOLDS and asked.call and old.signature and new.signature:
            why = misplaced(old.signature, new.signature, asked.call)
            now = Verdict.BROKEN if why else now
        after = Judgement(asked.touchpoint, now, why, (), new)
        differences = self._changes(old, new, after)
        level = _level(then, now, differences, asked.guarded)
        (file, line), *more = asked.places
        candidates: tuple[str, ...] = ()
        first = ""
        if level in (Level.BROKEN, Level.GUARDED):
            candidates = tuple(_candidates(after, self.target.library, old.signature))
            first = self._first(asked)
        return Finding(
            asked.touchpoint.key, home, level, asked.touchpoint.kind, file, line, why, tuple(differences), (),
            candidates, first, also=tuple(f"{f}:{n}" for f, n in more),
        )  # fmt: skip

    def _judged(self, asked: _Asked, found: Found) -> tuple[Verdict, str]:
        if found.status == FOUND and asked.touchpoint.kind == "subclass":
            return subclass_fits(asked.defined, found)
        if found.status == FOUND and asked.takes is not None:
            return override_fits(asked.takes, found)
        if found.status == ABSENT and asked.touchpoint.kind == "override":
            return Verdict.BROKEN, f"{found.detail}: nobody calls the override any more"
        return fits(asked.touchpoint, found, asked.call)

    def _changes(self, old: Found, new: Found, after: Judgement) -> list[Change]:
        called = after.touchpoint.kind in ("call", "override", "subclass")
        found = changes(old, new) if called else changes(old.without_signature(), new.without_signature())
        if new.status == ABSENT and found:
            return moves.explained(self.target, self.baseline, old, after, found)
        return found

    def _first(self, asked: _Asked) -> str:
        """The first release on which it is broken; '' where the ones before the target cannot be read."""
        try:
            for version in self._between:
                if version not in self._others:
                    self._others[version] = Resolver(read_baseline(version, self.settings).library)
                if self._judged(asked, self._others[version].find(asked.touchpoint.home))[0] is Verdict.BROKEN:
                    return version
        except SourceError:
            return ""
        return self.target.version


def _home_in(library: Library, parts: list[str]) -> str:
    """The home that a dotted name has, or would have, in one release."""
    length = next((n for n in range(len(parts), 0, -1) if library.has(".".join(parts[:n]))), 1)
    facts = library.module(".".join(parts[:length]))
    rest = parts[length:]
    known = facts is not None and rest and (rest[0] in facts.members or "__getattr__" in facts.members)
    # What is written small and followed by more is a module that this release does not have.
    while not known and len(rest) > 1 and rest[0].islower():
        length, rest = length + 1, rest[1:]
    module = ".".join(parts[:length])
    return f"{module}:{'.'.join(rest)}" if rest else module


def _candidates(after: Judgement, library: Library, before: Signature | None) -> list[str]:
    try:
        return [text.removeprefix("verb=") for text in dict.fromkeys(helpful(after, None, library, before))]
    except SourceError:
        return []


def _level(then: Verdict, now: Verdict, differences: list[Change], guarded: bool) -> Level:
    if now is Verdict.BROKEN:
        if then is Verdict.BROKEN:
            return Level.STANDING
        return Level.GUARDED if guarded else Level.BROKEN
    if now is not Verdict.HOLDS:
        return Level.STANDING if then is not Verdict.HOLDS else Level.NOT_JUDGED
    return Level.CHANGED if differences else Level.HOLDS
