"""Does a release offer what is used, given the rows that adapt it? Pure: works on readings alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from contract_tests.consumers import CALLED_BY_VLLM, DEFINED
from contract_tests.homes import touchpoints_with
from contract_tests.readers.found import ABSENT, OPAQUE, UNREAD, Found, Reading
from shims.adaptations import ADAPTATIONS, Adaptation
from shims.contract import Call, Signature, Verdict, misfits
from shims.planning import select
from shims.touchpoints import Touchpoint, by_key
from shims.verbs import Moved, Provide, Replace, reshape
from shims.versions import Stack, within

Others = Mapping[str, Mapping[str, Reading]]

_WORST_FIRST = (Verdict.BROKEN, Verdict.NOT_JUDGED, Verdict.OPAQUE, Verdict.HOLDS)
_OF_STATUS = {ABSENT: Verdict.BROKEN, OPAQUE: Verdict.OPAQUE, UNREAD: Verdict.NOT_JUDGED}


@dataclass(frozen=True)
class Judgement:
    """The verdict on one touchpoint.

    Args:
        touchpoint: what was judged.
        verdict: of the four.
        why: the reason, '' where it simply holds.
        rows: names of the adaptations that it took into account.
        found: what the release has there (at the new home, for a moved name).
    """

    touchpoint: Touchpoint
    verdict: Verdict
    why: str
    rows: tuple[str, ...]
    found: Found


def judge_release(
    vllm: Reading, speculators: str, others: Others, rows: Iterable[Adaptation] | None = None
) -> list[Judgement]:
    """Every touchpoint of one speculators release on one vLLM release.

    Args:
        vllm: reading of the vLLM release.
        speculators: release whose uses are judged.
        others: package -> release -> reading, for what lies outside of vLLM.
        rows: adaptations in force; None selects them as `shims` would.
    """
    stack = Stack(vllm.release, speculators)
    touchpoints = touchpoints_with(speculators)
    packages = {touchpoint.package for touchpoint in touchpoints} - {"vllm"}
    fitting = {package: admitted(package, vllm, speculators, others) for package in packages}
    judged = []
    for touchpoint in touchpoints:
        if not within(vllm.release, touchpoint.vllm):
            continue
        if touchpoint.package == "vllm":
            chosen = _selected(stack) if rows is None else tuple(rows)
            judged.append(judge(touchpoint, speculators, chosen, vllm.at))
        else:
            judged.append(_beside(touchpoint, vllm, speculators, others, fitting[touchpoint.package], rows))
    return judged


@lru_cache(maxsize=4096)
def _selected(stack: Stack) -> tuple[Adaptation, ...]:
    return select(stack).adaptations


def judge(
    touchpoint: Touchpoint, speculators: str, rows: Iterable[Adaptation], at: Callable[[str], Found]
) -> Judgement:
    """One touchpoint, with the rows in force.

    Args:
        touchpoint: what is used.
        speculators: release that uses it.
        rows: all adaptations in force; those of other touchpoints are passed over.
        at: what was found at a home.
    """
    rows = list(rows)
    own = [row for row in rows if row.touchpoint == touchpoint.key]
    names = tuple(row.name for row in own)
    found = at(touchpoint.home)
    if touchpoint.through:
        replaced = [r.name for r in rows if r.touchpoint == touchpoint.through and isinstance(r.verb, Replace)]
        if replaced:
            return Judgement(touchpoint, Verdict.HOLDS, f"no longer used: {replaced[0]}", (replaced[0],), found)
    if any(isinstance(row.verb, Provide) for row in rows if _provides(row, touchpoint)) and found.status == ABSENT:
        provided = tuple(row.name for row in rows if _provides(row, touchpoint))
        return Judgement(touchpoint, Verdict.HOLDS, f"provided: {', '.join(provided)}", provided, found)
    moved = next((row for row in own if isinstance(row.verb, Moved)), None)
    if moved is not None and isinstance(moved.verb, Moved) and found.status == ABSENT:
        found = at(moved.verb.home)
    if touchpoint.kind == "annotation" and found.status == ABSENT and not found.text:
        return Judgement(touchpoint, Verdict.HOLDS, "no annotation asks for it", names, found)
    verdict, why = fits(touchpoint, found, _shape(touchpoint, speculators, own))
    return Judgement(touchpoint, verdict, why, names, found)


def _provides(row: Adaptation, touchpoint: Touchpoint) -> bool:
    """Whether a row supplies this name, or the whole module in which it would stand."""
    if row.touchpoint == touchpoint.key:
        return isinstance(row.verb, Provide)
    supplied = by_key().get(row.touchpoint)
    return (
        isinstance(row.verb, Provide)
        and supplied is not None
        and supplied.kind == "module"
        and supplied.module == touchpoint.module
    )


def _shape(touchpoint: Touchpoint, speculators: str, rows: Iterable[Adaptation]) -> Call | None:
    call = touchpoint.call_for(speculators)
    return None if call is None else reshape(call, [row.verb for row in rows])


def fits(touchpoint: Touchpoint, found: Found, call: Call | None) -> tuple[Verdict, str]:
    """Whether a use, in this shape, fits what was found; with the reason where it does not."""
    if found.status in _OF_STATUS:
        return _OF_STATUS[found.status], found.detail
    if touchpoint.kind == "override":
        return override_fits(CALLED_BY_VLLM[touchpoint.key], found)
    if touchpoint.kind == "subclass":
        return subclass_fits(DEFINED, found)
    if touchpoint.kind == "choice":
        return _choice(touchpoint.key.partition("=")[2], found)
    if call is None:
        return Verdict.HOLDS, ""
    if found.shape in _OF_STATUS:
        return _OF_STATUS[found.shape], found.detail
    if found.signature is None:
        return Verdict.OPAQUE, f"{found.home} is no function or class that can be read"
    reasons = misfits(found.signature, call)
    if reasons:
        return Verdict.BROKEN, f"{found.home}: {', '.join(reasons)}; the call is {call}"
    if found.is_async:
        return Verdict.BROKEN, f"{found.home} is a coroutine function; the call does not await it"
    # Whatever is passed on to **kwargs may still be refused inside.
    unnamed = sorted(set(call.keywords) - set(found.signature.names))
    if unnamed:
        return Verdict.OPAQUE, f"{found.home} takes any keyword; {', '.join(unnamed)} may be refused inside"
    return Verdict.HOLDS, ""


def subclass_fits(defined: Collection[str], found: Found) -> tuple[Verdict, str]:
    """Whether a subclass that defines these methods can be made: no abstract one may be left."""
    left = sorted(set(found.abstract) - set(defined))
    return (Verdict.BROKEN, f"requires a subclass to define {', '.join(left)}") if left else (Verdict.HOLDS, "")


def override_fits(ours: Signature, found: Found) -> tuple[Verdict, str]:
    """Whether a method with the signature `ours` takes what vLLM gives to the one that it stands for."""
    if found.signature is None:
        return Verdict.OPAQUE, f"{found.home} is no method that can be read"
    kinds = {p.name: p.kind for p in found.signature.parameters}
    positional = sum(kind in ("positional_only", "positional_or_keyword") for kind in kinds.values())
    keywords = tuple(name for name, kind in kinds.items() if kind == "keyword_only")
    for call in (Call(positional, keywords), Call(0, tuple(n for n, k in kinds.items() if not k.startswith("var_")))):
        reasons = misfits(ours, call)
        if reasons and not (call.positional == 0 and ours.takes_any_positional):
            return Verdict.BROKEN, f"vLLM calls {found.home}{found.signature}; the override {ours} {', '.join(reasons)}"
    return Verdict.HOLDS, ""


def _choice(value: str, found: Found) -> tuple[Verdict, str]:
    if f"'{value}'" in found.text or f'"{value}"' in found.text:
        return Verdict.HOLDS, ""
    if not found.text or not found.text.endswith("]"):
        return Verdict.OPAQUE, f"the values of {found.home} cannot be read"
    return Verdict.BROKEN, f"{value} is not among {found.text}"


def _beside(
    touchpoint: Touchpoint,
    vllm: Reading,
    speculators: str,
    others: Others,
    releases: Iterable[str],
    rows: Iterable[Adaptation] | None,
) -> Judgement:
    """A touchpoint of another package: on every release of it that may stand beside this vLLM."""
    judged: list[Judgement] = []
    in_question = ADAPTATIONS if rows is None else tuple(rows)
    own = _rows_on(touchpoint.package, in_question)
    for release in releases:
        pinned = {touchpoint.package: release} if touchpoint.package in _PINNED else {}
        chosen = [row for row in own if row.holds_for(Stack(vllm.release, speculators, **pinned))] if own else own
        one = judge(touchpoint, speculators, chosen, others[touchpoint.package][release].at)
        why = f"{touchpoint.package} {release}: {one.why}" if one.why else ""
        judged.append(Judgement(touchpoint, one.verdict, why, one.rows, one.found))
    if not judged:
        why = f"no release of {touchpoint.package} that fits beside vllm {vllm.release} was read"
        return Judgement(touchpoint, Verdict.NOT_JUDGED, why, (), Found(UNREAD, detail=why))
    return min(judged, key=lambda j: (_WORST_FIRST.index(j.verdict), not j.rows))


@lru_cache(maxsize=256)
def _rows_on(package: str, rows: tuple[Adaptation, ...]) -> tuple[Adaptation, ...]:
    """Those of the rows that adapt a name of this package."""
    return tuple(row for row in rows if by_key()[row.touchpoint].package == package)


# The packages whose version is part of a stack, beside vLLM and speculators.
_PINNED = ("torch", "transformers")


def admitted(package: str, vllm: Reading, speculators: str, others: Others) -> list[str]:
    """Releases of `package` that both this vLLM and this speculators allow, of those that were read."""
    read = others.get(package, {})
    if package == "speculators":
        return [speculators] if speculators in read else []
    own = others.get("speculators", {}).get(speculators)
    ranges = [vllm.requires.get(package, ""), own.requires.get(package, "") if own is not None else ""]
    both = [release for release in read if all(within(release, wanted) for wanted in ranges)]
    # Where no release suits both, what vLLM asks for is what gets installed.
    return both or [release for release in read if within(release, ranges[0])]


def worst(judged: Iterable[Judgement]) -> Verdict:
    """The verdict that matters most."""
    return min((j.verdict for j in judged), key=_WORST_FIRST.index, default=Verdict.HOLDS)


def last_that_held(touchpoint: Touchpoint, speculators: str, before: Iterable[Reading]) -> str | None:
    """The newest of the readings in `before` (oldest first) on which the touchpoint held; None if there is none."""
    for reading in reversed(list(before)):
        if not within(reading.release, touchpoint.vllm):
            continue
        rows = select(Stack(reading.release, speculators)).adaptations
        if judge(touchpoint, speculators, rows, reading.at).verdict is Verdict.HOLDS:
            return reading.release
    return None
