"""Which names below an address are believed. A name is text of strangers, and never becomes a path as it is."""

from __future__ import annotations

import re

from pipeline.object_store.failures import StoreError

LOCK = ".lock"
MANIFEST = "manifest.json"
_PART = re.compile(r"[^\x00-\x1f\x7f\\/]{1,255}")
_BESIDE = re.compile(
    r"bad_rows(-\d+-of-\d+)?\.jsonl|data_config\.json|sample_lengths\.json|(d2t|t2d)(-\d+)?\.npy|token_freq\.pt|"
    r"data-\d{5}-of-\d{5}\.arrow|dataset_info\.json|state\.json|vocab_mapping/vocab_mapping\.pt"
)


def refuse_unsafe(name: str, where: str) -> str:
    """A name that may be used below a folder.

    Args:
        name: an object's, below the address.
        where: its address.

    Raises:
        StoreError: it has a part that is empty or leads elsewhere, or characters that no file should have.
    """
    if not all(_PART.fullmatch(part) and part not in (".", "..") for part in name.split("/")):
        raise StoreError(
            ascii(where),
            "names of rows and of the files beside them",
            "an object whose name leads elsewhere, or that nothing here has written",
            "look at who writes there; delete the object, or use another address",
        )
    return name


def is_beside(name: str) -> bool:
    """Whether a name is that of a file beside the rows, the manifest excepted."""
    return _BESIDE.fullmatch(name) is not None
