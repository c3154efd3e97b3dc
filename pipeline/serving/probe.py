"""Asks the installed vLLM itself: ``python -m pipeline.serving.probe DRAFT VERIFIER TOKENS``, as JSON on the last line.

Its configs are built and its own functions asked; no weights are loaded and no device is touched. It runs as a process
of its own, so that what vLLM does on import stays there.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.model_info import ModelInfo
from pipeline.serving import facts
from pipeline.serving.draft_folder import DraftFolder
from pipeline.serving.served import FROM_VLLM, Layers, Served
from shims.errors import SpecshimError
from shims.versions import base_release

_MARK = "specshim-probe "
_METHOD = "eagle3"
_TIMEOUT = 600.0


def ask_vllm(draft: DraftFolder, verifier: ModelInfo, release: str, tokens: int | None, trust: bool = False) -> Served:
    """What the installed vLLM makes of the draft.

    Args:
        release: as installed.
        tokens: draft tokens a step; None for what the draft's config proposes.
        trust: allow Python code of the verifier's folder.

    Raises:
        SpecshimError: the process that asks ended without an answer.
    """
    command = [sys.executable, "-m", "pipeline.serving.probe", str(draft.path), str(verifier.path), str(tokens or 0)]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            [*command, "1" if trust else "0"], env=environment, capture_output=True, text=True, check=False,
            timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SpecshimError(
            f"vLLM {release}", f"an answer within {_TIMEOUT:.0f} s", "none", "run it again, or look at this machine"
        ) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise SpecshimError(
            f"vLLM {release}",
            "what it makes of the draft's config",
            f"exit code {done.returncode}: {last}",
            "see whether `import vllm` works in this environment",
        )
    return served(json.loads(lines[-1].removeprefix(_MARK)), release)


def served(answer: dict[str, Any], release: str) -> Served:
    """The answer of the other process as a value."""
    return Served(
        release=base_release(release),
        known_by=FROM_VLLM,
        layers={name: Layers(tuple(found["ids"]), found["origin"]) for name, found in answer["layers"].items()},
        method=answer["method"],
        speculative_tokens=answer["tokens"],
        verifier=answer["verifier"],
        draft_vocab_size=answer["draft_vocab_size"],
        norm_before_residual=answer["norm_before_residual"],
        refusal=answer["refusal"],
        notes=tuple(answer["notes"]),
    )


def _probe(draft: str, verifier: str, tokens: int, trust: bool) -> dict[str, Any]:
    """Build vLLM's configs for this pair, and ask its functions."""
    answer: dict[str, Any] = {
        "layers": {}, "method": None, "tokens": None, "verifier": None, "draft_vocab_size": None,
        "norm_before_residual": None, "refusal": None, "notes": [],
    }  # fmt: skip
    try:
        proposed = _proposed(draft, trust)
        answer |= {"method": proposed["method"], "tokens": proposed["tokens"], "verifier": proposed["verifier"]}
        target, speculative = _configs(draft, verifier, tokens or proposed["tokens"] or 1, trust)
    except Exception as error:  # noqa: BLE001  whatever it says is the answer
        answer["refusal"] = " ".join(f"{type(error).__name__}: {error}".split())
        return answer
    config = speculative.draft_model_config.hf_config
    answer["tokens"] = speculative.num_speculative_tokens
    answer["method"] = speculative.method
    answer["draft_vocab_size"] = getattr(config, "draft_vocab_size", None) or getattr(config, "vocab_size", None)
    answer["norm_before_residual"] = getattr(config, "norm_before_residual", None)
    default, refusal = _default_layers(target, answer["notes"])
    answer["refusal"] = refusal
    for runner, read in _readers(answer["notes"]).items():
        ids = read(speculative)
        answer["layers"][runner] = {"ids": list(ids or default), "origin": "config" if ids else "defaults"}
    return answer


def _proposed(draft: str, trust: bool) -> dict[str, Any]:
    """Method, tokens and verifier that vLLM reads out of a speculators config."""
    config = json.loads((Path(draft) / "config.json").read_text(encoding="utf-8"))
    if "speculators_config" not in config:
        return {"method": None, "tokens": None, "verifier": None}
    try:
        from vllm.transformers_utils.config import maybe_override_with_speculators as override
    except ImportError:
        return {"method": config.get("speculators_model_type"), "tokens": None, "verifier": None}
    given = {"model": draft, "tokenizer": draft, "trust_remote_code": trust, "revision": None}
    known = inspect.signature(override).parameters
    verifier, _, speculative = override(**{name: value for name, value in given.items() if name in known})
    return {
        "method": speculative["method"],
        "tokens": speculative["num_speculative_tokens"],
        "verifier": verifier,
    }


def _configs(draft: str, verifier: str, tokens: int, trust: bool) -> tuple[Any, Any]:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    target = ModelConfig(model=verifier, tokenizer=verifier, dtype="float32", trust_remote_code=trust)
    parallel = ParallelConfig()
    known = inspect.signature(SpeculativeConfig).parameters
    given = {
        "model": draft,
        "method": _METHOD,
        "num_speculative_tokens": tokens,
        "target_model_config": target,
        "target_parallel_config": parallel,
        "disable_log_stats": True,
        "enable_chunked_prefill": True,
    }
    return target, SpeculativeConfig(**{name: value for name, value in given.items() if name in known})


def _readers(notes: list[str]) -> dict[str, Any]:
    """How each model runner of this release reads the ids."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    own = getattr(GPUModelRunner, "_get_eagle3_aux_layers_from_config", None)
    if own is None:
        notes.append("it ignores the layer ids of a draft and always takes the verifier's defaults")
    found: dict[str, Any] = {
        facts.V1: lambda config: own(SimpleNamespace(speculative_config=config)) if own is not None else None
    }
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils
    except ImportError as error:
        home = Path(inspect.getfile(GPUModelRunner)).parent
        if (home / "gpu" / "spec_decode" / "eagle" / "eagle3_utils.py").is_file():
            notes.append(f"its runner V2 could not be asked here: {error}")
        return found
    found[facts.V2] = eagle3_utils.get_eagle3_aux_layers_from_config
    return found


def _default_layers(target: Any, notes: list[str]) -> tuple[tuple[int, ...], str | None]:
    """The verifier class's own ids, asked of a stand-in with as many layers; and why it cannot be a verifier."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    number = target.get_total_num_hidden_layers() if hasattr(target, "get_total_num_hidden_layers") else None
    number = number or target.hf_text_config.num_hidden_layers
    resolve = ModelRegistry.resolve_model_cls
    arguments = {"architectures": target.architectures, "model_config": target}
    known = inspect.signature(resolve).parameters
    model_class, _ = resolve(**{name: value for name, value in arguments.items() if name in known})
    if not supports_eagle3(model_class):
        return facts.default_layers(number), f"{model_class.__name__} does not offer the states that EAGLE-3 needs"
    for name in ("get_eagle3_default_aux_hidden_state_layers", "get_eagle3_aux_hidden_state_layers"):
        asked = getattr(model_class, name, None)
        if asked is None:
            continue
        try:
            return tuple(asked(SimpleNamespace(model=SimpleNamespace(layers=range(number))))), None
        except Exception as error:  # noqa: BLE001  a class that asks a part of itself that is not there
            notes.append(f"{model_class.__name__}.{name} could not be asked without its weights: {error}")
    return facts.default_layers(number), None


def main() -> None:
    """Entry point of the process that imports vLLM."""
    draft, verifier, tokens, trust = sys.argv[1:]
    print(_MARK + json.dumps(_probe(draft, verifier, int(tokens), trust == "1")))


if __name__ == "__main__":
    main()
