"""numpy arrays as bytes, and back without unpickling."""

from __future__ import annotations

import io
from typing import Any


def npy_bytes(values: Any) -> bytes:
    """The ``.npy`` file of an array."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()
