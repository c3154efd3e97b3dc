"""``--init-from``: an EAGLE-3 draft of another training, looked at and fitted to this model, vocabulary and layers.

Two layouts are read. speculators': the decoder's configuration under ``transformer_layer_config``, tensors
``layers.0.*``. The older one of EAGLE and vLLM: a flat Llama configuration, tensors ``midlayer.*``, layer ids (if any)
at the top or under ``eagle_config``. Weights come from safetensors, in one file or in several with an index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import TrainConfig
from pipeline.model_info import sha256_file
from pipeline.serving.facts import KEY
from pipeline.training_inputs import TrainingData
from pipeline.vocab import fault_of
from shims.errors import UsageError

_FLAG = "--init-from"
_INDEX = "model.safetensors.index.json"
_OWN_NORMS = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm"}
_LAYER_OPTIONS = (
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "mlp_bias", "initializer_range",
)  # fmt: skip


@dataclass(frozen=True)
class InitialDraft:
    """A draft to begin with, fitted."""

    folder: Path
    layout: str
    """speculators or eagle."""
    layer_config: dict[str, Any] = field(repr=False)
    flags: dict[str, bool]
    """norm_before_residual, norm_before_fc, fc_norm, norm_output, as its configuration has them."""
    native_ids: tuple[int, ...] | None
    """The auxiliary layers it was trained on; None where it does not say."""
    target_ids: Any = field(repr=False)
    """int64: the target token of each of its draft tokens."""
    wanted_ids: Any = field(repr=False)
    """int64: the target token of each draft token of this training."""
    fingerprint: str
    differences: list[str]
    """What is not as in this training, for a person."""
    _files: dict[str, Path] = field(repr=False)
    """Tensor -> its file."""

    def layer_options(self) -> dict[str, Any]:
        """Fields of the decoder's configuration that take the place of the verifier's."""
        found = {name: self.layer_config[name] for name in _LAYER_OPTIONS if self.layer_config.get(name) is not None}
        rope = self.layer_config.get("rope_parameters") or {}
        theta = self.layer_config.get("rope_theta") or rope.get("rope_theta")
        scaling = self.layer_config.get("rope_scaling")
        return found | ({"rope_theta": float(theta)} if theta else {}) | ({"rope_scaling": scaling} if scaling else {})

    def tensors(self, draft: Any) -> dict[str, Any]:
        """Its tensors under the names of speculators' draft, the head in the order of this training's vocabulary.

        Args:
            draft: as built for this training: gives the head's rows that the initial draft does not have.
        """
        found: dict[str, Any] = {}
        for name, file in self._files.items():
            own = canonical(name)
            if own in ("d2t", "t2d") or own.startswith("verifier_"):
                continue
            with _opened(file) as opened:
                tensor = opened.get_tensor(name)
            found[own] = self._head(tensor, draft.lm_head.weight) if own == "lm_head.weight" else tensor
        return found

    def _head(self, rows: Any, fresh: Any) -> Any:
        import torch

        at = {int(token): row for row, token in enumerate(self.target_ids)}
        result = fresh.detach().clone()
        pairs = [(new, at[int(token)]) for new, token in enumerate(self.wanted_ids) if int(token) in at]
        if pairs:
            to, source = (torch.tensor(side) for side in zip(*pairs, strict=True))
            result[to] = rows[source].to(result.dtype)
        return result


def canonical(name: str) -> str:
    """A tensor's name in speculators' draft."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def read_initial(config: TrainConfig, data: TrainingData) -> InitialDraft | None:
    """Read what ``--init-from`` names, without its weights, and compare it with this training.

    Returns:
        None where nothing is named.

    Raises:
        UsageError: it is no EAGLE-3 draft, its sizes do not fit, or it was trained on other layers and
            ``--accept-differences`` was not given.
    """
    folder = config.init_from
    if folder is None:
        return None
    stated = _json(folder / "config.json")
    shapes, files = _shapes(folder)
    own = {canonical(name): shape for name, shape in shapes.items()}
    layer_config = stated.get("transformer_layer_config", stated)
    if not isinstance(layer_config, dict) or "fc.weight" not in own:
        raise UsageError(f"{_FLAG} {folder}", "an EAGLE-3 draft", "no fc.weight in it", "give another folder")
    target_ids = _target_ids(folder, files, own, data)
    flags = {
        name: bool(stated.get(name, layer_config.get(name, False)))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    for prefix, flag in _OWN_NORMS.items():
        flags[flag] = flags[flag] or any(name.startswith(prefix) for name in own)
    initial = InitialDraft(
        folder=folder,
        layout="speculators" if "transformer_layer_config" in stated else "eagle",
        layer_config=layer_config,
        flags=flags,
        native_ids=_native_ids(folder, stated),
        target_ids=target_ids,
        wanted_ids=_wanted_ids(data),
        fingerprint=_fingerprint(folder, files),
        differences=[],
        _files=files,
    )
    _check_shapes(initial, own, data)
    initial.differences.extend(_differences(initial, own, stated, config, data))
    return initial


def _differences(
    initial: InitialDraft, own: dict[str, list[int]], stated: dict[str, Any], config: TrainConfig, data: TrainingData
) -> list[str]:
    found = []
    ids = tuple(data.layers.native[:-1])
    if initial.native_ids is None:
        found.append(f"it does not say its layers; this data has native {_list(ids)}")
    elif initial.native_ids != ids:
        text = f"trained on the layers native {_list(initial.native_ids)}, this data has {_list(ids)}"
        if not config.accept_differences:
            raise UsageError(
                f"{_FLAG} {initial.folder}",
                f"a draft of the layers native {_list(ids)}, which this data has",
                f"one of {_list(initial.native_ids)}: its first layer would read states it has never seen",
                "extract with its --layer-ids, or add --accept-differences to let it learn the others",
            )
        found.append(text)
    kept = len(set(initial.target_ids.tolist()) & set(initial.wanted_ids.tolist()))
    wanted = len(initial.wanted_ids)
    if "lm_head.weight" not in own:
        found.append("it has no lm_head; the model's own rows are taken")
    elif kept != wanted or len(initial.target_ids) != wanted:
        found.append(
            f"vocabulary remapped: {kept} of {wanted} draft tokens are among its {len(initial.target_ids)}; "
            f"the other {wanted - kept} begin with the model's own head"
        )
    layers = int(initial.layer_config.get("num_hidden_layers", 1))
    if layers != config.num_layers:
        found.append(f"{layers} decoder layers, not {config.num_layers}: its number is taken")
    verifier = ((stated.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if verifier and verifier != str(data.model.path.resolve()):
        found.append(f"trained for {verifier}")
    if "embed_tokens.weight" in own:
        found.append("it brings its own embeddings, which are kept")
    return found


def _check_shapes(initial: InitialDraft, own: dict[str, list[int]], data: TrainingData) -> None:
    hidden, vocabulary = data.model.hidden_size, data.model.vocab_size
    auxiliary = len(data.layers.native) - 1
    wanted = {
        "fc.weight": [hidden, auxiliary * hidden],
        "norm.weight": [hidden],
        "embed_tokens.weight": [vocabulary, hidden],
        "lm_head.weight": [len(initial.target_ids), hidden],
    }
    stated = initial.layer_config
    heads = stated.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        size = stated.get("head_dim") or hidden // heads
        wanted["layers.0.self_attn.q_proj.weight"] = [heads * size, 2 * hidden]
        wanted["layers.0.self_attn.k_proj.weight"] = [(stated.get("num_key_value_heads") or heads) * size, 2 * hidden]
    if "intermediate_size" in stated:
        wanted["layers.0.mlp.gate_proj.weight"] = [stated["intermediate_size"], hidden]
    for name, shape in wanted.items():
        if name in own and own[name] != shape:
            raise UsageError(
                f"{_FLAG} {initial.folder}", f"{name} {shape}, for this model", f"{own[name]}", "give a draft that fits"
            )


def _target_ids(folder: Path, files: dict[str, Path], own: dict[str, list[int]], data: TrainingData) -> Any:
    import numpy as np

    arrays = {}
    for name, file in files.items():
        if canonical(name) in ("d2t", "t2d"):
            with _opened(file) as opened:
                arrays[canonical(name)] = opened.get_tensor(name).numpy()
    vocabulary = data.model.vocab_size
    if "d2t" not in arrays:
        rows = own.get("lm_head.weight", [vocabulary])[0]
        if rows != vocabulary:
            raise UsageError(
                f"{_FLAG} {folder}", "a d2t, because the draft has a vocabulary of its own",
                f"none, and a head of {rows} rows for {vocabulary} tokens", "give a whole draft",
            )  # fmt: skip
        return np.arange(vocabulary)
    d2t = arrays["d2t"].astype(np.int64)
    t2d = arrays.get("t2d")
    if d2t.ndim != 1 or not d2t.size or (t2d is not None and t2d.shape != (vocabulary,)):
        shapes = f"d2t {list(d2t.shape)}, t2d {list(t2d.shape) if t2d is not None else 'none'}"
        raise UsageError(
            f"{_FLAG} {folder}", f"a draft for {vocabulary} target tokens", shapes, "give a draft that fits"
        )
    target = np.arange(len(d2t)) + d2t
    fault = fault_of(d2t, t2d.astype(bool)) if t2d is not None else None
    if fault is None and (target.min() < 0 or target.max() >= vocabulary or len(set(target.tolist())) != len(target)):
        fault = "target tokens outside the vocabulary, or one twice"
    if fault:
        raise UsageError(f"{_FLAG} {folder}", "a vocabulary mapping of offsets", fault, "give another draft")
    return target


def _wanted_ids(data: TrainingData) -> Any:
    import numpy as np

    return np.arange(len(data.d2t)) + np.asarray(data.d2t)


def _native_ids(folder: Path, stated: dict[str, Any]) -> tuple[int, ...] | None:
    nested = stated.get("eagle_config")
    found = []
    for place in (stated, nested if isinstance(nested, dict) else {}):
        ids = place.get(KEY)
        if not ids:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UsageError(f"{_FLAG} {folder}, `{KEY}`", "a list of whole numbers", repr(ids), "name the layers so")
        found.append(tuple(ids))
    if len(set(found)) > 1:
        raise UsageError(
            f"{_FLAG} {folder}", "one list of layer ids", " and ".join(map(_list, found)), "find out which one is right"
        )
    return found[0] if found else None


def _shapes(folder: Path) -> tuple[dict[str, list[int]], dict[str, Path]]:
    """Shape and file of every tensor."""
    index = folder / _INDEX
    if index.is_file():
        entries = _json(index).get("weight_map")
        names = sorted(set(map(str, entries.values()))) if isinstance(entries, dict) else []
        # A name of an index is another's text: it may not lead out of the folder.
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise UsageError(str(index), "names of safetensors files in its folder", f"{names[:3]}", "repair the index")
    else:
        names = ["model.safetensors"]
    shapes: dict[str, list[int]] = {}
    files: dict[str, Path] = {}
    for name in names:
        with _opened(folder / name) as opened:
            for tensor in opened.keys():  # noqa: SIM118  not a dictionary
                shapes[tensor], files[tensor] = list(opened.get_slice(tensor).get_shape()), folder / name
    return shapes, files


def _fingerprint(folder: Path, files: dict[str, Path]) -> str:
    import hashlib

    parts = [sha256_file(path) for path in [folder / "config.json", *sorted(set(files.values()))]]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        opened = safe_open(file, framework="pt")
    except Exception as error:  # the library raises what it likes, also for a missing file
        raise UsageError(
            f"{_FLAG} {file.parent}",
            f"a readable {file.name} (weights as safetensors; pickled ones are not read)",
            f"{type(error).__name__}: {error}",
            "give a draft with safetensors weights",
        ) from error
    yield opened


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{_FLAG} {path.parent}", f"a readable {path.name}", f"{type(error).__name__}: {error}", "give a draft"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(str(path), "a JSON object", type(content).__name__, "give a draft")
    return content


def _list(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids))
