"""One training: speculators' trainer between our batches and our checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import training_checkpoint as checkpoints
from pipeline import training_compat as compat
from pipeline import training_parallel as parallel
from pipeline.config import TrainConfig
from pipeline.object_store.keeping import kept_rows
from pipeline.places import open_data
from pipeline.progress import StageProgress, console, stage_progress
from pipeline.training_attention import DENSE_ATTENTION, choose_attention
from pipeline.training_batches import AHEAD, BatchStream, PackedRows
from pipeline.training_checkpoint import Progress
from pipeline.training_data import split_rows
from pipeline.training_draft import build_draft, compute_in, write_draft
from pipeline.training_init import InitialDraft
from pipeline.training_inputs import TrainingData
from pipeline.training_metrics import MetricsLog, counted_over, metrics_to, read_metrics
from pipeline.training_parallel import Ranks
from pipeline.training_reports import EVENTS_FOLDER, PLOT_NAME, Events, plot
from pipeline.training_stacking import stacking
from pipeline.training_targets import teach_as_verifier
from shims.errors import UsageError

_SHARED_MEMORY = Path("/dev/shm")


def readers(wanted: int | None, device: str, batch_bytes: int) -> int:
    """Processes that read rows ahead: as given, else some beside a GPU and none on a CPU."""
    if wanted is not None:
        return wanted
    if not device.startswith("cuda"):
        return 0
    # Reading a large model's rows and adding noise takes a core about as long as a GPU trains on them.
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    mine = (os.cpu_count() or 1) // beside
    # Batches come through shared memory, of which a container has 64 MB unless it is told otherwise; what does not
    # find room there is killed. Training and held-out rows have readers at the same time.
    room = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    return max(0, min(4, mine - 1, room // (beside * 2 * AHEAD * batch_bytes)))


class Run:
    """A trainer that is built, brought to where it was, and run to its end."""

    def __init__(
        self, config: TrainConfig, data: TrainingData, initial: InitialDraft | None, ranks: Ranks, device: str
    ) -> None:
        """Build draft and trainer.

        Raises:
            SpecshimError: speculators' parts are missing, or cannot build this draft.
            UsageError: the model lacks weights that the loss needs, or there are too few rows.
        """
        import torch

        self._config, self._data, self._ranks = config, data, ranks
        self._device = ranks.device(device)
        self._parts = compat.load_trainer_parts()
        compat.refuse_missing_verifier_weights(data.model, config.trust_remote_code)
        self.dtype = self._computing_dtype()
        self._sharded = config.fsdp and ranks.size > 1
        if self._sharded and not self._parts.series.shards:
            raise UsageError(
                "--fsdp", "speculators 0.5 or later", f"{self._parts.version}, which loses the initial weights when it "
                "shards", "leave --fsdp out: each device then holds a copy",
            )  # fmt: skip
        attention = choose_attention(self._device)
        self.adaptations: list[str] = []
        self._adapted(self._adaptations(attention, configs_mended=compat.let_configs_construct()))
        self._tell(initial)
        self._progress = Progress(speculators=self._parts.version)
        # The same initial weights in every process.
        torch.manual_seed(config.seed)
        self._draft = build_draft(config, data, self._parts, attention, initial)
        self._adapted(teach_as_verifier(self._draft, data.model, config.trust_remote_code))
        if not self._parts.series.autocasts:
            compute_in(self._draft, getattr(torch, self.dtype))
        if config.accumulate > 1:
            trained = [weight for weight in self._draft.parameters() if weight.requires_grad]
            self._draft.forward = stacking(self._draft.forward, self._parts.series.counted, trained, self._sharded)
        self._streams = self._make_streams()
        self._trainer = self._make_trainer()
        self._log: MetricsLog | None = None
        self._bar: StageProgress | None = None
        self._began = 0.0

    def _computing_dtype(self) -> str:
        if self._config.dtype != "auto":
            return self._config.dtype
        gpu = self._device.startswith("cuda")
        return "bfloat16" if gpu and self._parts.series.autocasts else "float32"

    def _adaptations(self, attention: str, configs_mended: bool) -> list[str]:
        series, used = self._parts.series, []
        if not self._parts.read:
            used.append(f"speculators {self._parts.version} is newer than what was read: driven as {series.name}")
        if configs_mended:
            used.append("speculators' config classes get their own constructor back from transformers 5")
        if attention == DENSE_ATTENTION:
            why = "cannot train" if self._device.startswith("cuda") else "is slow or cannot train"
            used.append(f"dense attention mask: flex_attention {why} on {self._device} in this torch")
        if not self._device.startswith("cuda"):
            used.append(f"device {self._device} in place of a CUDA rank")
        if self._ranks.size > 1:
            how = "sharded by speculators' FSDP" if self._sharded else "replicated"
            used.append(f"{self._ranks.size} processes, the draft {how}")
        return used

    def _adapted(self, lines: list[str]) -> None:
        self.adaptations += lines
        for line in lines:
            console.print(f"adaptation: {line}", highlight=False, soft_wrap=True)

    def _tell(self, initial: InitialDraft | None) -> None:
        ids, count = self._data.layers.native[:-1], self._data.model.num_layers
        usual = (2, count // 2, count - 3)
        note = "" if ids == usual else f"; vLLM's default would be {' '.join(map(str, usual))}, so it has to read them"
        console.print(
            f"the draft will name its layers: native {' '.join(map(str, ids))}{note}", highlight=False, soft_wrap=True
        )
        if initial is not None:
            console.print(f"begins with {initial.folder} ({initial.layout} layout)", highlight=False, soft_wrap=True)
            for line in initial.differences:
                console.print(f"  {line}", highlight=False, soft_wrap=True)

    def _make_streams(self) -> tuple[BatchStream, BatchStream]:
        import torch

        config, data, ranks = self._config, self._data, self._ranks
        long_rows = sum(length - 1 > config.max_seq_len for length in data.lengths.values())
        if long_rows:
            console.print(f"{long_rows} rows are longer than {config.max_seq_len} tokens and are cut", highlight=False)
        store = open_data(config.data, data.record, "--data", lambda: kept_rows(config, data.record))
        replicas = ranks.size * config.accumulate
        dtype, numbers = getattr(torch, self.dtype), 3  # ids, mask and positions, 8 bytes each
        token_bytes = len(data.layers.ids) * data.model.hidden_size * dtype.itemsize + 8 * numbers
        workers = readers(config.workers, self._device, config.accumulate * config.max_seq_len * token_bytes)
        streams = []
        for part, (rows, noise) in enumerate(
            zip(split_rows(list(data.lengths), config.val_share, config.seed), (config.noise_std, 0.0), strict=True)
        ):
            packed = PackedRows(
                store, rows, [data.lengths[row] for row in rows], self._parts.series,
                max_tokens=config.max_seq_len, dtype=dtype, noise=noise, seed=config.seed,
            )  # fmt: skip
            samplers = [
                self._parts.sampler_class(
                    batch_max_length=config.max_seq_len,
                    lengths=[min(length, config.max_seq_len) for length in packed.lengths],
                    num_replicas=replicas,
                    rank=ranks.rank * config.accumulate + number,
                    seed=config.seed,
                )
                for number in range(config.accumulate)
            ]
            stream = BatchStream(
                packed, samplers, workers=workers, pinned=self._device.startswith("cuda"),
                before_step=None if part else self._before_step, after_step=None if part else self._after_step,
            )  # fmt: skip
            if not len(stream):
                raise UsageError(
                    "--val-share" if part else "--data",
                    f"at least {replicas} rows {'held out' if part else 'to train on'}, one for each batch of a step",
                    f"{len(rows)}",
                    "give more rows, or fewer devices or --accumulate",
                )
            streams.append(stream)
        return streams[0], streams[1]

    def _make_trainer(self) -> Any:
        import torch

        config, parts = self._config, self._parts
        train_options, val_options = parts.draft_class.get_trainer_kwargs(
            use_off_policy_tokens=False,
            ttt_steps=config.ttt_steps,
            ttt_step_loss_decay=config.ttt_step_loss_decay,
            loss_fn="kl_div",
            # The fused one of 0.8 and later is for GPUs, and torch 2.11 does not compile it
            # (https://github.com/vllm-project/speculators/blob/v0.9.0/src/speculators/losses/fused.py: one autotuned
            # kernel for several steps). To go once every torch that these releases allow does.
            loss_implementation="eager",
        )
        total = config.max_steps or config.epochs * len(self._streams[0])
        warmup = total // 100 if config.warmup_steps is None else config.warmup_steps
        options = {
            "lr": config.lr,
            "num_epochs": config.epochs,
            "save_path": str(config.output_dir / checkpoints.FOLDER),
            "train_call_kwargs": train_options,
            "val_call_kwargs": val_options,
            "scheduler_type": config.scheduler,
            "scheduler_warmup_steps": compat.Steps(warmup),
            "scheduler_total_steps": total,
            **compat.place_trainer(parts.series, self._device),
        }
        if "hidden_states_dtype" in parts.config_class._fields:
            options["hidden_states_dtype"] = getattr(torch, self.dtype)
        kind = parts.trainer_class
        if self._sharded:
            kind = parallel.sharding(kind, getattr(torch, self.dtype))
        with _warnings_of_autocast():
            trainer = kind(
                model=self._draft,
                config=parts.config_class(**options),
                train_loader=self._streams[0],
                val_loader=self._streams[1],
            )
        if parts.series.autocasts:
            trainer.device_type = torch.device(self._device).type
        if not self._sharded:
            trainer.model = parallel.replicated(trainer.model, self._ranks, self._device)
        return trainer

    # The trainer's optimizers and schedulers: one each, or lists of them from 0.7 on.
    @property
    def _optimizers(self) -> list[Any]:
        many = getattr(self._trainer, "optimizers", None)
        return [self._trainer.opt] if many is None else list(many)

    @property
    def _schedulers(self) -> list[Any]:
        many = getattr(self._trainer, "schedulers", None)
        if many is not None:
            return list(many)
        return [self._trainer.scheduler] if self._trainer.scheduler is not None else []

    def train(self, resume: Path | None) -> Progress:
        """Train to the end, from ``resume`` on where that is given.

        Raises:
            SpecshimError: the loss is not a number, or a checkpoint cannot be read.
        """
        config = self._config
        if resume is not None:
            self._restore(resume)
            console.print(f"going on from step {self._progress.step}", highlight=False)
        progress = self._progress
        events = Events(config.output_dir / EVENTS_FOLDER, progress.step) if self._wants_events() else None
        self._began = time.monotonic() - progress.seconds
        with contextlib.ExitStack() as stack:
            if events is not None:
                stack.callback(events.close)
            self._bar = bar = stack.enter_context(stage_progress("train", self._steps_to_come(), unit="steps"))
            self._log = stack.enter_context(
                metrics_to(
                    MetricsLog(
                        config.output_dir / checkpoints.METRICS_NAME, bar, self._parts.series, self._ranks,
                        begin_at=progress.metrics_bytes, step=progress.step,
                        sink=events.add if events is not None else lambda line: None,
                    )
                )
            )  # fmt: skip
            stack.enter_context(compat.quiet_trainer(self._parts.series, self._device))
            stack.enter_context(counted_over(self._ranks, self._parts.series))
            stack.enter_context(_warnings_of_autocast())
            if resume is None:
                progress.start = self._validate()
            self._epochs()
            progress.seconds = time.monotonic() - self._began
        if self._ranks.first:
            fault = plot(read_metrics(config.output_dir / checkpoints.METRICS_NAME), config.output_dir / PLOT_NAME)
            if fault:
                console.print(f"no picture of the training: {fault}", highlight=False)
        return progress

    def _wants_events(self) -> bool:
        if not self._config.tensorboard or not self._ranks.first:
            return False
        fault = Events.missing()
        if fault:
            console.print(f"no TensorBoard event files: {fault}", highlight=False)
        return not fault

    def _epochs(self) -> None:
        config, progress = self._config, self._progress
        assert self._bar is not None
        while progress.epoch < config.epochs and not progress.stopped:
            self._streams[0].set_epoch(progress.epoch)
            self._bar.expect(self._bar.rows + self._steps_to_come())
            self._streams[0].skip(progress.position)
            self._trainer.train_epoch(progress.epoch)
            if not self._validated():
                self._judge(self._validate())
            progress.epoch, progress.position = progress.epoch + 1, 0
            self._save()

    def _steps_to_come(self) -> int:
        """What is left of this epoch, and of the next ones if they are as long: each packs its rows anew."""
        config, progress, of_epoch = self._config, self._progress, len(self._streams[0])
        steps = (config.epochs - progress.epoch) * of_epoch - progress.position
        return min(steps, config.max_steps - progress.step) if config.max_steps else steps

    def _before_step(self, tokens: int) -> None:
        if self._log is not None:
            self._log.tokens = tokens

    def _after_step(self, done: int) -> bool:
        """Between two steps: everything of the last one is in the weights and the optimizer."""
        config, progress = self._config, self._progress
        assert self._log is not None
        self._log.refuse_broken_loss()
        progress.step, progress.position = self._log.steps, done
        if config.max_steps and progress.step >= config.max_steps and not progress.stopped:
            progress.stopped = f"{config.max_steps} steps (--max-steps)"
        last = done >= len(self._streams[0])
        if config.val_steps and progress.step % config.val_steps == 0 and not last:
            self._judge(self._validate())
            self._trainer.model.train()
        if config.save_steps and progress.step % config.save_steps == 0 and not last and not progress.stopped:
            self._save()
        return not progress.stopped

    def _validated(self) -> bool:
        """Whether the step that ended the training in the middle of an epoch was validated there already."""
        config, progress = self._config, self._progress
        within = progress.position < len(self._streams[0])
        return bool(within and config.val_steps and progress.step % config.val_steps == 0)

    def _validate(self) -> dict[str, float]:
        assert self._log is not None
        self._trainer.val_epoch(self._progress.epoch)
        self._progress.last = self._log.validation()
        return self._progress.last

    def _judge(self, found: dict[str, float]) -> None:
        """Publish the draft where it is the best so far; end the training where that is long ago."""
        progress, config = self._progress, self._config
        if not progress.best or found["loss"] < progress.best["loss"]:
            progress.best, progress.best_step, progress.not_better = dict(found), progress.step, 0
            state = parallel.whole_state(self._draft, self._sharded)
            if self._ranks.first:
                write_draft(
                    self._draft, state, config.output_dir / checkpoints.DRAFT_NAME, config.draft_dtype, self._data
                )
        else:
            progress.not_better += 1
        if config.patience and progress.not_better >= config.patience and not progress.stopped:
            progress.stopped = f"{progress.not_better} validations without a better one (--patience)"

    def _save(self) -> None:
        assert self._log is not None
        progress, ranks = self._progress, self._ranks
        progress.metrics_bytes = self._log.durable()
        progress.seconds = time.monotonic() - self._began
        state = parallel.whole_state(self._draft, self._sharded)
        trainable = {name for name, parameter in self._draft.named_parameters() if parameter.requires_grad}
        training = {
            "optimizers": parallel.optimizer_states(self._draft, self._optimizers, self._sharded),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "random": ranks.gathered(checkpoints.random_state()),
        }
        if ranks.first:
            weights = {name: value.contiguous() for name, value in state.items() if name in trainable}
            folder = self._config.output_dir / checkpoints.FOLDER
            checkpoints.write(folder, progress, weights, training, self._config.keep_checkpoints)
        ranks.wait()

    def _restore(self, checkpoint: Path) -> None:
        self._progress = checkpoints.read_progress(checkpoint)
        weights, training = checkpoints.read(checkpoint)
        unknown = parallel.restore_weights(self._draft, weights, self._sharded)
        if unknown:
            raise UsageError(str(checkpoint), "the tensors of this draft", f"also {unknown[:3]}", "remove it")
        parallel.restore_optimizers(self._draft, self._optimizers, training["optimizers"], self._sharded)
        for scheduler, state in zip(self._schedulers, training["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._trainer.global_step = self._progress.step
        if self._ranks.rank < len(training["random"]):
            checkpoints.set_random_state(training["random"][self._ranks.rank])


@contextlib.contextmanager
def _warnings_of_autocast() -> Iterator[None]:
    """float32 is wanted: that autocast then does nothing is no news."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Aa]utocast.*")
        yield
