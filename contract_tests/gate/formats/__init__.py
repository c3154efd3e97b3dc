"""One report, in the forms that people and CI systems read. A new form is one more line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contract_tests.gate.formats import github, html, json, junit, markdown, sarif, text
from contract_tests.gate.report import Report

# Name -> what renders reports, given what `--fail-on` says.
FORMATS: dict[str, Callable[[Sequence[Report], str], str]] = {
    "text": text.render,
    "markdown": markdown.render,
    "json": json.render,
    "junit": junit.render,
    "sarif": sarif.render,
    "github": github.render,
    "html": html.render,
}
