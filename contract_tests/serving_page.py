"""The table of docs/evaluate.md: what differs between vLLM releases in how a draft is served, from the facts."""

from __future__ import annotations

from pathlib import Path

from contract_tests.marked import between_marks
from pipeline.serving.facts import FACTS

PAGE = Path(__file__).parents[1] / "docs" / "evaluate.md"


def render() -> str:
    """The page with a fresh table."""
    rows = [f"| {fact.vllm} | {fact.what} | [{fact.seen}]({fact.link}) |" for fact in FACTS]
    return between_marks(PAGE, ["| vLLM | what holds | seen |", "|---|---|---|", *rows])
