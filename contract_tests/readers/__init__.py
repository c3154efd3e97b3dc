"""Two readers that fill one model: sources (not imported) and live objects."""

from __future__ import annotations

from contract_tests.readers.found import Found
from contract_tests.readers.live import read_live
from contract_tests.readers.resolve import Resolver, read_source

__all__ = ["Found", "Resolver", "read_live", "read_source"]
