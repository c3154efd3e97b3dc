"""float32 where float32 was asked for."""

from __future__ import annotations

import os

VARIABLE = "TRITON_F32_DEFAULT"


def keep_float32(dtype: str) -> None:
    """Let Triton's kernels multiply float32 in full, in this process and those it starts.

    On an NVIDIA device they round factors to TF32's 10 bits where nothing else is said
    (https://triton-lang.org/main/python-api/generated/triton.language.dot.html): attention and expert kernels then
    are a thousand times less exact than the matrix products around them. A setting of the user's stays. To go once
    Triton's own default for float32 is `ieee`.

    Args:
        dtype: what will be computed in; another than `float32` changes nothing.
    """
    if dtype == "float32":
        os.environ.setdefault(VARIABLE, "ieee")
