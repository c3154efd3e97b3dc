"""`specshim fetch`: a finished set of rows, from an address to a folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipeline import disk, manifest
from pipeline.at_once import answers
from pipeline.atomic import write_bytes, write_text
from pipeline.lock import exclusive
from pipeline.object_store.address import parse, refuse_addresses
from pipeline.object_store.bucket import Bucket, Found
from pipeline.object_store.keys import LOCK, MANIFEST, is_beside
from pipeline.object_store.view import opened, rows_of
from pipeline.progress import stage_progress
from shims.errors import UsageError

_AT_ONCE = 8
_BEGUN = ".fetching"


@dataclass(frozen=True)
class FetchConfig:
    """What is copied where."""

    source: Path
    output_dir: Path
    min_free_gib: float = 1.0


@dataclass
class Fetched:
    """What a run did."""

    files: int = 0
    kept: int = 0
    """Found here, as long as at the address."""
    others: int = 0
    """Objects that are neither rows nor beside them; they stay where they are."""


def fetch(config: FetchConfig) -> Fetched:
    """Copy rows and the files beside them; run again, it goes on where it stopped. The manifest comes last.

    Raises:
        UsageError: there is no finished set, the folder is another's, or it does not fit.
        StoreError: the store broke off; what was copied stays.
    """
    refuse_addresses(config, ("source",))
    address = parse(config.source, "SOURCE")
    bucket, done = Bucket(address), Fetched()
    with opened(address, "SOURCE") as view, exclusive(config.output_dir):
        record = manifest.require_rows(view.folder, "SOURCE")
        if not record.get("complete"):
            raise UsageError(
                str(view.folder / MANIFEST), "a finished set of rows", "complete = false", "finish the extraction first"
            )
        _refuse_foreign_folder(config, view.folder)
        rows = rows_of(address, record, "SOURCE")
        wanted: list[Found] = []
        for found in bucket.list():
            if rows.is_row(found.name) or is_beside(found.name):
                path = config.output_dir / found.name
                whole = path.is_file() and path.stat().st_size == found.size
                done.kept += whole
                wanted += [] if whole else [found]
            else:
                done.others += found.name not in (MANIFEST, LOCK)
        needed, reserve = sum(found.size for found in wanted), int(config.min_free_gib * disk.GIB)
        disk.refuse_what_does_not_fit(config.output_dir, needed, len(wanted), reserve, "--min-free-gib 0")
        with stage_progress("fetch", len(wanted), "files") as progress:
            for size in answers(lambda found: _copied(bucket, found, config.output_dir), wanted, _AT_ONCE):
                done.files += 1
                progress.advance(rows=1, tokens=0, note=disk.human(size))
        write_bytes(config.output_dir / MANIFEST, (view.folder / MANIFEST).read_bytes())
        (config.output_dir / _BEGUN).unlink(missing_ok=True)
    return done


def _copied(bucket: Bucket, found: Found, folder: Path) -> int:
    bucket.download(found.name, folder / found.name)
    return found.size


def _refuse_foreign_folder(config: FetchConfig, view: Path) -> None:
    """A folder says from the first file on which set it is getting: names and sizes alone could be another's."""
    set_name = hashlib.sha256((view / MANIFEST).read_bytes()).hexdigest()
    for name in (MANIFEST, _BEGUN):
        path = config.output_dir / name
        if path.is_file():
            here = path.read_bytes()
            if set_name in (hashlib.sha256(here).hexdigest(), here.decode("utf-8", "replace").strip()):
                write_text(config.output_dir / _BEGUN, set_name + "\n")
                return
            found = "another set's"
            break
    else:
        strange = [path.name for path in config.output_dir.iterdir() if not path.name.startswith(".lock")]
        if not strange:
            write_text(config.output_dir / _BEGUN, set_name + "\n")
            return
        found = f"files that were not fetched ({sorted(strange)[0]})"
    raise UsageError(
        f"--output-dir {config.output_dir}", "a new folder, or one that this set is being fetched to", found,
        "choose another folder",
    )  # fmt: skip
