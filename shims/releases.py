"""The table of known vLLM releases, read from `releases.toml`, and what is known beside vLLM."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

# In a wheel the table lies beside this file, in a checkout at the top.
_PLACES = (Path(__file__).with_name("releases.toml"), Path(__file__).parents[1] / "releases.toml")

# The speculators releases of which it was read what they use.
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.9.0")
# The oldest and the newest transformers that was read; a test compares it with the snapshots.
TRANSFORMERS = ("4.55.2", "5.24.0")


@lru_cache(maxsize=1)
def table() -> list[dict[str, Any]]:
    """The releases, oldest first; keys as described at the top of `releases.toml`."""
    path = next(place for place in _PLACES if place.is_file())
    releases: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["release"]
    return releases


@lru_cache(maxsize=1)
def known() -> list[str]:
    """Versions of the known releases, oldest first."""
    return [release["version"] for release in table()]


def lender(version: str) -> str | None:
    """The release on whose compiled CPU kernels `version` was run live, where it has none of its own that load."""
    return next((release.get("kernels") for release in table() if release["version"] == version), None)


@lru_cache(maxsize=1)
def proved_direct() -> frozenset[str]:
    """Versions on which the direct engine was run and every row was right (`direct = true` in the table)."""
    return frozenset(release["version"] for release in table() if release.get("direct"))
