"""Each speculators release has one row, and only releases that were read count as read."""

from __future__ import annotations

import pytest

from pipeline.training_series import SERIES, series_of
from shims.errors import SpecshimError
from shims.versions import within

RELEASES = {
    "0.4.0": "0.4", "0.4.0.1": "0.4", "0.5.0": "0.5", "0.6.0": "0.6", "0.7.0": "0.7", "0.8.0": "0.8", "0.9.0": "0.8",
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_has_one_row(release: str) -> None:
    series, read = series_of(release)
    assert read and series.name == RELEASES[release]
    assert sum(within(release, row.releases) for row in SERIES) == 1


def test_a_newer_release_is_driven_as_the_last_one_and_said_to_be_unread() -> None:
    assert series_of("0.12.0") == (SERIES[-1], False)


@pytest.mark.parametrize("version", [None, "0.3.0"])
def test_without_a_trainer_there_is_no_row(version: str | None) -> None:
    with pytest.raises(SpecshimError, match=version or "no speculators"):
        series_of(version)
