"""Where a transformers model keeps its decoder, the decoder's layers and its final norm."""

from __future__ import annotations

from typing import Any

from shims.errors import SpecshimError

_LAYERS = {"layers", "h", "blocks"}
# By what they are called in the decoder; the last is LFM2's, which norms the last state with it.
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")


def decoder_of(model: Any) -> Any:
    """The module that holds the layers and the final norm; of a multimodal wrapper, the text model's."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model else decoder


def decoder_layers(model: Any, num_layers: int) -> Any:
    """The list of decoder layers, found by name and length.

    Args:
        model: a whole model. Its vision encoder may have as many layers: the decoder is looked through first.

    Raises:
        SpecshimError: there is no such list.
    """
    places = [decoder_of(model), model] if hasattr(model, "get_decoder") else [model]
    for place in places:
        for name, module in place.named_modules():
            if name.split(".")[-1] in _LAYERS and hasattr(module, "__len__") and len(module) == num_layers:
                return module
    raise SpecshimError(
        f"transformers model {type(model).__name__}",
        f"a list of {num_layers} decoder layers named {', '.join(sorted(_LAYERS))}",
        "none",
        "verify with --structure, and report the architecture",
    )


def final_norm(model: Any) -> tuple[str, Any]:
    """The norm between the last layer and the head: its name in the decoder, and the module.

    Raises:
        SpecshimError: the decoder has none under a known name.
    """
    decoder = decoder_of(model)
    for name in _NORMS:
        if (module := getattr(decoder, name, None)) is not None:
            return name, module
    raise SpecshimError(
        f"transformers model {type(model).__name__}",
        f"a final norm named {', '.join(_NORMS)}",
        f"a {type(decoder).__name__} of {', '.join(name for name, _ in decoder.named_children())}",
        "leave out the last layer, or report the architecture",
    )
