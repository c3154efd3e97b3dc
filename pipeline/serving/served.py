"""What a server will use of a draft: the value that both ways to find out fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FROM_FACTS = "what is known of this release"
FROM_VLLM = "vLLM's own code"


@dataclass(frozen=True)
class Layers:
    """The verifier's layers that feed the draft under one model runner."""

    ids: tuple[int, ...]
    """Native ids."""
    origin: str
    """``config``: as the draft's config names them; ``defaults``: the verifier model's own."""


@dataclass(frozen=True)
class Served:
    """A draft as one vLLM release takes it."""

    release: str
    known_by: str
    """:data:`FROM_FACTS` or :data:`FROM_VLLM`."""
    layers: Mapping[str, Layers]
    """Model runner -> layers."""
    method: str | None
    speculative_tokens: int | None
    verifier: str | None
    draft_vocab_size: int | None
    norm_before_residual: bool | None = None
    refusal: str | None = None
    """Why the release will not take the draft at all, in its own words where it has been asked."""
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"layers": {name: asdict(layers) for name, layers in self.layers.items()}}
