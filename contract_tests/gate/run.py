"""From options to reports: which targets, which baselines, for which consumers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from contract_tests.gate.bumps import Bump, bumps_of
from contract_tests.gate.consumer import Consumer, gate_consumer, open_consumer
from contract_tests.gate.deadline import deadline
from contract_tests.gate.judging import gate
from contract_tests.gate.options import Options
from contract_tests.gate.releases import NOT_READ, Release, default_baseline, fetch_together, read_baseline, read_target
from contract_tests.gate.report import Finding, Level, Report
from contract_tests.gate.targets import open_target
from contract_tests.homes import GENERATORS
from contract_tests.recorded import is_recorded, recorded
from contract_tests.sources import Settings
from shims.errors import SpecshimError, UsageError
from shims.releases import SPECULATORS, known
from shims.versions import has_generator, installed, known_as

ALL = "all"


def run(options: Options) -> list[Report]:
    """The reports, in the order in which the targets were named. What cannot be judged is a report that says so.

    Raises:
        SpecshimError: the request itself is wrong, or a diff cannot be read.
    """
    settings = Settings.from_environment(options.offline)
    reports: list[Report] = []
    releases = _Releases(settings)
    with deadline(options.timeout, "the gate"):
        if options.speculators:
            speculators_of(options)  # refused before anything is read
        consumers = [open_consumer(text, settings) for text in options.consumers]
        for bump in _bumps(options, settings):
            try:
                if bump.fault is not None:
                    raise bump.fault
                reports += _judge(bump, options, consumers, releases)
            except SpecshimError as error:
                reports.append(not_judged(bump, error))
    return reports


def speculators_of(options: Options) -> list[str]:
    """The speculators releases whose uses are judged.

    Raises:
        UsageError: nothing is known of what one of them uses.
    """
    if "none" in options.speculators:
        return []
    if ALL in options.speculators:
        return list(GENERATORS)
    if options.speculators:
        return [_known(version, "--speculators") for version in options.speculators]
    here = installed("speculators")
    return [_known(here, "speculators of this environment") if here and has_generator(here) else GENERATORS[-1]]


def _known(speculators: str, where: str) -> str:
    """The release of which it was read what it uses: to judge another one by its neighbours' uses would be a guess."""
    release = known_as(speculators, SPECULATORS)
    if release is None:
        wanted, found = f"a release whose uses are known: {', '.join(SPECULATORS)}", f"speculators {speculators}"
        raise UsageError(where, wanted, found, "name one of these with --speculators, or `none` and a --consumer")
    return release


def not_judged(bump: Bump, error: SpecshimError) -> Report:
    """The report on a target that could not be judged at all."""
    finding = Finding(
        error.where, bump.target, Level.NOT_JUDGED, "target", bump.file, bump.line,
        f"wanted: {error.wanted}; found: {error.found}; next: {error.next_step}",
    )  # fmt: skip
    return Report(bump.target, "", bump.baseline, "anyone", NOT_READ, (finding,), file=bump.file, line=bump.line)


def _bumps(options: Options, settings: Settings) -> Iterator[Bump]:
    if options.from_diff is not None:
        yield from bumps_of(options.from_diff, options.base, settings, options.pre)
    for target in options.targets:
        if target == ALL:
            releases = known()
            fetch_together(releases, settings)
            for before, release in zip([releases[0], *releases], releases, strict=False):
                yield Bump(f"vllm=={release}", before)
        else:
            yield Bump(target, options.baseline)


class _Releases:
    """The releases that were read in this run: what is a target first may be a baseline then."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._baselines: dict[str, Release] = {}

    def target(self, text: str, version: str, pre: bool) -> Release:
        """See `read_target`."""
        opened = open_target(text, self.settings, version=version, pre=pre)
        release = read_target(opened, self.settings)
        if is_recorded(release.version) and release.reading is recorded(release.version):
            self._baselines[release.version] = release
        return release

    def baseline(self, version: str) -> Release:
        """See `read_baseline`."""
        if version not in self._baselines:
            self._baselines[version] = read_baseline(version, self.settings)
        return self._baselines[version]


def _judge(bump: Bump, options: Options, consumers: list[Consumer], releases: _Releases) -> Iterator[Report]:
    started = time.perf_counter()
    target = releases.target(bump.target, options.version, options.pre)
    chosen = options.baseline or bump.baseline
    reading = time.perf_counter() - started
    for speculators in speculators_of(options):
        baseline = releases.baseline(chosen or default_baseline(target.version, speculators))
        yield _placed(gate(target, baseline, speculators, releases.settings), target, bump, reading)
    for consumer in consumers:
        baseline = releases.baseline(chosen or default_baseline(target.version, GENERATORS[-1]))
        yield _placed(gate_consumer(target, baseline, consumer, releases.settings), target, bump, reading)


def _placed(report: Report, target: Release, bump: Bump, reading: float) -> Report:
    """The report with the user's line that names the target, and with what reading it took."""
    notes = (*target.notes, *report.notes)
    return Report(
        report.target, report.version, report.baseline, report.consumer, report.state, report.findings,
        report.rows_new, report.rows_gone, notes, report.seconds + reading, bump.file, bump.line,
    )  # fmt: skip
