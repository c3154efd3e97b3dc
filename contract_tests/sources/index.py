"""Asking the package index: which files a release has, and parts of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import requests
from packaging.utils import canonicalize_name
from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError, UnsupportedRepoVersionError
from requests.adapters import HTTPAdapter, Retry

from contract_tests.sources.settings import Settings
from contract_tests.sources.trees import SourceError

# The page of a project with thousands of files is a few megabytes.
_MOST_BYTES = 64 * 1024 * 1024


class _Bounded(HTTPAdapter):  # type: ignore[misc]
    """Takes no answer into memory that is larger than any page of an index; parts of files are bounded elsewhere."""

    def send(self, request: requests.PreparedRequest, stream: bool = False, **options: Any) -> requests.Response:
        response = super().send(request, stream=True, **options)
        if not stream:
            content = response.raw.read(_MOST_BYTES + 1, decode_content=True)
            if len(content) > _MOST_BYTES:
                response.close()
                raise requests.RequestException(f"the answer is larger than {_MOST_BYTES} bytes")
            response._content, response._content_consumed = content, True
            response.raw.release_conn()
        return response


@dataclass(frozen=True)
class Distribution:
    """One file of a release on the index; `kind` is `wheel` or `sdist`, `sha256` is '' where not told."""

    filename: str
    url: str
    kind: str
    sha256: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Index:
    """One index, asked by several threads with a bounded number of connections.

    Args:
        settings: address, certificates, time-out.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._local = threading.local()

    def session(self) -> requests.Session:
        """This thread's session; it keeps its connection open."""
        if not hasattr(self._local, "session"):
            session = requests.Session()
            retry = Retry(total=2, backoff_factor=0.3, status_forcelist=(429, 502, 503, 504))
            adapter = _Bounded(pool_maxsize=1, max_retries=retry)
            session.mount("https://", adapter)
            session.mount("http://", adapter)
            if self.settings.certificates:
                session.verify = self.settings.certificates
            self._local.session = session
        session = self._local.session
        assert isinstance(session, requests.Session)
        return session

    def files(self, package: str) -> dict[str, list[Distribution]]:
        """version -> its files, for every release of `package` that has any.

        Raises:
            SourceError: the index does not answer, or does not know the package.
        """
        with explained(f"index page of {package}"), PyPISimple(self.settings.index, session=self.session()) as client:
            try:
                page = client.get_project_page(canonicalize_name(package), timeout=self.settings.timeout)
            except NoSuchProjectError:
                raise SourceError(
                    f"index page of {package}", "a project of this name", "the index has none", "check the name"
                ) from None
        found: dict[str, list[Distribution]] = {}
        for file in page.packages:
            if file.version and file.package_type in ("wheel", "sdist"):
                sha256 = file.digests.get("sha256", "")
                distribution = Distribution(file.filename, file.url, file.package_type, sha256)
                found.setdefault(file.version, []).append(distribution)
        return found


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn a failure of the network into one that says where and what to do.

    Raises:
        SourceError: instead of the failure.
    """
    try:
        yield
    except (requests.RequestException, UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
        found = f"{type(error).__name__}: {_shortened(error)}"
        next_step = "check the index (PIP_INDEX_URL, UV_DEFAULT_INDEX) and the certificates (SSL_CERT_FILE), try again"
        raise SourceError(where, "an answer from the package index", found, next_step) from error


def _shortened(error: Any) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}…"
