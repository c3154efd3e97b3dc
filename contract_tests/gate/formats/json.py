"""For programs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from contract_tests.gate.report import Report, exit_code

# Raised when a key changes its meaning or goes; new keys may come without.
SCHEMA = 1


def render(reports: Sequence[Report], fail_on: str) -> str:
    """Everything that the reports hold."""
    data = {
        "schema": SCHEMA,
        "fail_on": fail_on,
        "exit_code": exit_code(reports, fail_on),
        "reports": [report.as_dict() for report in reports],
    }
    return json.dumps(data) + "\n"
