"""Both readers agree about the vLLM that is installed: what its source says is what importing it shows."""

from __future__ import annotations

import pytest

from contract_tests.homes import homes_in
from contract_tests.readers import Found, read_live
from contract_tests.readers.found import ABSENT, FOUND
from contract_tests.readers.live import same_shape
from contract_tests.recorded import recorded
from shims.releases import known
from shims.versions import installed

_RELEASE = (installed("vllm") or "").partition("+")[0].partition(".post")[0]
# An instance's attributes, set in methods or annotated, cannot be seen on a class.
_ON_INSTANCES = ("attribute", "field")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(_RELEASE not in known(), reason="no known vLLM release is installed"),
]


@pytest.mark.parametrize("home", homes_in("vllm"))
def test_source_and_live_agree(home: str) -> None:
    source = recorded(_RELEASE).at(home)
    live = read_live(home)
    assert not same_shape(source, live), (source, live)
    if source.status == ABSENT:
        assert live.status != FOUND, live
    if source.signature is not None:
        assert _names(source) == _names(live)
        assert source.is_async == live.is_async


def _names(found: Found) -> list[str]:
    """Parameters that a caller can name. pydantic's constructors show them in an order of their own."""
    return sorted(found.signature.names) if found.signature is not None else []
