"""Will this server feed the draft what it was trained on? Findings, each with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.model_info import ModelInfo, read_model, refuse_remote_code
from pipeline.object_store.address import refuse_addresses
from pipeline.serving import facts
from pipeline.serving.draft_folder import DraftFolder, read_draft
from pipeline.serving.expected import expect, unreachable
from pipeline.serving.probe import ask_vllm
from pipeline.serving.served import FROM_FACTS, Served
from pipeline.serving.trained import Trained, same_model, trained_on
from shims.errors import SpecshimError, UsageError
from shims.releases import known
from shims.versions import base_release, installed, is_exact_release, newest_first, parse, within

MISMATCH, UNKNOWN, NOTE = "mismatch", "unknown", "note"


@dataclass(frozen=True)
class CheckConfig:
    """Which draft, and which server."""

    draft: Path
    vllm: str | None = None
    """A release; None for the one installed."""
    model: str | None = None
    """The verifier it will be served with; None for the one the draft names."""
    trained_layer_ids: tuple[int, ...] | None = None
    """Native ids, where no manifest tells."""
    ask_installed: bool = True
    """Ask vLLM's own code where that release is installed."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit, or that could not be judged."""

    kind: str
    where: str
    wanted: str
    found: str
    next_step: str

    def error(self) -> SpecshimError:
        """The same, to be raised."""
        return SpecshimError(self.where, self.wanted, self.found, self.next_step)

    def __str__(self) -> str:
        return str(self.error())


@dataclass
class Checked:
    """What was found out."""

    draft: DraftFolder
    verifier: ModelInfo
    trained: Trained
    served: Served
    findings: list[Finding] = field(default_factory=list)

    @property
    def mismatches(self) -> list[Finding]:
        """What makes this draft wrong for this server."""
        return [finding for finding in self.findings if finding.kind == MISMATCH]

    @property
    def exit_code(self) -> int:
        """0: it fits; 1: it does not; 2: that cannot be told."""
        if self.mismatches:
            return 1
        return 2 if any(finding.kind == UNKNOWN for finding in self.findings) else 0

    @property
    def verdict(self) -> str:
        """In a word."""
        return ("fits", "does not fit", "cannot be judged")[self.exit_code]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "draft": str(self.draft.path),
            "verifier": str(self.verifier.path),
            "verdict": self.verdict,
            "trained": {"known_by": self.trained.known_by, "layers": self.trained.layers},
            "served": self.served.as_dict(),
            "findings": [vars(finding) for finding in self.findings],
        }


def check_draft(config: CheckConfig) -> Checked:
    """Compare what a draft was trained on with what a server will use.

    Raises:
        UsageError: draft, verifier or release cannot be read.
        SpecshimError: the installed vLLM did not answer.
    """
    refuse_addresses(config)
    draft = read_draft(config.draft, "DRAFT")
    trained = trained_on(draft, config.trained_layer_ids)
    verifier = _verifier(config, draft, trained)
    served = _served(config, draft, verifier)
    result = Checked(draft, verifier, trained, served)
    result.findings += [
        *_release_findings(config, served, draft),
        *_training_findings(trained),
        *_layer_findings(draft, verifier, trained, served),
        *_mapping_findings(draft, verifier, trained),
        *_verifier_findings(draft, verifier, trained),
        *_size_findings(draft, verifier),
    ]
    return result


def _verifier(config: CheckConfig, draft: DraftFolder, trained: Trained) -> ModelInfo:
    named = config.model or draft.verifier or trained.model_path
    if named is None:
        raise UsageError("--model", "the verifier that the draft is for", "the draft names none", "give --model")
    model = read_model(named, "--model" if config.model else "the draft's verifier")
    refuse_remote_code(model, config.trust_remote_code, "--model")
    return model


def _served(config: CheckConfig, draft: DraftFolder, verifier: ModelInfo) -> Served:
    here = installed("vllm")
    release = config.vllm or here
    if release is not None:
        parse(release, "--vllm")
    else:
        raise UsageError(
            "--vllm", "a vLLM release", "none given, and none installed", "say which release will serve: --vllm X"
        )
    if config.ask_installed and here is not None and base_release(release) == base_release(here):
        return ask_vllm(draft, verifier, here, None, config.trust_remote_code)
    return expect(draft, verifier, release)


def _release_findings(config: CheckConfig, served: Served, draft: DraftFolder) -> list[Finding]:
    found = []
    where = f"vLLM {served.release}"
    if served.refusal:
        step = "serve with another release, or another draft"
        found.append(Finding(MISMATCH, where, "a server that takes this draft", served.refusal, step))
    if served.method not in (None, "eagle3"):
        found.append(
            Finding(MISMATCH, where, "method eagle3", str(served.method), "this tool makes and checks EAGLE-3 drafts")
        )
    if draft.in_speculators_format and not draft.speculative_tokens:
        step = "write `speculators_config.proposal_methods[0].speculative_tokens`"
        found.append(Finding(MISMATCH, str(draft.path / "config.json"), "a number of speculative tokens", "none", step))
    newest = newest_first(known())[0]
    if config.vllm is not None and served.known_by == FROM_FACTS and not is_exact_release(config.vllm):
        found.append(
            Finding(NOTE, f"--vllm {config.vllm}", "a release, whose sources were read",
                    f"a build that may be ahead of {served.release} or behind it; judged as {served.release}",
                    "install it and run this again: then its own code is asked")
        )  # fmt: skip
    if not within(served.release, f"<={newest}"):
        found.append(
            Finding(NOTE, where, f"a release up to {newest}, whose sources were read", served.release,
                    "compare with that release's own code: install it and run this again")
        )  # fmt: skip
    return found


def _training_findings(trained: Trained) -> list[Finding]:
    if trained.record is None or trained.record["complete"]:
        return []
    step = "run the same `specshim train` again: it goes on to its end"
    return [Finding(NOTE, trained.known_by, "a finished training", "complete = false", step)]


def _layer_findings(draft: DraftFolder, verifier: ModelInfo, trained: Trained, served: Served) -> list[Finding]:
    where = f"vLLM {served.release}"
    config = str(draft.path / "config.json")
    found: list[Finding] = []
    if draft.unreadable_ids is not None:
        found.append(
            Finding(MISMATCH, f"{config}, `{facts.KEY}`", "a list of whole numbers",
                    repr(draft.unreadable_ids), "name the layers so")
        )  # fmt: skip
    repeated = sorted({i for layers in served.layers.values() for i in layers.ids if layers.ids.count(i) > 1})
    if repeated:
        found.append(
            Finding(MISMATCH, config, "each layer once: a server hands out one state for it, however often it is named",
                    f"{_list(repeated)} more than once", "name the layers that the draft was trained on")
        )  # fmt: skip
    if trained.layers is None:
        found.append(
            Finding(
                UNKNOWN, str(draft.path), "the layers that the draft was trained on",
                "no training manifest beside it, and none named in its config",
                "say them: --trained-layer-ids (native ids)",
            )
        )  # fmt: skip
        return found
    for runner, layers in served.layers.items():
        if _same(layers.ids, trained.layers):
            continue
        said = "names in its config" if layers.origin == "config" else "leaves to the verifier's defaults"
        found.append(
            Finding(
                MISMATCH, f"{where}, runner {runner}",
                f"native layers {_list(trained.layers)}, which the draft was trained on ({trained.known_by})",
                f"{_list(layers.ids)}, which it {said}{_shift(layers.ids, trained.layers)}",
                _layer_step(draft, trained, served, runner),
            )
        )  # fmt: skip
    named = draft.top_level_ids
    if named and not _same(named, trained.layers) and not any(_same(x.ids, named) for x in served.layers.values()):
        found.append(
            Finding(MISMATCH, config, f"`{facts.KEY}` = {list(trained.layers)} ({trained.known_by})",
                    f"{list(named)}{_shift(named, trained.layers)}", "correct the config, or train again")
        )  # fmt: skip
    reason = unreachable(trained.layers, verifier, served.release)
    if reason:
        found.append(
            Finding(MISMATCH, where, f"the states of layers {_list(trained.layers)}", f"no state for {reason}",
                    "train on other layers, or serve with another release")
        )  # fmt: skip
    if len(trained.layers) != facts.AUXILIARY_STATES and draft.in_speculators_format:
        found.append(
            Finding(MISMATCH, where, f"{facts.AUXILIARY_STATES} auxiliary layers", _list(trained.layers),
                    "train on three layers and the last one")
        )  # fmt: skip
    return found


def _layer_step(draft: DraftFolder, trained: Trained, served: Served, runner: str) -> str:
    assert trained.layers is not None
    if not facts.holds("ids-in-config", served.release):
        return "serve with vLLM 0.11.1 or later, or train on the default layers"
    if draft.top_level_ids is None:
        return f"write `{facts.KEY}`: {list(trained.layers)} at the top of its config.json"
    return f"set `{facts.KEY}` to {list(trained.layers)}, or train on layers {_list(served.layers[runner].ids)}"


def _same(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether both name the same states: a server hands them out ascending, in whatever order they are named."""
    return sorted(left) == sorted(right)


def _shift(found: Sequence[int], wanted: Sequence[int]) -> str:
    """What a constant distance between two lists of ids usually means."""
    distances = {a - b for a, b in zip(found, wanted, strict=False)}
    if len(found) != len(wanted) or len(distances) != 1:
        return ""
    distance = distances.pop()
    hint = (
        ": `after` ids where native ones belong" if distance == -1 else ": one added too many" if distance == 1 else ""
    )
    return f" (all shifted by {distance:+d}{hint})"


def _mapping_findings(draft: DraftFolder, verifier: ModelInfo, trained: Trained) -> list[Finding]:
    size, target = draft.draft_vocab_size, verifier.vocab_size
    where = f"{draft.path}, tensors"
    found: list[Finding] = []
    if trained.draft_vocab_size and size != trained.draft_vocab_size:
        wanted = f"draft_vocab_size {trained.draft_vocab_size} ({trained.known_by})"
        found.append(
            Finding(MISMATCH, str(draft.path / "config.json"), wanted, str(size), "take the draft of that run")
        )
    head = draft.tensor("lm_head.weight")
    if head is not None and size is not None and head[1][0] != size:
        found.append(
            Finding(
                MISMATCH, where, f"lm_head of {size} tokens", f"{head[1][0]}", "take config and weights of one draft"
            )
        )
    if size is None or size == target:
        return found
    missing = [name for name in ("d2t", "t2d") if draft.tensor(name) is None]
    if missing:
        silent = "; vLLM leaves out a missing d2t without a word, and maps draft token i to target token i"
        found.append(
            Finding(
                MISMATCH, where, f"d2t [{size}] and t2d [{target}], since the draft says {size} of {target} tokens",
                f"no {' and no '.join(missing)}{silent if 'd2t' in missing else ''}",
                "add the mapping of `specshim vocab` to the draft's safetensors",
            )
        )  # fmt: skip
        return found
    fault = _mapping_fault(draft, size, target)
    if fault:
        found.append(
            Finding(MISMATCH, where, f"d2t int64 [{size}] and t2d bool [{target}] that agree", fault,
                    "take the mapping that the draft was trained with")
        )  # fmt: skip
    return found


def _mapping_fault(draft: DraftFolder, size: int, target: int) -> str | None:
    from pipeline.vocab import fault_of

    d2t, t2d = draft.mapping()
    if d2t.shape != (size,) or t2d.shape != (target,):
        return f"d2t {list(d2t.shape)}, t2d {list(t2d.shape)}"
    return fault_of(d2t, t2d.astype(bool))


def _verifier_findings(draft: DraftFolder, verifier: ModelInfo, trained: Trained) -> list[Finding]:
    where = str(draft.path / "config.json")
    found: list[Finding] = []
    if draft.in_speculators_format and not draft.verifier:
        found.append(
            Finding(MISMATCH, where, "`speculators_config.verifier.name_or_path`", "nothing", "name the verifier there")
        )
    same = same_model(trained, verifier)
    if same is False:
        found.append(
            Finding(
                MISMATCH, f"verifier {verifier.path}",
                f"the model that the draft was trained on ({trained.model_path})",
                "other files (sha256 of config, tokenizer and weights differ)",
                "serve with that model, or train a draft for this one",
            )
        )  # fmt: skip
    if same is None:
        found.append(
            Finding(NOTE, f"verifier {verifier.path}", "the model that the draft was trained on",
                    "nothing says which that was; its sizes are compared alone", "keep the training's manifest")
        )  # fmt: skip
    return found


def _size_findings(draft: DraftFolder, verifier: ModelInfo) -> list[Finding]:
    found = []
    where = str(draft.path)
    if draft.target_hidden_size != verifier.hidden_size:
        found.append(
            Finding(MISMATCH, where, f"a draft for hidden states of {verifier.hidden_size} (verifier {verifier.path})",
                    str(draft.target_hidden_size), "serve with the verifier it was trained on")
        )  # fmt: skip
    if draft.vocab_size != verifier.vocab_size:
        found.append(
            Finding(MISMATCH, where, f"a target vocabulary of {verifier.vocab_size} tokens (verifier {verifier.path})",
                    str(draft.vocab_size), "serve with the verifier it was trained on")
        )  # fmt: skip
    width = draft.tensor("fc.weight")
    wanted = facts.AUXILIARY_STATES * verifier.hidden_size
    if width is not None and draft.in_speculators_format and width[1][-1] != wanted:
        found.append(
            Finding(MISMATCH, f"{where}, fc.weight", f"{facts.AUXILIARY_STATES} states of {verifier.hidden_size}",
                    f"an input of {width[1][-1]}", "train on three auxiliary layers of this verifier")
        )  # fmt: skip
    return found


def _list(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) or "none"
