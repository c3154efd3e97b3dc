"""Lines that bring in a vLLM which they do not tell: a variable, a path, a fork. Nothing may be concluded from them."""

from __future__ import annotations

import re

# Names of packages are the same in any case, and with - _ or . between their words.
PACKAGE = r"(?i:vllm(?:[-_.]cpu)?)"
NAME = rf"(?<![\w./-]){PACKAGE}(?:\[[^\]]*\])?"
_OPERATOR = r"(?:===|==|~=|>=|<=|!=|<|>)"
# What a shell, a template or a build fills in.
_FILLED = r"(?:\$|\{\{|%\()"
# Each says what is brought in; where it is all that a line says of vLLM, the release is not known.
_BROUGHT = (
    re.compile(rf"({NAME}\s*{_OPERATOR}\s*[\"']?{_FILLED}(?:\{{\{{[^{{}}]*\}}|[^\s\"',;])*)"),
    re.compile(rf"({NAME}\s*@\s*(?:{_FILLED}|[a-z+]+:|\.{{0,2}}/)[^\s\"',;]*)"),
    re.compile(rf"^\s*([\"']?{PACKAGE}[\"']?\s*[=:]\s*\{{[^}}]*\b(?:path|url|file|git)[\"']?\s*[=:][^}}]*)"),
    re.compile(rf"(?:^\s*(?:-\s+)?[\"']?(?=\.|file:)|(?:-e|--editable|install)[\s=]+[\"']?)"
               rf"((?:file:)?\.{{0,2}}/(?:[^\s\"']*/)?{PACKAGE}/?(?:\[[^\]]*\])?)(?=[\s\"',;]|$)"),
    re.compile(rf"(?<!\S)(\S+[#&]egg={PACKAGE}\b)"),
    re.compile(rf"(?<![^\s\"'=])([^\s\"'=]*(?<![\w.-]){PACKAGE}-(?=[\d$*?{{%v])[^\s\"'/]*\.(?:whl|tar\.gz))"),
    re.compile(r"(vllm/vllm-openai(?:-\w+)*:[\"']?(?:\$|\{\{)(?:\{\{[^{}]*\}|[^\s\"',;])*)"),
)  # fmt: skip
# A line that names the package at all, in whatever way, or a variable that sets it. An import sets nothing.
_NAMED = re.compile(
    rf"(?<![\w-])(?:{PACKAGE}(?:\.git)?(?!\.?\w|-)|(?i:vllm_(?:version|tag|commit|ref|branch|wheel\w*))\b)"
)
_IMPORT = re.compile(r"^\s*(?:from|import)\s")
_LONGEST_TOLD = 200


def brought_in(text: str) -> str:
    """What a line brings in without telling its release, '' where it does not."""
    if "vllm" not in text.lower():
        return ""
    match = next(filter(None, (pattern.search(text) for pattern in _BROUGHT)), None)
    return _told(match[1]) if match else ""


def named(text: str) -> str:
    """The line, where it names vLLM: nothing by itself, but it may stand for a pin that goes."""
    return _told(text) if _NAMED.search(text) and not _IMPORT.match(text) else ""


def _told(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_TOLD]
