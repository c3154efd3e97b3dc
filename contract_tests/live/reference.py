"""What transformers computes for the same tokens, in float32: one prompt alone at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Reference:
    """A transformers model with hooks on its decoder layers (`hidden_states[-1]` of it is normed)."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(path)).to(torch.float32).eval()
        self._outputs: dict[int, Any] = {}
        self._cache: dict[tuple[int, ...], tuple[dict[int, Any], Any]] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def run(self, token_ids: list[int]) -> tuple[dict[int, Any], Any]:
        """(layer -> [T, hidden] after that layer, next-token ids [T])."""
        key = tuple(token_ids)
        if key not in self._cache:
            with self._torch.no_grad():
                logits = self.model(self._torch.tensor([token_ids]), use_cache=False).logits[0]
            states = {i: h.reshape(len(token_ids), -1).clone() for i, h in self._outputs.items()}
            self._cache[key] = states, logits.argmax(-1)
        return self._cache[key]

    def next_tokens(self, last: Any) -> Any:
        """Next-token ids [T] of un-normed last states [T, hidden]."""
        with self._torch.no_grad():
            return self.model.lm_head(self.model.model.norm(last.float())).argmax(-1)

    def error(self, token_ids: list[int], layer_ids: list[int], states: list[Any]) -> float:
        """Worst relative error over the layers; infinite where the number of layers or rows differs."""
        wanted = self.run(token_ids)[0]
        if len(states) != len(layer_ids):
            return float("inf")
        return max(_relative(got, wanted[i]) for i, got in zip(layer_ids, states, strict=True))


def _relative(got: Any, wanted: Any) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    return float((got.float() - wanted).norm() / wanted.norm())
