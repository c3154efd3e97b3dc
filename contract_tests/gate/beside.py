"""The packages beside vLLM (transformers, torch, speculators): recorded readings, and what an upgrade brings anew."""

from __future__ import annotations

from collections.abc import Iterable

from contract_tests.judge import Others, admitted
from contract_tests.readers.found import Reading
from contract_tests.recorded import OTHERS, recorded_others
from contract_tests.snapshot import read_release
from contract_tests.sources import Settings, SourceError, released
from shims.versions import newest_first, within

_FETCHED = ("transformers", "torch")


def others_for(readings: Iterable[Reading], speculators: str, settings: Settings) -> tuple[Others, list[str]]:
    """Readings of the other packages that suit each of some vLLM releases, and notes on what is missing.

    Where none of the recorded ones fits what a vLLM release asks for, the newest that does is read from the index.
    """
    others = {package: dict(recorded_others(package)) for package in OTHERS}
    notes: list[str] = []
    for reading in readings:
        for package in _FETCHED:
            if admitted(package, reading, speculators, others):
                continue
            wanted = reading.requires.get(package, "")
            try:
                fitting = [version for version in released(package, settings) if within(version, wanted)]
                if not fitting:
                    notes.append(f"{package}{wanted}, which {reading.package} {reading.release} asks for: not there")
                for version in newest_first(fitting)[:1]:
                    others[package][version] = read_release(package, version, settings)
            except SourceError as error:
                notes.append(f"{package}{wanted}, which {reading.package} {reading.release} asks for: {error.found}")
    return others, notes
