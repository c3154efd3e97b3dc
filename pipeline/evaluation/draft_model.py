"""A draft as the installed speculators' own model, for its forward; from 0.4.0.1 on."""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shims
from pipeline.model_info import ModelInfo
from pipeline.serving.draft_folder import WEIGHTS, DraftFolder
from shims.errors import SpecshimError, UsageError

_BLOCK = 128
"""Tokens; block masks are made of whole blocks."""
_BATCH_TOKENS = 2048
_PADDING = -1
_ATTENTION = "simple_flex_attention"
_OF_VERIFIER = ("verifier_norm", "verifier_lm_head")
"""Parts that a draft's folder need not hold: only a loss uses them."""


class DraftModel:
    """Proposes chains of tokens at every position of a row."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model.eval().to(device)
        self._device = device
        self._by_documents = "document_ids" in inspect.signature(model.forward).parameters

    def chains(self, rows: Sequence[tuple[Any, Any]], steps: int) -> list[list[list[int]]]:
        """The tokens that the draft proposes.

        Args:
            rows: (token ids int64 [T], auxiliary states [T, 3 H]), one a row.
            steps: tokens of a chain.

        Returns:
            For each row: step t, position j -> token id of the target vocabulary, proposed for place j + 2 + t.
            Position j has read the tokens up to j + 1 and the states up to j; there are T - 1 of them.
        """
        found: list[list[list[int]]] = []
        for batch in self._batches(rows):
            found += self._propose(batch, steps)
        return found

    def _batches(self, rows: Sequence[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
        batches: list[list[tuple[Any, Any]]] = []
        used = _BATCH_TOKENS
        for row in rows:
            length = len(row[0]) - 1
            if used + length > _BATCH_TOKENS:
                batches.append([])
                used = 0
            batches[-1].append(row)
            used += length
        return batches

    def _propose(self, batch: list[tuple[Any, Any]], steps: int) -> list[list[list[int]]]:
        import torch

        lengths = [len(ids) - 1 for ids, _ in batch]
        used = sum(lengths)
        total = -(-used // _BLOCK) * _BLOCK
        width = batch[0][1].shape[1]
        states = torch.zeros(1, total, width)
        ids = torch.zeros(1, total, dtype=torch.long)
        positions = torch.zeros(1, total, dtype=torch.long)
        documents = torch.full((1, total), _PADDING, dtype=torch.long)
        at = 0
        for number, ((tokens, aux), length) in enumerate(zip(batch, lengths, strict=True)):
            # The draft reads token j + 1 beside the states of place j.
            here = slice(at, at + length)
            ids[0, here], states[0, here] = tokens[1:], aux[:-1].float()
            positions[0, here] = torch.arange(1, length + 1)
            documents[0, here] = number
            at += length
        call: dict[str, Any] = {
            "hidden_states": states.to(self._device),
            "input_ids": ids.to(self._device),
            "position_ids": positions.to(self._device),
            "ttt_steps": steps,
        }
        if self._by_documents:
            call["document_ids"] = documents.to(self._device)
        else:
            call["lengths"] = torch.tensor(lengths, dtype=torch.long, device=self._device)
        # speculators compiles the forward on a GPU: two minutes for work of some seconds.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # Flex attention uncompiled is right, and slow enough to warn of.
            warnings.filterwarnings("ignore", message="flex_attention called without")
            drafted = self._model(**call)
        offsets = self._model.d2t
        tokens_of = [part if offsets is None else part + offsets[part] for part in drafted]
        split = [torch.split(part[0, :used].cpu(), lengths) for part in tokens_of]
        return [[split[step][row].tolist() for step in range(steps)] for row in range(len(batch))]


def load_draft(draft: DraftFolder, verifier: ModelInfo, device: str, trust_remote_code: bool = False) -> DraftModel:
    """The draft with its weights, in float32.

    Args:
        trust_remote_code: let the verifier's folder bring code, for its configuration.

    Raises:
        SpecshimError: speculators is not installed, or the weights do not fit its model.
        UsageError: the draft is not in speculators' format.
    """
    from safetensors.torch import load_file

    model = build(draft, verifier, trust_remote_code)
    weights: dict[str, Any] = {}
    for file in sorted(draft.path.glob(WEIGHTS)):
        weights |= load_file(file)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not name.startswith((*_OF_VERIFIER, "embed_tokens", "d2t", "t2d"))]
    if missing or unexpected:
        raise SpecshimError(
            str(draft.path),
            f"the tensors of {type(model).__name__}",
            f"missing: {', '.join(missing) or 'none'}; not known: {', '.join(unexpected) or 'none'}",
            "evaluate with the speculators release that trained the draft",
        )
    return DraftModel(model.float(), device)


def build(draft: DraftFolder, verifier: ModelInfo, trust_remote_code: bool = False) -> Any:
    """speculators' model for this draft's config; embeddings and head are the verifier's, the rest is random.

    Raises:
        SpecshimError: speculators is not installed.
        UsageError: the draft is not in speculators' format.
    """
    shims.install()
    import torch

    if not draft.in_speculators_format:
        raise UsageError(
            str(draft.path), "a draft in speculators' format", "a config of another kind",
            "convert it with speculators, or leave out --data and --untrained to evaluate it in a server alone",
        )  # fmt: skip
    draft_class = _draft_class()
    from pipeline.training_compat import let_configs_construct, quiet_loading, remote_code

    let_configs_construct()
    config = draft_class.config_class.from_pretrained(str(draft.path))
    config.transformer_layer_config._attn_implementation = _ATTENTION
    # The folder may have moved since.
    config.speculators_config.verifier.name_or_path = str(verifier.path)
    d2t, t2d = (None if part is None else torch.from_numpy(part) for part in draft.mapping())
    with quiet_loading(), remote_code(trust_remote_code):
        if "t2d" in inspect.signature(draft_class.__init__).parameters:
            return draft_class(config=config, t2d=t2d, d2t=d2t).float()
        model = draft_class(config)
        model.load_vocab_mappings(t2d, d2t)
        model.load_verifier_weights()
    return model.float()


def write_untrained(
    draft: DraftFolder, verifier: ModelInfo, output: Path, seed: int, trust_remote_code: bool = False
) -> None:
    """A draft like this one with fresh weights: where training began.

    Args:
        output: the new draft's folder.
        seed: of the weights.
    """
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    fresh = build(draft, verifier, trust_remote_code).state_dict()
    output.mkdir(parents=True, exist_ok=True)
    for file in sorted(draft.path.glob(WEIGHTS)):
        trained = load_file(file)
        # Integers and flags are the vocabulary, which is not learned.
        tensors = {
            name: fresh[name].to(old.dtype).contiguous() if old.is_floating_point() else old
            for name, old in trained.items()
        }
        save_file(tensors, output / file.name, metadata={"format": "pt"})
    for file in sorted(draft.path.glob("*.json")):
        shutil.copy(file, output / file.name)


def _draft_class() -> Any:
    try:
        from speculators.models.eagle3 import Eagle3DraftModel
    except ImportError as error:
        raise SpecshimError(
            "evaluate",
            "speculators from 0.4.0.1 on, whose model computes the draft",
            f"{type(error).__name__}: {error}",
            "pip install speculators==0.4.0.1",
        ) from error
    return Eagle3DraftModel
