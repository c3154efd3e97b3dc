"""The model's own final norm, alone: it turns R_n into the N that SpecForge stores."""

from __future__ import annotations

from typing import Any

from pipeline.decoder_parts import final_norm
from pipeline.model_info import ModelInfo
from shims.errors import SpecshimError

# Encoders of pictures and sound beside a text model, and what joins them, have final norms, too.
_OTHER_PARTS = ("vis", "image", "audio", "speech", "mm_", "multi_modal", "merger", "projector", "mtp")


class FinalNorm:
    """N = norm(R_n), by the module that transformers builds for this architecture (a Gemma adds 1 to its weights)."""

    def __init__(self, model: ModelInfo, trust_remote_code: bool) -> None:
        """Load the norm's tensors, and nothing else of the model.

        Raises:
            SpecshimError: the norm cannot be found in the model or among its safetensors.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            try:
                whole: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            except ValueError:  # a wrapper that is no causal model; its text model may be one
                whole = AutoModelForCausalLM.from_config(config.get_text_config(), trust_remote_code=trust_remote_code)
        name, self.module = final_norm(whole)
        self.module.to_empty(device="cpu")
        self.module.load_state_dict(self._tensors(model, name, list(self.module.state_dict())))
        self.module.float().eval()

    def _tensors(self, model: ModelInfo, norm: str, wanted: list[str]) -> dict[str, Any]:
        from safetensors import safe_open

        tensors: dict[str, Any] = {}
        whose: dict[str, str] = {}
        for file in sorted(model.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a dictionary
                    parts = name.split(".")
                    # Directly below the decoder: a layer's own norms have their number in front.
                    if parts[-2:-1] != [norm] or parts[-1] not in wanted or any(part.isdecimal() for part in parts):
                        continue
                    if any(part.startswith(_OTHER_PARTS) for part in parts):
                        continue
                    found = opened.get_tensor(name)
                    # The same weights may lie there twice, in two layouts.
                    if parts[-1] in tensors and not found.equal(tensors[parts[-1]]):
                        raise self._missing(model, f"two that differ: {whose[parts[-1]]} and {name}")
                    tensors[parts[-1]], whose[parts[-1]] = found, name
        if set(wanted) - set(tensors):
            raise self._missing(model, f"no tensor {norm}.{', '.join(sorted(set(wanted) - set(tensors)))}")
        return tensors

    @staticmethod
    def _missing(model: ModelInfo, found: str) -> SpecshimError:
        return SpecshimError(
            str(model.path),
            "the final norm of a decoder, with its weights in safetensors",
            found,
            "choose a format that stores the last state before the norm",
        )

    def normed_last(self, states: Any) -> Any:
        """``states`` [T, L, H] with the last layer's normed; computed in float32, of the dtype given."""
        import torch

        with torch.no_grad():
            last = self.module(states[:, -1].float()).to(states.dtype)
        return torch.cat([states[:, :-1], last[:, None]], dim=1)
