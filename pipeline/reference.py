"""The same states from transformers, computed without vLLM or speculators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.decoder_parts import decoder_layers, final_norm
from pipeline.layers import LayerIds
from pipeline.model_info import ModelInfo
from shims.errors import SpecshimError


class Reference:
    """A transformers model in float32 with hooks on its decoder layers.

    The hooks matter: the last entry of ``output_hidden_states`` is normed, which no layer's
    output is.
    """

    def __init__(
        self, model: ModelInfo, layers: LayerIds, *, weights_dtype: str, device: str, trust_remote_code: bool
    ) -> None:
        """Load the model.

        Args:
            weights_dtype: what the engine held its weights in; they are rounded to it here, and
                the arithmetic stays float32.
        """
        import torch
        import transformers

        self._torch: Any = torch
        self._device = device
        # Of convolutions cuDNN rounds the factors to TF32's 10 bits unless told; torch's matrix products are exact.
        torch.backends.cudnn.allow_tf32 = False
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = _load(model, trust_remote_code)
        if weights_dtype != "float32":
            _round(self.model, getattr(torch, weights_dtype))
        self.model.to(device)
        self._after = layers.after
        self._captured: dict[int, Any] = {}
        blocks = decoder_layers(self.model, model.num_layers)
        for layer in layers.after:
            if layer >= 0:
                blocks[layer].register_forward_hook(self._hook(layer))
        if -1 in layers.after:
            blocks[0].register_forward_pre_hook(self._pre_hook(), with_kwargs=True)

    # The hooks hold no reference to this object: it is in no cycle, and its device's memory is free when it goes.
    def _hook(self, layer: int) -> Any:
        captured = self._captured

        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            captured[layer] = (output[0] if isinstance(output, tuple) else output).detach()

        return keep

    def _pre_hook(self) -> Any:
        captured = self._captured

        def keep(_module: Any, inputs: Any, keywords: Any) -> None:
            captured[-1] = (inputs[0] if inputs else keywords["hidden_states"]).detach()

        return keep

    def states(self, token_ids: Sequence[int]) -> tuple[Any, Any]:
        """Run one row alone.

        Returns:
            States float32 [T, L, H] on the CPU, and the model's own next-token ids int64 [T].
        """
        torch = self._torch
        self._captured.clear()
        with torch.no_grad():
            logits = self.model(torch.tensor([list(token_ids)], device=self._device), use_cache=False).logits[0]
        states = [self._captured[layer].reshape(len(token_ids), -1).float().cpu() for layer in self._after]
        return torch.stack(states, dim=1), logits.argmax(dim=-1).cpu()

    def normed(self, last_states: Any) -> Any:
        """N = norm(R_n): float32 [T, H] on the CPU, from un-normed last states [T, H]."""
        with self._torch.no_grad():
            return final_norm(self.model)[1](last_states.float().to(self._device)).float().cpu()

    def next_tokens(self, last_states: Any, *, normed: bool = False) -> Any:
        """Next-token ids int64 [T] from last states [T, H]: norm (unless ``normed`` already), then lm_head."""
        states = last_states.float() if normed else self.normed(last_states)
        with self._torch.no_grad():
            return self.model.get_output_embeddings()(states.to(self._device)).argmax(dim=-1).cpu()


def relative_errors(states: Any, wanted: Any) -> Any:
    """Norm of the difference over norm of ``wanted``, both [T, L, H]: float32 [L]."""
    return (states.float() - wanted.float()).norm(dim=(0, 2)) / wanted.float().norm(dim=(0, 2))


def _load(model: ModelInfo, trust_remote_code: bool) -> Any:
    """The transformers model in float32, whatever its folder names.

    Raises:
        SpecshimError: transformers cannot load it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=trust_remote_code)
        # transformers 4 loads in float32 unless told otherwise, transformers 5 in what the config names.
        config.dtype = torch.float32
        # Some multimodal wrappers are no causal language models to transformers; remote code says itself what it is.
        wrapper = type(config) in AutoModelForImageTextToText._model_mapping
        causal = type(config) in AutoModelForCausalLM._model_mapping or not wrapper
        loaded: Any = (AutoModelForCausalLM if causal else AutoModelForImageTextToText).from_pretrained(
            str(model.path), config=config, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise SpecshimError(
            str(model.path),
            "a model that the installed transformers loads",
            " ".join(f"{type(error).__name__}: {error}".split()),
            "install a transformers that knows it, or check the files alone with --structure",
        ) from error
    return loaded.eval().to(torch.float32)


def _round(model: Any, dtype: Any) -> None:
    """Round the weights to ``dtype``; they stay float32.

    Buffers are left alone: no engine rounds the rotary frequencies, and rounded ones turn far tokens
    to other positions.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).to(weight.dtype)
