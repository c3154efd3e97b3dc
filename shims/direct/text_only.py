"""A multimodal model for text alone, on releases that make its processor of pictures even then.

Up to 0.23 vLLM asks that processor whether pictures are allowed at all, in each of its processes. Making it takes the
tokenizer, which rows of token ids do without, and for Kimi-K2.5 remote code. From 0.24 on a model whose processor
cannot be made runs as text: https://github.com/vllm-project/vllm/blob/v0.24.0/vllm/multimodal/registry.py. To go once
0.23 is no longer among the known releases.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shims.versions import detect, within

_VARIABLE = "SPECSHIM_TEXT_ONLY"
_ASKS = ">=0.16,<0.24"


def no_pictures(*args: Any, **options: Any) -> bool:
    """In the place of vLLM's question."""
    return False


def no_processor(*args: Any, **options: Any) -> None:
    """In the place of a processor, which up to 0.20 is made without the question."""


@contextmanager
def text_only() -> Iterator[None]:
    """An engine that is started in this context takes no pictures; this process forgets it again."""
    if not within(detect().vllm, _ASKS):
        yield
        return
    from vllm.multimodal.registry import MultiModalRegistry as Registry

    before = Registry.supports_multimodal_inputs, Registry.create_processor
    os.environ[_VARIABLE] = "1"  # for the processes of the engine
    _take_none()
    try:
        yield
    finally:
        Registry.supports_multimodal_inputs, Registry.create_processor = before
        del os.environ[_VARIABLE]


def where_asked() -> None:
    """In a process of vLLM: no pictures, if the process that started it said so."""
    if os.environ.get(_VARIABLE):
        _take_none()


def _take_none() -> None:
    from vllm.multimodal.registry import MultiModalRegistry as Registry

    Registry.supports_multimodal_inputs, Registry.create_processor = no_pictures, no_processor
