"""Which names are looked up in which package: what every table of touchpoints and rows mentions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from contract_tests.consumers import CONSUMERS
from shims.adaptations import ADAPTATIONS
from shims.direct.touchpoints import CAPTURE, DIRECT
from shims.touchpoints import GENERATOR_MODULE, TOUCHPOINTS, Touchpoint, used_by
from shims.verbs import Moved
from shims.versions import has_generator

# The releases of speculators that have a generator; each is judged with each vLLM.
GENERATORS = ("0.3.0", "0.4.0", "0.4.0.1")


def all_touchpoints() -> tuple[Touchpoint, ...]:
    return (*TOUCHPOINTS, *CONSUMERS, *DIRECT)


def touchpoints_with(speculators: str) -> list[Touchpoint]:
    """What is used where this speculators release is installed: by its generator and the shims, or by the
    clients that came after it; and by the direct engine, whichever it is."""
    own = TOUCHPOINTS if has_generator(speculators) else (*CONSUMERS, *CAPTURE)
    return used_by(speculators, (*own, *DIRECT))


@lru_cache(maxsize=8)
def homes_in(package: str) -> tuple[str, ...]:
    """Every `module:name` to look up in one package, sorted."""
    return tuple(sorted({home for home in _homes() if home.partition(".")[0].partition(":")[0] == package}))


@lru_cache(maxsize=1)
def called_homes() -> frozenset[str]:
    """The homes whose signature matters: what is called, overridden, or moved to."""
    called = {t.home for t in all_touchpoints() if t.kind in ("call", "override")}
    return frozenset(called | {row.verb.home for row in ADAPTATIONS if isinstance(row.verb, Moved)})


def _homes() -> Iterator[str]:
    for touchpoint in all_touchpoints():
        if touchpoint.home != GENERATOR_MODULE:  # where speculators has none, the shims offer it
            yield touchpoint.home
    for row in ADAPTATIONS:
        if isinstance(row.verb, Moved):
            yield row.verb.home
