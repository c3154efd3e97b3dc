"""Run the live cases in this environment and write the outcomes as data.

    python -m contract_tests.live.run --out FILE [--engine direct] [--models llama,marker,…]
                                      [--without-shims | --without-row NAME]

One generator is built per model and setting; each is closed before the next. Exit code 1 if a case
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract_tests import without_row
from contract_tests.live import cases
from contract_tests.live.cases import LAYER_IDS, Bench
from contract_tests.live.engines import ENGINES, Wish
from contract_tests.live.models import make
from contract_tests.live.reference import Reference
from shims.versions import detect, within

# Relative error that rounding alone explains on random weights, by device and dtype; a state of another
# row is off by 1.4.
TOLERANCE = {
    ("cpu", "float32"): cases.TOLERANCE,
    ("gpu", "float32"): 1e-4,
    ("gpu", "float16"): 3e-2,
    ("gpu", "bfloat16"): 0.2,
}
# Rounding, of a GPU's float32 too, also turns the choice of an expert now and then: such a prompt may be off by this,
# while most of its tokens stay within the above.
TOLERANCE_ROUTED = 0.4


@dataclass(frozen=True)
class Setting:
    """A generator to build and the cases to run on it."""

    model: str
    name: str
    cases: tuple[Callable[[Bench], None], ...]
    layer_ids: tuple[int, ...] = tuple(LAYER_IDS)
    overrides: dict[str, int] = field(default_factory=dict)
    blocks_of_llm: int | None = None
    cpu_environment: dict[str, str] = field(default_factory=dict)
    routed: bool = False
    latent: bool = False
    """Latent attention, whose kernels on a GPU take half precision only."""
    engines: tuple[str, ...] = tuple(ENGINES)
    vllm: str = ""  # releases that have the model

    def applies(self, engine: str) -> bool:
        """Whether this engine, on the vLLM installed here, can be asked for it."""
        starved = engine == "native" and bool(self.overrides)  # has no such settings
        return engine in self.engines and not starved and within(detect().vllm, self.vllm)

    @property
    def environment(self) -> dict[str, str]:
        return {} if on_gpu() else self.cpu_environment

    def overrides_for(self, engine: str) -> dict[str, int]:
        if self.blocks_of_llm is None or engine == "stock":
            return self.overrides
        return {**self.overrides, "num_gpu_blocks_override": self.blocks_of_llm}

    def dtype(self, wanted: str) -> str:
        """What to run in where ``wanted`` is asked for."""
        return "bfloat16" if self.latent and on_gpu() and wanted == "float32" else wanted

    def rounding(self, dtype: str) -> float:
        """What most tokens may be off by."""
        return TOLERANCE["gpu" if on_gpu() else "cpu", dtype]

    def tolerance(self, dtype: str) -> float:
        """What a prompt may be off by."""
        return TOLERANCE_ROUTED if self.routed and (on_gpu() or dtype != "float32") else self.rounding(dtype)

    def name_of(self, case: Callable[[Bench], None]) -> str:
        return f"{case.__name__}_{self.name}" if self.name and case is cases.identity else case.__name__


_BASIC = (cases.identity, cases.last_layer, cases.content)
# The stock generator asks transformers for the wrapper's configuration, which only remote code has.
_WRAPPER: dict[str, Any] = {"engines": ("direct",), "vllm": ">=0.17"}
SETTINGS = (
    Setting("llama", "", (*_BASIC, cases.identity_large, cases.row_count)),
    Setting(
        "llama",
        "chunked",
        (cases.identity, cases.row_count_starved),
        # 12 blocks of 32 tokens can be used (one is never given out): less than the batch, more than 300.
        overrides={"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 13},
        # vLLM's own start asks for room for one whole context.
        blocks_of_llm=17,
    ),
    Setting("marker", "", (cases.layer_identity,), layer_ids=(7, 2, 0, 2, 5)),
    Setting("qwen3", "", _BASIC),
    Setting("mixture", "", _BASIC, routed=True),
    # Its class gives vLLM's connector no states.
    Setting("gemma", "", (cases.identity, cases.content), engines=("stock", "direct")),
    # The CPU's latent-attention kernels do not take float32; its decoder layers are the same without them.
    Setting("deepseek", "", _BASIC, cpu_environment={"VLLM_MLA_DISABLE": "1"}, routed=True, latent=True),
    Setting("kimi", "", _BASIC, cpu_environment={"VLLM_MLA_DISABLE": "1"}, routed=True, latent=True, **_WRAPPER),
    Setting("kimi-int4", "", _BASIC, routed=True, latent=True, **_WRAPPER),
    Setting("dense-8b", "", (cases.identity, cases.content), layer_ids=(1, 17, 32, 35)),
)


def on_gpu() -> bool:
    """Whether there is a device for vLLM to run on, other than the CPU."""
    import torch

    return bool(torch.accelerator.is_available())


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes")
    small = dict.fromkeys(s.model for s in SETTINGS if s.model not in ("dense-8b", "kimi-int4"))
    parser.add_argument("--models", default=",".join(small), help="default: the tiny ones")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=sorted({dtype for _, dtype in TOLERANCE}),
        help="of the weights and the engine; latent attention on a GPU runs in bfloat16 in place of float32",
    )
    parser.add_argument("--engine", default="stock", choices=list(ENGINES))
    parser.add_argument("--tp-size", type=int, default=1, help="devices to split the model over")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.25, help="share of the device for vLLM")
    parser.add_argument("--without-shims", action="store_true", help="the stock generator alone: to see it fail")
    parser.add_argument("--without-row", help="an adaptation to leave out, here and in the workers")
    options = parser.parse_args(argv)
    if options.without_shims:
        os.environ["SHIMS_DISABLE"] = "1"  # inherited by the workers
    if options.without_row:
        os.environ.update(without_row.environment(options.without_row, os.environ))
        without_row.arm()
    import shims

    wanted = options.models.split(",")
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="specshim-live-") as folder:
        for setting in SETTINGS:
            if setting.model in wanted and setting.applies(options.engine):
                outcomes += _run(setting, Path(folder), options)
                # After each model: a run that is cut keeps what it has.
                if options.out:
                    stack = shims.report().as_dict()["stack"]
                    options.out.write_text(json.dumps({"stack": stack, "cases": outcomes}, indent=1), encoding="utf-8")
    failed = [o for o in outcomes if o["outcome"] == "fail"]
    # In a form that test runners and people both read.
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _run(setting: Setting, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = setting.dtype(options.dtype)
    began = time.monotonic()
    try:
        path = make(setting.model, folder)
        reference = Reference(path / "reference" if (path / "reference").is_dir() else path, dtype)
    except ImportError as error:
        return [_outcome(setting, options, case, "skip", 0.0, f"transformers: {error}") for case in setting.cases]
    try:
        os.environ.update(setting.environment)
        if options.without_shims and not on_gpu():
            _cpu_aids()
        share = options.gpu_memory_utilization if on_gpu() else 0.1
        with ENGINES[options.engine](
            Wish(path, setting.layer_ids, dtype, setting.overrides_for(options.engine), share, options.tp_size)
        ) as generate:
            bench = Bench(
                generate, reference, list(setting.layer_ids), setting.tolerance(dtype), setting.rounding(dtype)
            )
            outcomes = [_judge(setting, options, case, bench) for case in setting.cases]
    except Exception as error:  # noqa: BLE001 - whatever fails here is a result
        reason = f"{type(error).__name__}: {error}"
        outcomes = [_outcome(setting, options, case, "fail", 0.0, reason) for case in setting.cases]
    finally:
        for name in setting.environment:
            os.environ.pop(name, None)
    for outcome in outcomes:
        print(f"{setting.model:9} {outcome['case']:28} {outcome['outcome']}  {outcome['reason'][:600]}", flush=True)
    print(f"{setting.model:9} took {time.monotonic() - began:.0f} s", flush=True)
    return outcomes


def _judge(
    setting: Setting, options: argparse.Namespace, case: Callable[[Bench], None], bench: Bench
) -> dict[str, Any]:
    bench.worst, bench.token_errors = 0.0, []
    outcome, reason = "pass", ""
    try:
        case(bench)
    except Exception as error:  # noqa: BLE001 - whatever fails here is a result
        outcome, reason = "fail", f"{type(error).__name__}: {error}"
    judged = _outcome(setting, options, case, outcome, bench.worst, reason)
    if bench.token_errors:
        judged["median_token_err"] = float(f"{statistics.median(bench.token_errors):.2e}")
    return judged


def _outcome(
    setting: Setting,
    options: argparse.Namespace,
    case: Callable[[Bench], None],
    outcome: str,
    worst: float,
    reason: str,
) -> dict[str, Any]:
    import shims

    report = shims.report()
    return {
        # The other engines do not go through speculators.
        "speculators": report.plan.stack.speculators if options.engine == "stock" else None,
        "engine": options.engine,
        "device": "gpu" if on_gpu() else "cpu",
        "tp_size": options.tp_size,
        "runner": next((worker["runner"] for worker in report.workers), None),
        "model": setting.model,
        "dtype": setting.dtype(options.dtype),
        "case": setting.name_of(case),
        "outcome": outcome,
        "max_rel_err": float(f"{worst:.2e}") if worst != float("inf") else None,
        "reason": reason,
    }


def _cpu_aids() -> None:
    """What the bare generator needs to get anywhere on a CPU, and float32: the faults left are its own."""
    import psutil
    import torch

    def memory(*_: Any) -> tuple[int, int]:
        return psutil.virtual_memory().available, psutil.virtual_memory().total

    torch.cuda.mem_get_info = memory
    torch.cuda.empty_cache = lambda: None
    import speculators.data_generation.vllm_hidden_states_generator as module

    stock = module.ModelConfig
    module.mem_get_info = memory
    module.ModelConfig = lambda **kwargs: stock(**{**kwargs, "dtype": "float32"})


if __name__ == "__main__":
    sys.exit(main())
