"""The figures of docs/scale.md, between its two marks; the words around them are written by hand.

Speeds come from benchmarks/results/, sizes from the model's configuration, times from `pipeline.scale.simulation`; what
is neither measured nor given is named as assumed, in the table itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contract_tests.marked import between_marks
from pipeline import disk
from pipeline.duration import words
from pipeline.scale.__main__ import limit_of
from pipeline.scale.plan import Model, Prices, gpu_cost, month_cost, objects
from pipeline.scale.simulation import Outcome, Setup, simulate

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
LOCAL = ROOT / "benchmarks" / "results" / "scale"

KIMI = Model("Kimi-K2.5", states=4, hidden_size=7168, active_parameters=32e9, weight_bytes=600e9, gpus=8)
PRICES = Prices()
ROW_TOKENS, ROWS_PER_FILE = 2048, 1000
STEP_TOKENS = 16384
"""Tokens of one step: what is computed and not durable when a replica dies."""
SPLIT_SHARE = 0.7
"""Of one GPU's speed, when layers are split over eight and weights are INT4."""
STORAGE = 5e9
FASTER_STORAGE = 40e9
BESIDE_WEIGHTS = 180.0
"""Seconds of a start beside reading the weights: processes, compiling, warm-up."""
MTBF = 10 * 86400.0
# A draft of one such layer and an output of 32,000 tokens: attention on two states, a dense MLP, the output.
DRAFT_PARAMETERS = 2 * 7168 * 3 * 7168 + 7168 * 7168 + 3 * 7168 * 18432 + 32000 * 7168
DRAFT_STEPS = 3
TRAINING_SHARE = 0.3


def render() -> str:
    """The page with fresh figures."""
    return between_marks(PAGE, _figures())


def measured_flops(shape: str = "latent-moe") -> float:
    """Operations per second that the direct engine reached on one GPU, files written: the newest run of a shape."""
    from benchmarks.models import SHAPES
    from contract_tests.performance_page import measurements

    rows = (row for run in measurements() for row in run["rows"] if row.get("tp_size", 1) == 1)
    speed = next(row["tok_s"] for row in rows if row["model"] == shape and row["way"] == "direct-files")
    return 2 * _active(SHAPES[shape].config) * float(speed)


def _active(config: dict[str, Any]) -> int:
    """Parameters that work on each token of a prefill: the layers, without embedding and output."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        size = config["head_dim"]
        attention = hidden * size * (2 * heads + 2 * config["num_key_value_heads"])
        return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))
    rank, rope, nope, value = (
        config[k] for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    attention = hidden * heads * (nope + rope) + hidden * (rank + rope)
    attention += rank * heads * (nope + value) + heads * value * hidden
    experts = config["num_experts_per_tok"] + config["n_shared_experts"]
    mixed = 3 * hidden * config["moe_intermediate_size"] * experts
    dense = config["first_k_dense_replace"]
    layers = config["num_hidden_layers"]
    return int(layers * attention + (layers - dense) * mixed + dense * 3 * hidden * config["intermediate_size"])


def _setup(tokens: float, replicas: int, dtype: str = "bfloat16", storage: float = STORAGE, **more: Any) -> Setup:
    return Setup(
        **{
            "tokens": tokens,
            "replicas": replicas,
            "tokens_per_s": KIMI.tokens_per_s(measured_flops(), SPLIT_SHARE),
            "bytes_per_token": KIMI.bytes_per_token(dtype),
            "storage_bytes_per_s": storage,
            "chunk_tokens": ROW_TOKENS * ROWS_PER_FILE if tokens > 1e8 else ROW_TOKENS * 16,
            # All read the weights at once.
            "start_s": BESIDE_WEIGHTS + replicas * KIMI.weight_bytes / storage,
            "restart_s": BESIDE_WEIGHTS + KIMI.weight_bytes / storage,
            "mtbf_s": MTBF,
            "lost_tokens": STEP_TOKENS,
        }
        | more
    )


def _figures() -> list[str]:
    return [*_parameters(), "", *_table(1e6), "", *_table(1e9), "", *_effects(), "", *_local()]


def _parameters() -> list[str]:
    flops, speed = measured_flops(), KIMI.tokens_per_s(measured_flops(), SPLIT_SHARE)
    size = KIMI.bytes_per_token("bfloat16")
    return [
        "### What goes in",
        "",
        "| | | from |",
        "|---|---|---|",
        f"| states | 4 x 7,168 x 2 bytes and 16 of ids and mask: {size:,.0f} bytes a token; "
        f"float8 {KIMI.bytes_per_token('float8_e4m3'):,.0f} | the formats |",
        f"| one GPU | {flops / 1e12:.0f} teraflop/s with the files written | measured: latent-moe in performance.md |",
        f"| of it, when split over 8 and in INT4 | {SPLIT_SHARE:.0%} | assumed |",
        f"| one replica (8 GPUs, tensor parallel) | {speed:,.0f} tokens/s, which is {speed * size / 1e9:.2f} GB/s or "
        f"{speed * size * 8 / 1e9:.0f} Gbit/s out of its machine | 2 operations for each of 32 billion active "
        "parameters |",
        f"| a start | {BESIDE_WEIGHTS:.0f} s, and 600 GB of weights from the shared storage | assumed |",
        f"| shared storage | {STORAGE / 1e9:.0f} GB/s for all machines together | assumed |",
        f"| a replica dies | every {MTBF / 86400:.0f} days, and loses one step of {STEP_TOKENS:,} tokens | assumed; "
        "the loss is the engine's |",
        f"| rows | {ROW_TOKENS:,} tokens, {ROWS_PER_FILE:,} a file in `--format sharded` | given |",
        f"| prices | ${PRICES.gpu_hour:.2f} a GPU-hour, ${PRICES.storage_gb_month:.2f} a GB-month | assumed |",
    ]


def _table(tokens: float) -> list[str]:
    size = tokens * KIMI.bytes_per_token("bfloat16")
    lines = [
        f"### {_power(tokens)} tokens",
        "",
        f"{disk.human(size)} of states, ${month_cost(size, PRICES):,.0f} a month to keep. Files: "
        f"{objects(tokens, ROW_TOKENS, 1):,} of one row each, or {objects(tokens, ROW_TOKENS, ROWS_PER_FILE):,} of "
        f"`--format sharded`.",
        "",
        "| replicas | GPUs | time | first rows after | to storage | cost of GPUs | failures | what limits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for replicas in (1, 2, 4, 8, 16):
        setup = _setup(tokens, replicas)
        outcome = simulate(setup)
        lines.append(
            f"| {replicas} | {replicas * KIMI.gpus} | {words(outcome.seconds)} | {words(setup.start_s)} | "
            f"{size / outcome.computing_s / 1e9:.1f} GB/s | "
            f"${gpu_cost(outcome.seconds, replicas * KIMI.gpus, PRICES):,.0f} | {outcome.failures} | "
            f"{limit_of(outcome)} |"
        )
    return lines


def _effects() -> list[str]:
    trainer = KIMI.gpus * measured_flops() * TRAINING_SHARE / (6 * DRAFT_PARAMETERS * DRAFT_STEPS)
    along: dict[str, Any] = {"trainer_tokens_per_s": trainer}
    fast = FASTER_STORAGE
    rows: list[tuple[str, Outcome]] = [
        ("as above", simulate(_setup(1e9, 8))),
        ("states in float8", simulate(_setup(1e9, 8, "float8_e4m3"))),
        (f"storage of {FASTER_STORAGE / 1e9:.0f} GB/s", simulate(_setup(1e9, 8, storage=fast))),
        ("both", simulate(_setup(1e9, 8, "float8_e4m3", fast))),
        ("a replica dies every hour", simulate(_setup(1e9, 8, mtbf_s=3600.0))),
        ("a trainer reads along", simulate(_setup(1e9, 8, **along))),
        (
            "a trainer reads along, float8, fast storage",
            simulate(_setup(1e9, 8, "float8_e4m3", fast, **along)),
        ),
    ]
    lines = [
        "### What changes it: 10^9 tokens on 8 replicas",
        "",
        f"The trainer has 8 GPUs of its own and reads {trainer:,.0f} tokens/s where storage lets it: 6 operations for "
        f"each of {DRAFT_PARAMETERS / 1e9:.2f} billion parameters of the draft and each of {DRAFT_STEPS} steps, at "
        f"{TRAINING_SHARE:.0%} of the speed above (assumed).",
        "",
        "| | extracted after | failures | storage is the limit for | trained on once after | on disk at most, if read "
        "rows go |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcome in rows:
        dtype = "float8_e4m3" if "float8" in name or name == "both" else "bfloat16"
        storage = FASTER_STORAGE if "fast" in name or "GB/s" in name or name == "both" else STORAGE
        bound = outcome.storage_bound_s / outcome.seconds
        # Without a trainer along the way it begins when all is there.
        reading = min(trainer, storage / KIMI.bytes_per_token(dtype))
        trained = outcome.trained_s or outcome.seconds + 1e9 / reading
        peak = outcome.peak_unread_tokens if outcome.trained_s else 1e9
        lines.append(
            f"| {name} | {words(outcome.seconds)} | {outcome.failures} | {bound:.0%} of it | "
            f"{words(trained)} | {disk.human(peak * KIMI.bytes_per_token(dtype))} |"
        )
    return lines


def _local() -> list[str]:
    lines = [
        "### The simulation against the clock",
        "",
        "`nox -s live-scale`: real vLLM on two CPU cores, a tiny model, two replicas. What a replica does a second is "
        "taken from the undisturbed run, the time of a restart and the moments of the deaths from the other one; the "
        "simulation then says how long each should have taken.",
        "",
        "| date, cores | run | simulated | measured | off |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(LOCAL.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        lines += [
            f"| {record['date']}, {record['cores']} | {run['run']} ({run['rows']:,} rows, {run['tokens']:,} tokens) | "
            f"{run['simulated_s']} s | {run['measured_s']} s | {run['simulated_s'] / run['measured_s'] - 1:+.0%} |"
            for run in record["runs"]
        ]
    return lines


def _power(tokens: float) -> str:
    return f"10^{len(str(int(tokens))) - 1}"
