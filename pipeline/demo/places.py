"""Where a chain of stages, from answers to a draft, keeps what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.evaluation.report import PICTURE_NAME
from pipeline.regenerate import NAME as REGENERATED_NAME

# The model's own answers, as `--regenerate` writes them; they are committed, since asking takes minutes on a CPU.
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")


@dataclass(frozen=True)
class Places:
    """Where the demo keeps what."""

    root: Path
    regenerated: bool = False
    """Freshly answered conversations get a folder of their own for all that follows from them."""

    @property
    def work(self) -> Path:
        """Everything but the model."""
        return self.root / "regenerated" if self.regenerated else self.root

    @property
    def model(self) -> Path:
        """The model folder."""
        return self.root / "model"

    @property
    def model_checked(self) -> Path:
        """Exists once the converted model has answered sensibly."""
        return self.root / "model.checked"

    @property
    def conversations(self) -> Path:
        """The committed conversations, or the fresh ones."""
        return self.answers / REGENERATED_NAME if self.regenerated else CONVERSATIONS

    @property
    def answers(self) -> Path:
        """Folder of the fresh conversations."""
        return self.work / "conversations"

    @property
    def prepared(self) -> Path:
        """Token ids, mask, vocabulary."""
        return self.work / "prepared"

    @property
    def states(self) -> Path:
        """Hidden states."""
        return self.work / "states"

    @property
    def training(self) -> Path:
        """Draft and metrics."""
        return self.work / "training"

    @property
    def evaluation(self) -> Path:
        """Report of the draft."""
        return self.work / "evaluation"

    @property
    def loss_curve(self) -> Path:
        """The picture beside the checkpoint, or the report's, which has one too."""
        beside = sorted(self.training.glob("*.png"))
        return beside[0] if beside else self.evaluation / PICTURE_NAME

    @property
    def verified(self) -> Path:
        """What `verify --json` printed."""
        return self.work / "verified.json"
