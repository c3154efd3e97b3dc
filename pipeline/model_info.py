"""What a model folder says about itself, read without any deep-learning library."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.weight_hash import weight_hashes
from shims.config_names import stated
from shims.errors import UsageError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
    "tiktoken.model",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# A quantized checkpoint may say in a file of its own how its numbers are meant.
_CONFIG_FILES = ("config.json", "hf_quant_config.json")
_WHOLE_PATTERNS = ("*.py", "*.index.json")
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER, _POINTER_LIMIT = b"version https://git-lfs.github.com/spec/", 1024
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
# Heads that do not go on with a text.
_NO_GENERATION = ("MaskedLM", "Classification", "QuestionAnswering", "RewardModel", "EmbeddingModel")
_ENCODERS = {
    "bert", "roberta", "xlm-roberta", "camembert", "modernbert", "distilbert", "electra", "albert", "deberta",
    "deberta-v2", "nomic_bert", "mpnet",
}  # fmt: skip
_READ_BYTES = 1 << 20
_ONE_FILE = "model.safetensors"
"""What transformers reads alone wherever it is there, whatever an index says."""


@dataclass(frozen=True)
class ModelInfo:
    """A local model folder.

    ``config`` is config.json as written; the numbers are those of the text model where
    the folder holds a multimodal one.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """Longest context in tokens, None where the config does not say."""
    dtype: str
    needs_remote_code: bool
    """The folder brings its own Python code (``auto_map``)."""

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over config, tokenizer, chat template, code and the weights' names and hashes."""
        digest = hashlib.sha256()
        for name, part in sorted(self.file_hashes.items()):
            digest.update(f"{name}\0{part}\n".encode())
        return digest.hexdigest()

    @cached_property
    def file_hashes(self) -> dict[str, str]:
        """sha256 by file name; a weight file counts as `pipeline.weight_hash` says."""
        named = [self.path / name for name in (*_CONFIG_FILES, *_TOKENIZER_FILES, *_TEMPLATE_FILES)]
        found = [file for pattern in _WHOLE_PATTERNS for file in sorted(self.path.glob(pattern))]
        whole = {file.name: sha256_file(file) for file in [*named, *found] if file.is_file()}
        return whole | weight_hashes(_weight_files(self.path))


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, as hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.suffix in _WEIGHT_SUFFIXES and file.is_file()]


def tensor_names(model: ModelInfo) -> set[str]:
    """Names of all tensors in the folder's safetensors files, from the index or the headers.

    Raises:
        UsageError: an index or a header cannot be read.
    """
    names: set[str] = set()
    for index in model.path.glob("*.safetensors.index.json"):
        names |= set(_weight_map(index))
    if not names:
        for file in model.path.glob("*.safetensors"):
            names |= set(_header_of(file))
    return names - {"__metadata__"}


def tensor_shapes(model: ModelInfo) -> dict[str, list[int]]:
    """Shapes of all tensors in the folder's safetensors files, from their headers; empty without such files.

    Raises:
        UsageError: a header cannot be read.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(model.path.glob("*.safetensors")):
        for name, entry in _header_of(file).items():
            if name != "__metadata__" and isinstance(entry, dict):
                shapes[name] = list(entry.get("shape", []))
    return shapes


def _header_of(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        length = struct.unpack("<Q", handle.read(8).ljust(8, b"\0"))[0]
        return _json_object(file, handle.read(min(length, file.stat().st_size)))


def refuse_missing_weights(model: ModelInfo, flag: str = "--model-path") -> None:
    """Stop where loading would fail minutes later, deep in a worker.

    Raises:
        UsageError: the folder holds no weights, not all files that its index names, one that was cut short,
            Git LFS pointers, or two sets of weights.
    """
    if pointers := _lfs_pointers(model.path):
        raise UsageError(
            f"{flag} {model.path}",
            "all files of the model",
            f"Git LFS pointers in place of {_few(pointers)}",
            "run `git lfs pull` in that folder, or download the model with its hub's own tool",
        )
    missing = missing_shards(model.path) or [f"the end of {name}" for name in _cut_short(model.path)]
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in model.path.iterdir()):
        missing = ["no file of weights at all"]
    if missing:
        raise UsageError(
            f"{flag} {model.path}", "all weights of the model", f"missing: {_few(missing)}", "complete the download"
        )
    _refuse_two_sets(model.path, flag)


def _refuse_two_sets(folder: Path, flag: str) -> None:
    """Stop where vLLM, which reads what the index names, and transformers would read different files."""
    index = folder / f"{_ONE_FILE}.index.json"
    if not index.is_file() or not (folder / _ONE_FILE).is_file():
        return
    others = sorted({str(name) for name in _weight_map(index).values()} - {_ONE_FILE})
    if others:
        raise UsageError(
            f"{flag} {folder}",
            "one set of weights",
            f"two: {_few(others)}, named by {index.name}, which vLLM reads, and {_ONE_FILE}, which transformers reads",
            f"move {_ONE_FILE} away, or the index and its files, whichever are not the model's",
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _lfs_pointers(folder: Path) -> list[str]:
    """Files of which a clone without Git LFS has three lines that say where the content is."""
    small = [file for file in sorted(folder.iterdir()) if file.is_file() and file.stat().st_size < _POINTER_LIMIT]
    return [file.name for file in small if file.read_bytes().startswith(_POINTER)]


def _cut_short(folder: Path) -> list[str]:
    """Safetensors files that end before their last tensor does."""
    short = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = 8 + struct.unpack("<Q", handle.read(8).ljust(8, b"\0"))[0]
        parts = [part for name, part in _header_of(file).items() if name != "__metadata__" and isinstance(part, dict)]
        ends = [part["data_offsets"][1] for part in parts if "data_offsets" in part]
        if file.stat().st_size < header + max(ends, default=0):
            short.append(file.name)
    return short


def missing_shards(folder: Path, pattern: str = "*.index.json") -> list[str]:
    """Files of weights that an index in the folder names and that are not there.

    Raises:
        UsageError: an index cannot be read, or names what is no file of its folder.
    """
    names: set[str] = set()
    for index in sorted(folder.glob(pattern)):
        named = set(map(str, _weight_map(index).values()))
        _refuse_other_folders(index, named)
        names |= named
    return sorted(name for name in names if not (folder / name).is_file())


def _refuse_other_folders(index: Path, names: set[str]) -> None:
    """Stop at names that lead elsewhere: vLLM looks for weights in the folder alone, and a name is another's text."""
    elsewhere = sorted(name or "''" for name in names if Path(name).name != name or name in ("", ".."))
    if elsewhere:
        raise UsageError(
            str(index),
            "names of files in its own folder, where alone vLLM looks for weights",
            _few(elsewhere),
            "move these files beside the index and correct the names in it, or download the model again",
        )


def _weight_map(index: Path) -> dict[str, Any]:
    """Tensor -> file, as an index states it."""
    stated = _json_object(index, index.read_bytes()).get("weight_map")
    if not isinstance(stated, dict):
        raise UsageError(str(index), "an object `weight_map`", json.dumps(stated)[:80], "re-download it")
    return stated


def _json_object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UsageError(str(file), "a readable list of tensors", str(error), "re-download it") from error
    return parsed if isinstance(parsed, dict) else {}


def _locate(model_path: str, flag: str) -> Path:
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    reason = "no such folder"
    if model_path.count("/") == 1 and not folder.is_absolute() and not model_path.startswith("."):
        # A hub name: the download (or the local cache) is huggingface_hub's business.
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(model_path))
        except Exception as error:  # noqa: BLE001  every way to fail ends in the same message
            reason = f"no such folder, and not available as a hub model ({type(error).__name__}: {error})"
    raise UsageError(
        where=f"{flag} {model_path}",
        wanted="a folder with config.json, a tokenizer and weights, or a hub name that is available",
        found=reason,
        next_step="check the spelling, or download the model first",
    )


def read_model(model_path: str, flag: str = "--model-path") -> ModelInfo:
    """Read a model folder (or a hub name that huggingface_hub can provide).

    Args:
        model_path: what the user gave.
        flag: the option it came from, for messages.

    Raises:
        UsageError: no folder, no readable config.json, or a config without the numbers needed.
    """
    folder = _locate(model_path, flag)
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{flag} {model_path}", "a model folder", f"no {file.name} in it", "give the folder of a model"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            str(file), "a JSON object", f"{type(error).__name__}: {error}", "repair or re-download it"
        ) from None
    if not isinstance(config, dict):
        raise UsageError(str(file), "a JSON object", type(config).__name__, "repair or re-download it")
    inner = config.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else config
    _refuse_no_decoder(file, config)
    numbers: dict[str, int] = {}
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = stated(text, key)
        value = stated(config, key) if value is None else value
        if type(value) is not int or value < 1:
            raise UsageError(
                str(file), f"a positive integer `{key}`", json.dumps(value), "use a decoder-only language model"
            )
        numbers[key] = value
    positions = stated(text, "max_position_embeddings")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelInfo(
        path=folder,
        config=config,
        num_layers=numbers["num_hidden_layers"],
        hidden_size=numbers["hidden_size"],
        vocab_size=numbers["vocab_size"],
        max_positions=positions if isinstance(positions, int) else None,
        dtype=str(dtype or "float32"),
        needs_remote_code="auto_map" in config or "auto_map" in text,
    )


def _refuse_no_decoder(file: Path, config: dict[str, Any]) -> None:
    """Stop at models whose layers are no decoder's: their states are no next token's."""
    heads = [str(name) for name in config.get("architectures") or ()]
    found = "an encoder and a decoder (`is_encoder_decoder`)" if config.get("is_encoder_decoder") else ""
    if heads and all(head.endswith(_NO_GENERATION) for head in heads):
        found = f"`architectures`: {', '.join(heads)}"
    if config.get("model_type") in _ENCODERS and not config.get("is_decoder"):
        found = f"`model_type`: {config['model_type']}, an encoder, whose tokens see those after them"
    if found:
        raise UsageError(str(file), "a decoder-only language model", found, "use a model that generates text")


def refuse_remote_code(model: ModelInfo, allowed: bool, flag: str = "--model-path") -> None:
    """Stop before a model's own Python code would run, unless the user allowed it.

    Raises:
        UsageError: the model needs its own code and ``--trust-remote-code`` was not given.
    """
    if model.needs_remote_code and not allowed:
        raise UsageError(
            where=f"{flag} {model.path}",
            wanted="a model that needs no code of its own, or --trust-remote-code",
            found="config.json has `auto_map`: loading it would run Python files from that folder",
            next_step="read those files, then add --trust-remote-code",
        )
