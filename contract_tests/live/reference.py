"""What transformers computes for the same tokens, in float32: one prompt alone at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Reference:
    """A transformers model with hooks on its decoder layers (`hidden_states[-1]` of it is normed).

    Args:
        path: the model.
        dtype: what the engine holds the weights in; they are rounded to it, the arithmetic is float32.
    """

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(path)).to(self._device, torch.float32).eval()
        # Weights only: rotary frequencies are buffers, and the engine keeps those in float32.
        for weight in self.model.parameters():
            weight.data = weight.data.to(getattr(torch, dtype)).to(torch.float32)
        self._outputs: dict[int, Any] = {}
        self._cache: dict[tuple[int, ...], tuple[dict[int, Any], Any]] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    def run(self, token_ids: list[int]) -> tuple[dict[int, Any], Any]:
        """(layer -> [T, hidden] after that layer, logits [T, vocabulary]), float32 on the CPU."""
        key = tuple(token_ids)
        if key not in self._cache:
            with self._torch.no_grad():
                inputs = self._torch.tensor([token_ids], device=self._device)
                logits = self.model(inputs, use_cache=False).logits[0]
            states = {i: h.reshape(len(token_ids), -1).to("cpu", copy=True) for i, h in self._outputs.items()}
            self._cache[key] = states, logits.cpu()
        return self._cache[key]

    def logits(self, last: Any) -> Any:
        """Logits [T, vocabulary] of un-normed last states [T, hidden]: norm, then head."""
        with self._torch.no_grad():
            last = last.to(self._device, self._torch.float32)
            return self.model.lm_head(self.model.model.norm(last)).cpu()

    def error(self, token_ids: list[int], layer_ids: list[int], states: list[Any]) -> float:
        """Worst relative error over the layers; infinite where the number of layers or rows differs."""
        wanted = self.run(token_ids)[0]
        if len(states) != len(layer_ids):
            return float("inf")
        return max(_relative(got, wanted[i]) for i, got in zip(layer_ids, states, strict=True))

    def token_errors(self, token_ids: list[int], layer_ids: list[int], states: list[Any]) -> list[float]:
        """Relative error of each token after each layer, of states of the right shape."""
        wanted = self.run(token_ids)[0]
        return [
            error
            for i, got in zip(layer_ids, states, strict=True)
            for error in ((got.float() - wanted[i]).norm(dim=-1) / wanted[i].norm(dim=-1)).tolist()
        ]


def _relative(got: Any, wanted: Any) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    return float((got.float() - wanted).norm() / wanted.norm())
