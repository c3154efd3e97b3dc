"""A draft as it lies on disk: its config, and what its tensors are called and how large they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.model_info import missing_shards
from pipeline.serving.facts import KEY, NESTED
from shims.errors import UsageError

WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class DraftFolder:
    """An EAGLE-3 draft, in speculators' format or in the older one of one flat config."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype as safetensors writes it, and shape."""

    @property
    def in_speculators_format(self) -> bool:
        """Whether the config is one that speculators writes."""
        return "speculators_config" in self.config or "speculators_model_type" in self.config

    @property
    def layer_config(self) -> dict[str, Any]:
        """The config of the draft's own decoder layers."""
        inner = self.config.get("transformer_layer_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def top_level_ids(self) -> tuple[int, ...] | None:
        """The layers that the config names where every release since 0.11.1 looks."""
        return _ids(self.config.get(KEY))

    def nested_ids(self, name: str) -> tuple[int, ...] | None:
        """The layers named inside ``eagle_config``, under ``name``."""
        nested = self.config.get(NESTED)
        return _ids(nested.get(name)) if isinstance(nested, dict) else None

    @property
    def unreadable_ids(self) -> Any:
        """What stands in the place of the layers and is no list of whole numbers; None where nothing does."""
        said = self.config.get(KEY)
        return said if said and self.top_level_ids is None else None

    @property
    def method(self) -> str | None:
        """What the config says it is; None where it says nothing (the flat format)."""
        said = self.config.get("speculators_model_type")
        return str(said) if said is not None else None

    @property
    def speculative_tokens(self) -> int | None:
        """Draft tokens a step that the config proposes."""
        methods = (self.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        number = methods[0].get("speculative_tokens") if isinstance(methods[0], dict) else None
        return number if type(number) is int else None

    @property
    def verifier(self) -> str | None:
        """The verifier that the config names."""
        named = ((self.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
        return str(named) if named else None

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the target vocabulary, as the draft's layers have it."""
        return _whole(self.layer_config.get("vocab_size"))

    @property
    def draft_vocab_size(self) -> int | None:
        """Tokens the draft can say; the target's, where the config gives no number."""
        return _whole(self.config.get("draft_vocab_size")) or self.vocab_size

    @property
    def hidden_size(self) -> int | None:
        """Of the draft's layers."""
        return _whole(self.layer_config.get("hidden_size"))

    @property
    def target_hidden_size(self) -> int | None:
        """Of the verifier, as the draft expects it."""
        return _whole(self.config.get("target_hidden_size")) or self.hidden_size

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of the tensor of that name, whatever stands in front of it."""
        found = [about for full, about in self.tensors.items() if full == name or full.endswith(f".{name}")]
        return found[0] if found else None

    def mapping(self) -> tuple[Any, Any]:
        """d2t and t2d as numpy arrays, each None where it is missing."""
        from safetensors import safe_open

        found: dict[str, Any] = {}
        for file in sorted(self.path.glob(WEIGHTS)):
            with safe_open(file, framework="numpy") as opened:
                found |= {name: opened.get_tensor(name) for name in ("d2t", "t2d") if name in opened.keys()}  # noqa: SIM118
        return found.get("d2t"), found.get("t2d")


def read_draft(folder: Path, flag: str = "draft") -> DraftFolder:
    """Read a draft folder; no weight is loaded.

    Args:
        folder: of the draft, or of `specshim train`, which keeps it in ``draft``.
        flag: what the folder came from, for messages.

    Raises:
        UsageError: no draft there, or files that cannot be read.
    """
    inner = folder / "draft"
    if not (folder / "config.json").is_file() and (inner / "config.json").is_file():
        folder = inner
    file = folder / "config.json"
    if not file.is_file():
        found = "no config.json" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise UsageError(f"{flag} {folder}", "a draft: config.json and safetensors", found, "give the draft's folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(str(file), "a JSON object", f"{type(error).__name__}: {error}", "write it again") from None
    if not isinstance(config, dict):
        raise UsageError(str(file), "a JSON object", type(config).__name__, "write it again")
    return DraftFolder(folder, config, _tensors(folder, flag))


def _tensors(folder: Path, flag: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise UsageError(f"{flag} {folder}", "weights in safetensors", "none", "save the draft as safetensors")
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  not a dictionary
                    part = opened.get_slice(name)
                    found[name] = (str(part.get_dtype()), tuple(part.get_shape()))
        except Exception as error:  # safetensors raises a type of its own
            raise UsageError(str(file), "a safetensors file", f"{error}", "copy or train it again") from error
    absent = missing_shards(folder, "*.safetensors.index.json")
    if absent:
        raise UsageError(
            f"{flag} {folder}", "all files of weights that its index names", f"no {', '.join(absent)}", "copy them, too"
        )
    return found


def _ids(value: Any) -> tuple[int, ...] | None:
    """A list of integers; None for nothing, or an empty one, which vLLM takes for nothing too."""
    if not value or not isinstance(value, (list, tuple)) or not all(type(i) is int for i in value):
        return None
    return tuple(value)


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
