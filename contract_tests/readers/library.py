"""The modules of one release, read when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from contract_tests.readers import facts
from contract_tests.readers.facts import ModuleFacts
from contract_tests.readers.modules import read_module
from contract_tests.sources.store import Store, digest
from contract_tests.sources.trees import HashedTree, SourceTree

_reading = threading.Lock()


class Library:
    """Modules by dotted name, out of a tree of files.

    Args:
        tree: the release's files.
        store: keeps facts by content hash, so that a file that did not change is read once; None keeps nothing.
    """

    def __init__(self, tree: SourceTree, store: Store | None = None) -> None:
        self.tree, self.store = tree, store
        self.files: dict[str, str] = {}  # path -> sha256 of what was read
        self._modules: dict[str, ModuleFacts | None] = {}
        self._paths = tree.paths()
        self._folders = _folders(self._paths)

    def module(self, name: str) -> ModuleFacts | None:
        """The facts of a module; None where the release certainly has none of this name.

        Raises:
            SourceError: its file cannot be fetched.
        """
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def has(self, name: str) -> bool:
        """Whether the release has a module of this name, by its files alone."""
        return self.path_of(name) is not None or name.replace(".", "/") in self._folders

    def path_of(self, name: str) -> str | None:
        """The source file of a module, or None."""
        stem = name.replace(".", "/")
        return next((p for p in (f"{stem}/__init__.py", f"{stem}.py") if p in self._paths), None)

    def package_of(self, name: str) -> str:
        """What relative imports of a module start from: itself, if it is a package."""
        path = self.path_of(name) or ""
        return name if path.endswith("/__init__.py") else name.rpartition(".")[0]

    def owns(self, name: str) -> bool:
        """Whether a dotted name begins with a package of this release."""
        return name.partition(".")[0] in self._folders or f"{name.partition('.')[0]}.py" in self._paths

    def source(self, name: str) -> bytes | None:
        """The source of a module, None where the release has none of this name.

        Raises:
            SourceError: its file cannot be fetched.
        """
        path = self.path_of(name)
        if path is None:
            return None
        content = self.tree.read(path)
        self.files[path] = digest(content)
        return content

    def hash_of(self, name: str) -> str:
        """The content hash of a module's source, '' where the release has none of this name.

        Raises:
            SourceError: its file cannot be fetched.
        """
        path = self.path_of(name)
        if path is None:
            return ""
        if path not in self.files and isinstance(self.tree, HashedTree):
            known = self.tree.known_hash(path)
            if known:
                self.files[path] = known
        if path not in self.files:
            self.source(name)
        return self.files[path]

    def loaded(self) -> dict[str, ModuleFacts]:
        """The modules read so far."""
        return {name: found for name, found in self._modules.items() if found is not None}

    def _read(self, name: str) -> ModuleFacts | None:
        path = self.path_of(name)
        if path is not None:
            content = self.tree.read(path)
            self.files[path] = sha256 = digest(content)
            # The name is part of the key: relative imports depend on it.
            key = ("facts", str(facts.VERSION), sha256[:2], f"{sha256}-{name}")
            # Another thread may be reading the same content for another release: then what it keeps is taken.
            with _reading:
                kept = self.store.get(*key) if self.store else None
                if kept is not None:
                    return facts.load(kept)
                found = read_module(name, path, content)
                if self.store and not found.problem:
                    self.store.put(facts.dump(found), *key)
                return found
        stem = name.replace(".", "/")
        if any(p.startswith(f"{stem}.") and p.endswith((".so", ".pyd", ".pyi")) for p in self._paths):
            return ModuleFacts(name, problem=f"{name} is compiled")
        return ModuleFacts(name) if stem in self._folders else None


def _folders(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found
