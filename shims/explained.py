"""What a person can mend in the file system, as a refusal in the place of a traceback."""

from __future__ import annotations

import errno
import os

from shims.errors import SpecshimError

FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def explained(error: Exception) -> SpecshimError | None:
    """The refusal that says it; None where the error is of another kind."""
    # safetensors and torch tell of a full disk in errors of their own, the one in words, the other behind its own.
    told = f"{error} {error.__context__ or ''}"
    full = [
        os.strerror(number) for number in FULL if number == getattr(error, "errno", 0) or os.strerror(number) in told
    ]
    if full:
        where = str(getattr(error, "filename", None) or "writing")
        step = "make room, then run the same command again: what is finished is kept"
        return SpecshimError(where, "space on the disk", full[0], step)
    if not isinstance(error, OSError):
        return None
    where, found = str(error.filename or "writing"), error.strerror or type(error).__name__
    if error.errno in _UNUSABLE:
        return SpecshimError(where, "a path that can be used", found, "check what lies there and its permissions")
    return None
