"""Options of every stage, as values.

The command line builds these; tests and other programs may build them too. A path is
kept as given, so messages can name what the user typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shims.errors import UsageError

DEFAULT_MAX_SEQ_LEN = 2048
"""Tokens per row, unless a flag says otherwise."""


@dataclass(frozen=True)
class PrepareConfig:
    """Conversations to token ids and a loss mask."""

    model_path: str
    input: Path
    output_dir: Path
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN
    """Tokens kept per row; the rest is cut off at the end."""
    skip_bad: bool = False
    """Leave out rows that cannot be used (and list them) instead of refusing the file."""
    trust_remote_code: bool = False
    split: str | None = None
    """Of a saved data set that has several."""
    thinking: str = "keep"
    """keep: what the model thinks before an answer is trained on; mask: it is not."""
    thinking_end: str = "</think>"
    """What ends the thinking inside a message's content."""
    duplicates: str = "drop"
    """Rows whose tokens an earlier row has: drop (and count), keep, or refuse."""
    workers: int = 1
    """Processes."""


def check_seed(seed: int, flag: str = "--seed") -> None:
    """Refuse a seed that torch or vLLM would not take, once the model is loaded.

    Raises:
        UsageError: it is negative, or more than 32 bits (vLLM adds to it for each reply).
    """
    if not 0 <= seed < 1 << 32:
        raise UsageError(flag, f"0 to {(1 << 32) - 1}", str(seed), "give such a number")


@dataclass(frozen=True)
class RegenerateConfig:
    """Questions to conversations in the model's own words."""

    model_path: str
    input: Path
    output_dir: Path
    max_reply_tokens: int = 1024
    max_model_len: int = 4096
    """Tokens of a whole conversation."""
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0
    batch_size: int = 256
    """Conversations asked at once; those finished are on disk after each batch."""
    tp_size: int = 1
    gpu_memory_utilization: float = 0.90
    dtype: str = "auto"
    split: str | None = None
    skip_bad: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class VocabConfig:
    """Token counts to a draft vocabulary."""

    prepared: Path
    draft_vocab_size: int
    output_dir: Path | None = None
    """Where d2t-{size}.npy and t2d-{size}.npy go; the prepared folder when not given."""


@dataclass(frozen=True)
class ExtractConfig:
    """Token ids to hidden states."""

    model_path: str
    prepared_data: Path
    output_dir: Path
    """A folder, or an address of an object store."""
    batch_size: int = 4
    """Rows handed to the engine at once."""
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN
    tp_size: int = 1
    gpu_memory_utilization: float = 0.80
    """Share of the device's memory that vLLM may use, 0 to 1."""
    layer_ids: tuple[int, ...] | None = None
    layer_convention: str = "after"
    engine: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    format: str = "hs_safetensors"
    rows_per_file: int = 1000
    """Only where the format holds many rows a file."""
    store_dtype: str = "auto"
    """What the states are rounded to on disk; auto: as computed."""
    vocab: Path | None = None
    """Folder of `specshim vocab`, whose mapping goes beside the rows of formats that have a place for it."""
    max_bad: int = 0
    """Rows whose states cannot be right that may be left out before the run stops."""
    preflight: int = 0
    """Rows to compare with a reference before the bulk."""
    preflight_against: str = "transformers"
    shard: str | None = None
    """``i/n``: compute every n-th file of rows, beside other processes."""
    min_free_gib: float = 1.0
    """Stop before less than this is left free on the disk, in GiB."""
    ignore_space: bool = False
    """Begin although the estimate does not fit."""
    check_content: bool = False
    """On going on, read finished rows whole and compare them with their hashes."""
    enforce_eager: bool | None = None
    """Direct engine: uncompiled; None: on a CPU only."""
    max_num_batched_tokens: int | None = None
    """Direct engine: tokens of one step; None leaves it to vLLM."""
    replicas: int | None = None
    """Direct engines that Ray runs side by side; None: one engine, without Ray."""
    ray_address: str = "local"
    """``local``: Ray is started on this machine; ``auto``: the cluster that it belongs to; or host:port."""
    max_restarts: int = 10
    """Replicas that may die and be replaced in one run."""


@dataclass(frozen=True)
class ConvertConfig:
    """Rows of one format to another one."""

    source: Path
    output_dir: Path
    format: str
    source_format: str | None = None
    """What the source is in; only needed where that cannot be seen."""
    layer_ids: tuple[int, ...] | None = None
    """The states to keep, in ``layer_convention``; all of them when not given."""
    layer_convention: str | None = None
    source_layer_ids: tuple[int, ...] | None = None
    """What the source holds, where it has no manifest; in ``source_layer_convention``."""
    source_layer_convention: str | None = None
    model: str | None = None
    """The model of the states: for its final norm, and to prove what a source without manifest holds."""
    prove: int = 2
    """Rows of a source without manifest to recompute."""
    rows_per_file: int = 1000
    store_dtype: str = "auto"
    """auto: as in the source."""
    vocab: Path | None = None
    min_free_gib: float = 1.0
    ignore_space: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class VerifyConfig:
    """Hidden states against an independent reference."""

    data: Path
    """A folder, or an address of an object store."""
    model: str | None = None
    sample: int = 8
    """Rows to recompute; all of them when there are fewer."""
    seed: int = 0
    structure_only: bool = False
    threshold: float | None = None
    """Largest accepted relative error; by the data's dtype when not given."""
    prepared: Path | None = None
    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """Hidden states to an EAGLE-3 draft."""

    data: Path
    """A folder, or an address of an object store."""
    vocab: Path
    model: str
    output_dir: Path
    epochs: int = 3
    lr: float = 1e-4
    max_seq_len: int = DEFAULT_MAX_SEQ_LEN
    """Tokens per packed batch; rows are joined until it is full."""
    device: str = "auto"
    ttt_steps: int = 3
    """Draft tokens predicted in a chain during training."""
    ttt_step_loss_decay: float = 1.0
    num_layers: int = 1
    """Decoder layers of the draft."""
    val_share: float = 0.1
    """Share of the rows held out for validation, never trained on."""
    noise_std: float = 0.05
    """Standard deviation of the noise added to the auxiliary states while training."""
    seed: int = 0
    trust_remote_code: bool = False
    dtype: str = "auto"
    """To compute in; auto: float32, or bfloat16 on a GPU where the trainer keeps float32 weights (from 0.7 on)."""
    draft_dtype: str = "bfloat16"
    """Of the weights in the published draft."""
    max_steps: int = 0
    """End after so many optimizer steps; 0: after the last epoch."""
    scheduler: str = "linear"
    """How the learning rate falls after the warmup: linear, cosine or none."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises; None: a hundredth of all."""
    accumulate: int = 1
    """Packed batches of one step on each device; the loss is their mean."""
    save_steps: int = 0
    """Steps between two checkpoints; there is one at the end of each epoch in any case."""
    keep_checkpoints: int = 2
    val_steps: int = 0
    """Steps between two validations; 0: at the end of each epoch."""
    patience: int = 0
    """End after so many validations without a better one; 0: never."""
    workers: int | None = None
    """Processes that read rows ahead, for each device; None: up to 4 beside a GPU, none on a CPU."""
    fsdp: bool = False
    """Spread the draft over the devices, in place of a copy on each."""
    init_from: Path | None = None
    """An EAGLE-3 draft to begin with."""
    accept_differences: bool = False
    """Begin with it although it was trained on other layers."""
    tensorboard: bool = True
    """Write event files, where tensorboard is installed."""
    cache_dir: Path | None = None
    """Where rows of an object store are kept; None: in the user's cache folder."""
    cache_gib: float = 50.0
    """How much of them, in GiB."""


@dataclass(frozen=True)
class EvaluateConfig:
    """A draft to numbers that say how good it is."""

    draft: Path
    data: Path | None
    """Folder of hidden states; None: no teacher-forced part."""
    output_dir: Path
    model: str | None = None
    """The verifier; None: the one the draft names."""
    vllm: str | None = None
    """The release to check the draft for; None: the one installed."""
    steps: int | None = None
    """Draft tokens a step; None: what the draft proposes."""
    rows: str = "held-out"
    """Rows of ``data``: held-out, or all."""
    max_rows: int | None = None
    device: str = "auto"
    """Of the teacher-forced part."""
    serve: bool = True
    replay: bool = True
    """Teacher-force the server's own answers as well, with states from transformers."""
    untrained: bool = False
    """Evaluate the same draft with fresh weights, too."""
    prompts: Path | None = None
    max_prompts: int = 16
    max_tokens: int = 128
    """Of an answer."""
    max_num_seqs: int = 16
    """Answers that an engine works on at once."""
    dtype: str = "auto"
    tp_size: int = 1
    gpu_memory_utilization: float = 0.80
    enforce_eager: bool | None = None
    """None: on a CPU only."""
    force: bool = False
    """Go on although the draft does not fit."""
    layer_ids: tuple[int, ...] | None = None
    """Native ids to feed the draft instead of its own; only with ``force``."""
    trained_layer_ids: tuple[int, ...] | None = None
    trust_remote_code: bool = False
