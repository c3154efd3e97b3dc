"""What a reading of one name says. The one model of both readers, and what snapshots hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from shims.contract import Parameter, Signature

FOUND, ABSENT, OPAQUE, UNREAD = "found", "absent", "opaque", "unread"

_MARKS = {"var_positional": "*", "var_keyword": "**"}


@dataclass(frozen=True)
class Found:
    """One name, as read.

    Args:
        status: `found`; `absent`: certainly not there; `opaque`: there, or perhaps there, but made at run
            time; `unread`: what was read does not hold the answer.
        kind: `function`, `method`, `class`, `attribute`, `module` or `import` (of another package).
        home: `module:qualified.name` where it is defined, after re-exports and inheritance.
        signature: what a caller may give: a function's, or a class's constructor's; None where
            it is not callable or cannot be told.
        defaults: parameter -> default as written.
        is_async: whether calling it makes a coroutine.
        fields: whether the parameters are the fields of a dataclass, a struct or a model.
        abstract: names that a subclass has to define, of a class.
        text: the value of a `Literal`; of an absent name, the classes whose annotations ask for it.
        shape: `opaque` or `unread` where it is there but what it takes cannot be told; '' otherwise.
        detail: why, where the status is not `found` or `shape` says something.
    """

    status: str
    kind: str = ""
    home: str = ""
    signature: Signature | None = None
    defaults: tuple[tuple[str, str], ...] = ()
    is_async: bool = False
    abstract: tuple[str, ...] = ()
    text: str = ""
    shape: str = ""
    detail: str = ""
    fields: bool = False

    def without_signature(self) -> Found:
        """The same, of a name that nobody calls."""
        return replace(
            self,
            signature=None,
            defaults=(),
            is_async=False,
            fields=False,
            shape="",
            detail=self.detail if self.status != FOUND else "",
        )

    def as_dict(self) -> dict[str, Any]:
        """For a snapshot: empty parts are left out, parameters are written as in source."""
        data: dict[str, Any] = {"status": self.status, "kind": self.kind, "home": self.home}
        if self.signature is not None:
            data["parameters"] = written(self.signature, dict(self.defaults))
        if self.is_async:
            data["async"] = True
        if self.fields:
            data["fields"] = True
        data |= {"abstract": list(self.abstract), "text": self.text}
        data |= {"shape": self.shape, "detail": self.detail}
        return {key: value for key, value in data.items() if value or key == "parameters"}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Found:
        signature, defaults = parsed(data["parameters"]) if "parameters" in data else (None, {})
        return cls(
            data["status"],
            data.get("kind", ""),
            data.get("home", ""),
            signature,
            tuple(defaults.items()),
            data.get("async", False),
            tuple(data.get("abstract", ())),
            data.get("text", ""),
            data.get("shape", ""),
            data.get("detail", ""),
            data.get("fields", False),
        )


def written(signature: Signature, defaults: dict[str, str]) -> list[str]:
    """Parameters as source has them: `["a", "/", "b=1", "*", "c", "**kwargs"]`."""
    parts: list[str] = []
    kinds = [p.kind for p in signature.parameters]
    for i, p in enumerate(signature.parameters):
        if p.kind == "keyword_only" and not any(k in ("keyword_only", "var_positional") for k in kinds[:i]):
            parts.append("*")
        optional = not p.required and p.kind not in _MARKS
        parts.append(f"{_MARKS.get(p.kind, '')}{p.name}" + (f"={defaults.get(p.name, '…')}" if optional else ""))
        if p.kind == "positional_only" and kinds[i + 1 : i + 2] != ["positional_only"]:
            parts.append("/")
    return parts


def parsed(parts: list[str]) -> tuple[Signature, dict[str, str]]:
    """The inverse of `written`."""
    parameters: list[Parameter] = []
    defaults: dict[str, str] = {}
    kind = "positional_or_keyword"
    for part in parts:
        if part == "/":
            parameters = [Parameter(p.name, "positional_only", p.required) for p in parameters]
        elif part == "*":
            kind = "keyword_only"
        elif part.startswith("**"):
            parameters.append(Parameter(part[2:], "var_keyword"))
        elif part.startswith("*"):
            parameters.append(Parameter(part[1:], "var_positional"))
            kind = "keyword_only"
        else:
            name, has_default, default = part.partition("=")
            parameters.append(Parameter(name, kind, not has_default))
            if has_default:
                defaults[name] = default
    return Signature(tuple(parameters)), defaults


@dataclass
class Reading:
    """Everything read of one release of one package: the content of a snapshot.

    Args:
        package, release: what was read.
        distribution: file of the index that was read, '' for a folder.
        requires: package -> version range that the release's own metadata asks for.
        found: home -> what was found there.
        bodies: home of a watched function -> fingerprint of what it does; those that the release lacks are absent.
        files: path -> sha256 of each source file that was read.
    """

    package: str
    release: str
    distribution: str = ""
    requires: dict[str, str] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def at(self, home: str) -> Found:
        """What was found at `home`; `unread` where nobody looked."""
        return self.found.get(home, Found(UNREAD, detail=f"{home} is not in this reading"))

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "package": self.package,
            "release": self.release,
            "distribution": self.distribution,
            "requires": dict(sorted(self.requires.items())),
            "found": {home: self.found[home].as_dict() for home in sorted(self.found)},
        }
        if self.bodies:
            data["bodies"] = dict(sorted(self.bodies.items()))
        data["files"] = dict(sorted(self.files.items()))
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Reading:
        found = {home: Found.from_dict(entry) for home, entry in data["found"].items()}
        return cls(
            data["package"],
            data["release"],
            data["distribution"],
            data["requires"],
            found,
            data.get("bodies", {}),
            data["files"],
        )
