"""Sources of published releases, read from the package index without installing anything."""

from __future__ import annotations

from contract_tests.sources.release import known_release, open_release, released
from contract_tests.sources.settings import Settings
from contract_tests.sources.trees import FolderTree, SourceError, SourceTree

__all__ = ["FolderTree", "Settings", "SourceError", "SourceTree", "known_release", "open_release", "released"]
