"""Addresses of object stores where else a folder stands: what they are, and which options may have one."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shims.errors import UsageError

SCHEME = "s3"
_ANY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(.*)", re.DOTALL)
# A path joins two slashes to one, so both are taken.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_TEXTS = ("model", "model_path")
"""Options that are texts, because they may be names of a hub."""
_FLAGS = {
    ("VerifyConfig", "prepared"): "--prepared-data",
    ("ConvertConfig", "source"): "source folder",
    ("CheckConfig", "draft"): "DRAFT",
}
"""Where an option's name on the command line is not the field's."""


@dataclass(frozen=True)
class Address:
    """A folder in a bucket."""

    bucket: str
    prefix: str
    """Without slashes at its ends; never empty."""

    def __str__(self) -> str:
        return f"{SCHEME}://{self.bucket}/{self.prefix}"

    def of(self, name: str) -> str:
        """An object's address, for messages."""
        return f"{self}/{name}"


def is_address(place: str | Path | None) -> bool:
    """Whether something that may be a path is an address, of whatever store."""
    return place is not None and _ANY.match(str(place)) is not None


def shown(place: str | Path) -> str:
    """A path as it is, an address with the slashes that a path has lost."""
    found = _ANY.match(str(place))
    return f"{found[1]}://{found[2].lstrip('/')}" if found else str(place)


def parse(place: str | Path, flag: str) -> Address:
    """The address that is meant.

    Args:
        flag: the option that named it, for messages.

    Raises:
        UsageError: another store's, or no bucket and folder.
    """
    found = _ANY.match(str(place))
    scheme, rest = (found[1], found[2]) if found else ("", "")
    if scheme != SCHEME:
        raise UsageError(
            flag,
            "a folder, local or on a file system that all machines share, or s3://BUCKET/FOLDER",
            f"an address that begins with {scheme}://",
            "use the store's S3-compatible endpoint (AWS_ENDPOINT_URL), or a file system",
        )
    parts = [part for part in rest.split("/") if part]
    if len(parts) < 2 or not _BUCKET.fullmatch(parts[0]) or any(part in (".", "..") for part in parts):
        raise UsageError(flag, "s3://BUCKET/FOLDER", shown(place), "name a bucket, and a folder in it")
    return Address(parts[0], "/".join(parts[1:]))


def refuse_addresses(config: Any, allowed: Collection[str] = ()) -> None:
    """Refuse an address where only a path will do, before a path of that name is made.

    Args:
        config: a stage's options; every path among them is looked at.
        allowed: names of those that may be an address.

    Raises:
        UsageError: another one is.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in allowed or not (isinstance(value, Path) or field.name in _TEXTS) or not is_address(value):
            continue
        rows = field.name in ("data", "source")
        raise UsageError(
            _FLAGS.get((type(config).__name__, field.name), f"--{field.name.replace('_', '-')}"),
            "a path of a file system, local or shared",
            f"an address, {shown(value)}",
            f"copy the rows here: `specshim fetch {shown(value)} FOLDER`, and give that folder"
            if rows
            else "give a path; only extract --output-dir, verify, fetch and train --data take an address",
        )
