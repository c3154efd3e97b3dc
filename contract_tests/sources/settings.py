"""Where the index and the cache are, as the user has configured them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pypi_simple import PYPI_SIMPLE_ENDPOINT

# The first one set wins: uv's names for its default index, then pip's.
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
# The last two are read by requests itself; the first two name the same thing for other programs.
_CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class Settings:
    """How sources are fetched.

    Args:
        index: address of a simple index (PEP 503 or 691).
        cache: folder that keeps what was read, by content hash.
        offline: answer from the cache alone.
        certificates: file with the certificate authorities to trust, None for the default ones.
        connections: how many requests may be under way at once.
        timeout: seconds to wait for the index to answer.
    """

    index: str
    cache: Path
    offline: bool = False
    certificates: str | None = None
    connections: int = 8
    timeout: float = 30.0

    @classmethod
    def from_environment(cls, offline: bool = False, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings that the environment asks for; SPECSHIM_OFFLINE=1 is `offline`."""
        index = next((environment[name] for name in _INDEX_VARIABLES if environment.get(name)), PYPI_SIMPLE_ENDPOINT)
        certificates = next((environment[name] for name in _CERTIFICATE_VARIABLES if environment.get(name)), None)
        off = offline or environment.get("SPECSHIM_OFFLINE", "0") not in ("", "0")
        return cls(index, _cache_folder(environment), off, certificates)


def _cache_folder(environment: Mapping[str, str]) -> Path:
    if environment.get("SPECSHIM_CACHE"):
        return Path(environment["SPECSHIM_CACHE"]).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specshim"
