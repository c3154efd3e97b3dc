"""`python -m contract_tests.docs [--check]`: write the generated pages of docs/, or say which are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from contract_tests import performance_page, scale_page, serving_page, support_page, touchpoints_page
from contract_tests.gate import retrodiction

ROOT = Path(__file__).parents[1]

# Path in the repository -> what renders it. A new generated page is one more line here.
PAGES: dict[str, Callable[[], str]] = {
    "docs/touchpoints.md": touchpoints_page.render,
    "docs/evaluate.md": serving_page.render,
    "docs/performance.md": performance_page.render,
    "docs/retrodiction.md": retrodiction.render,
    "docs/scale.md": scale_page.render,
    "docs/support.md": support_page.render,
    "docs/support.svg": support_page.picture,
}


def stale() -> list[str]:
    """The pages that do not say what would be generated now."""
    return [path for path, render in PAGES.items() if _text(ROOT / path) != render()]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with --check compare them; returns the exit code (1: a page is stale)."""
    parser = argparse.ArgumentParser(prog="python -m contract_tests.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    options = parser.parse_args(arguments)
    old = stale()
    for path in old:
        if not options.check:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(PAGES[path](), encoding="utf-8")
        print(f"{path}: {'stale, run python -m contract_tests.docs' if options.check else 'written'}")
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
