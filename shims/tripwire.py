"""Arm the shims cheaply: nothing is planned or patched before a package of the stack is imported.

`import shims` has to cost next to nothing, and reading versions and loading wrapt would cost most of
it. So a finder that finds nothing stands at the front of the import path; the first import of a
package of the stack makes it step aside and put the hooks in place.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = frozenset({"vllm", "speculators", "transformers"})


class Tripwire:
    """A finder that calls `spring` once, before the first import of a package of the stack."""

    def __init__(self, spring: Callable[[], object]) -> None:
        self._spring = spring
        self._lock = threading.RLock()

    @property
    def armed(self) -> bool:
        return self in sys.meta_path

    def arm(self) -> None:
        """Wait for the import, or spring at once if a package is loaded already."""
        if PACKAGES & sys.modules.keys():
            self._spring()
        elif not self.armed:
            sys.meta_path.insert(0, self)

    def disarm(self) -> None:
        if self.armed:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if name.partition(".")[0] not in PACKAGES:
            return None
        with self._lock:
            if not self.armed:
                return None
            self.disarm()
            self._spring()
        # Asked again, so that a hook just registered for this very module is not passed over.
        return importlib.util.find_spec(name)
