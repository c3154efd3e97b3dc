"""The verifier's own next token, from its stored last states: final norm and head, and nothing else of the model."""

from __future__ import annotations

from typing import Any

from pipeline.final_norm import FinalNorm
from pipeline.model_info import ModelInfo
from shims.errors import SpecshimError

_ROWS_AT_ONCE = 1024


class VerifierHead:
    """argmax(lm_head(norm(R_n))), over the whole vocabulary."""

    def __init__(self, model: ModelInfo, device: str, *, normed: bool, trust_remote_code: bool) -> None:
        """Load the tensors.

        Args:
            normed: the stored last states are N = norm(R_n) already.

        Raises:
            SpecshimError: norm or head are not among the model's safetensors.
        """
        self._norm = None if normed else FinalNorm(model, trust_remote_code)
        self._head = _head(model, trust_remote_code).float().to(device)
        self._device = device

    def next_tokens(self, last: Any) -> list[int]:
        """The verifier's greedy choice behind each token.

        Args:
            last: states after the last layer, [T, H].
        """
        import torch

        states = last.float()
        if self._norm is not None:
            states = self._norm.normed_last(states[:, None])[:, 0]
        found: list[int] = []
        with torch.no_grad():
            for part in torch.split(states, _ROWS_AT_ONCE):
                found += (part.to(self._device) @ self._head.T).argmax(dim=-1).tolist()
        return found


def _head(model: ModelInfo, trust_remote_code: bool) -> Any:
    from safetensors import safe_open
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=trust_remote_code)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    names = ("lm_head.weight", "embed_tokens.weight") if tied else ("lm_head.weight",)
    found: dict[str, Any] = {}
    for file in sorted(model.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dictionary
                ending = next((wanted for wanted in names if name == wanted or name.endswith(f".{wanted}")), None)
                if ending and ending not in found:
                    found[ending] = opened.get_tensor(name)
    for name in names:
        if name in found:
            return found[name]
    raise SpecshimError(
        str(model.path),
        f"safetensors with {' or '.join(names)}",
        "none",
        "evaluate with the model's full checkpoint, or leave out --data to evaluate in a server alone",
    )
