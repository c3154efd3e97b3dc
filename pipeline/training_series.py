"""DATA: what differs between speculators' trainers, one row a series. Nothing is compared by version elsewhere.

Read from the releases' own sources: `speculators/train/trainer.py`, `data.py` and `models/eagle3/core.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shims.errors import SpecshimError
from shims.versions import installed, within


@dataclass(frozen=True)
class Series:
    """One generation of speculators' trainer."""

    name: str
    releases: str
    """A range of speculators versions."""
    documents: str
    """How a packed batch says which row a token belongs to: ``lengths`` [rows], or ``document_ids`` [1, T]."""
    counted: bool
    """Metrics are pairs ``x_sum`` and ``x_total``, divided by the trainer when it reports them."""
    device_in_config: bool
    """The trainer's device is a field of its configuration; else a variable of ``speculators.train.distributed``."""
    autocasts: bool
    """float32 weights computed in another type; where not, the weights themselves have the type."""
    counts_errors: bool
    """A batch carries ``error_records``, the rows that could not be read."""
    shards: bool
    """Its own FSDP sharding keeps the initial weights."""


SERIES = (
    Series("0.4", ">=0.4,<0.5", "lengths", False, True, False, False, False),
    Series("0.5", ">=0.5,<0.6", "lengths", False, True, False, False, True),
    Series("0.6", ">=0.6,<0.7", "lengths", True, True, False, False, True),
    Series("0.7", ">=0.7,<0.8", "document_ids", True, False, True, False, True),
    Series("0.8", ">=0.8,<0.10", "document_ids", True, False, True, True, True),
)
_SUPPORTED = ">=0.4"


def series_of(version: str | None) -> tuple[Series, bool]:
    """The row for a speculators version, and whether it is one that was read (a newer one gets the last row).

    Raises:
        SpecshimError: speculators is absent, or older than 0.4.
    """
    for series in SERIES:
        if within(version, series.releases):
            return series, True
    if version is None or not within(version, _SUPPORTED):
        raise SpecshimError(
            "train",
            "speculators 0.4.0 to 0.9.0, whose trainer this drives",
            f"speculators {version}" if version else "no speculators",
            "pip install speculators in an environment for training",
        )
    return SERIES[-1], False


def installed_series() -> tuple[Series, bool]:
    """:func:`series_of` the installed speculators."""
    return series_of(installed("speculators"))
