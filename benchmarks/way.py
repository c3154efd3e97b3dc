"""One way to hidden states, in this process: it starts, says READY, and then times a pass for each line it is sent.

Starting and loading are not counted; writing is, to the last durable row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES, Shape, prompts

READY, PASS = "READY", "PASS "
_STEP = 16384  # tokens
TP_VARIABLE, BESIDE_VARIABLE = "SPECSHIM_BENCH_TP", "SPECSHIM_BENCH_BESIDE"
TP_SIZE = int(os.environ.get(TP_VARIABLE, "1"))
BESIDE = int(os.environ.get(BESIDE_VARIABLE, "1"))
"""Ways that share the device, this one among them."""

Pass = Callable[[list[list[int]]], None]


def settings(shape: Shape, path: Path, eager: bool) -> dict[str, Any]:
    """vLLM as all of its ways are given it."""
    return {
        "model": str(path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": shape.length + 8,
        "dtype": shape.dtype,
        "max_num_batched_tokens": min(_STEP, shape.prompts * shape.length),
        "gpu_memory_utilization": _share(),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "enforce_eager": eager,
        "tensor_parallel_size": TP_SIZE,
        **_cache(shape),
    }


@contextmanager
def plain(shape: Shape, path: Path, folder: Path, eager: bool) -> Any:
    """vLLM's prefill, nothing taken: the limit."""
    llm = _llm(**settings(shape, path, eager))
    yield lambda rows: _prefill(llm, rows)


@contextmanager
def direct(shape: Shape, path: Path, folder: Path, sink: str, eager: bool | None = None) -> Any:
    """Ours, with a sink that drops the rows or the one of `specshim extract`."""
    from shims.direct.engine import DirectEngine, DirectOptions

    with_files = sink.startswith("pipeline")
    engine = DirectEngine(
        DirectOptions(
            model=str(path),
            native_ids=shape.layers,
            sink=sink,
            sink_settings=_row_sink(shape, folder) if with_files else {},
            max_model_len=shape.length + 8,
            dtype=shape.dtype,
            gpu_memory_utilization=_share(),
            enforce_eager=eager,
            tensor_parallel_size=TP_SIZE,
            max_num_batched_tokens=min(_STEP, shape.prompts * shape.length),
            more={"load_format": "dummy", **_cache(shape)},
        )
    )

    def measured(rows: list[list[int]]) -> None:
        done = [row for settled in engine.run((str(i), ids) for i, ids in enumerate(rows)) for row in settled.done]
        assert len(done) == len(rows), f"{len(done)} durable rows of {len(rows)}"

    yield measured
    engine.close()


@contextmanager
def native(shape: Shape, path: Path, folder: Path, eager: bool = False) -> Any:
    """vLLM's connector, files written, as its own documentation sets it up for offline use."""
    from pipeline.engines.native import takes_chunks
    from shims.versions import detect

    connector = {"shared_storage_path": str(folder), "use_synchronization_lock": False}
    llm = _llm(
        **settings(shape, path, eager),
        enable_chunked_prefill=takes_chunks(detect().vllm or ""),
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(shape.layers)}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": connector,
        },
    )

    def measured(rows: list[list[int]]) -> None:
        outputs = _prefill(llm, rows)
        files = [Path(output.kv_transfer_params["hidden_states_path"]) for output in outputs]
        width = shape.config["hidden_size"] * len(shape.layers) * (4 if shape.dtype == "float32" else 2)
        while any(not f.is_file() or f.stat().st_size < shape.length * width for f in files):
            time.sleep(0.01)
        for file in files:
            file.unlink()

    yield measured


@contextmanager
def stock(shape: Shape, path: Path, folder: Path, batch: int = 32) -> Any:
    """speculators' generator with the shims, nothing written."""
    import functools

    import shims

    with shims.overrides(dtype=shape.dtype):
        import speculators.data_generation.vllm_hidden_states_generator as module

        module.LoadConfig = functools.partial(module.LoadConfig, load_format="dummy")
        generator = module.VllmHiddenStatesGenerator(
            str(path),
            layer_ids=[i - 1 for i in shape.layers],
            max_model_len=shape.length + 8,
            gpu_memory_utilization=_share(),
            tensor_parallel_size=TP_SIZE,
        )

    def measured(rows: list[list[int]]) -> None:
        for start in range(0, len(rows), batch):
            generator.generate(rows[start : start + batch])

    yield measured
    generator.executor.shutdown()


@contextmanager
def transformers(shape: Shape, path: Path, folder: Path, batch: int = 8) -> Any:
    """The reference implementation, states copied to the host."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(getattr(torch, shape.dtype))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(path)), attn_implementation="sdpa")
    model.eval()
    kept: dict[int, Any] = {}

    def keep(native_id: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            kept[native_id] = (output[0] if isinstance(output, tuple) else output).to("cpu")

        return hook

    for native_id in shape.layers:
        model.model.layers[native_id - 1].register_forward_hook(keep(native_id))

    def measured(rows: list[list[int]]) -> None:
        with torch.no_grad():
            for start in range(0, len(rows), batch):
                model.model(torch.tensor(rows[start : start + batch], device=device), use_cache=False)

    yield measured


WAYS: dict[str, Callable[[Shape, Path, Path], AbstractContextManager[Pass]]] = {
    "plain-compiled": lambda s, p, f: plain(s, p, f, eager=False),
    "plain-eager": lambda s, p, f: plain(s, p, f, eager=True),
    "direct-drop": lambda s, p, f: direct(s, p, f, "benchmarks.way:Drop"),
    "direct-files": lambda s, p, f: direct(s, p, f, "pipeline.engines.row_sink:RowSink"),
    "direct-files-eager": lambda s, p, f: direct(s, p, f, "pipeline.engines.row_sink:RowSink", eager=True),
    "native-files": native,
    "stock": stock,
    "transformers": transformers,
}


class Drop:
    """A sink that forgets the rows: what capture alone costs."""

    def write(self, row_id: str, token_ids: Any, states: Any) -> None:
        """See `shims.direct.stream.Sink`."""


def _share() -> float:
    """Of the device's memory; a CPU's is shared with everybody."""
    import torch

    return 0.85 / BESIDE if torch.cuda.is_available() else 0.1


def _cache(shape: Shape) -> dict[str, int]:
    """How much to keep for keys and values, where vLLM cannot measure it: others come and go on the device."""
    return {"kv_cache_memory_bytes": shape.cache_gib << 30} if BESIDE > 1 else {}


def _llm(**keywords: Any) -> Any:
    from vllm import LLM

    return LLM(**keywords)


def _prefill(llm: Any, rows: list[list[int]]) -> Any:
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    return llm.generate([{"prompt_token_ids": row} for row in rows], greedy, use_tqdm=False)


def _row_sink(shape: Shape, folder: Path) -> dict[str, Any]:
    """Settings of the real sink, with the prepared rows that it reads the loss masks from."""
    from pipeline.engines.row_sink import RowSinkSettings

    (folder / "hidden_states").mkdir(exist_ok=True)
    data = folder / "tokenized_data.jsonl"
    lines = (
        json.dumps({"id": str(i), "input_ids": r, "loss_mask": [1] * len(r)}) for i, r in enumerate(prompts(shape))
    )
    data.write_text("\n".join(lines), encoding="utf-8")
    return RowSinkSettings(
        folder=str(folder),
        format="hs_safetensors",
        rows_per_file=1,
        prepared_data=str(data),
        row_limit=shape.length,
        dtype=shape.dtype,
        store_dtype=shape.dtype,
        last_state="residual",
        model=str(folder),
        trust_remote_code=False,
        header={},
    ).as_dict()


def main() -> None:
    """Serve one way: a line on standard input is a pass, and its seconds are a line of the output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=list(WAYS))
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("path", type=Path, help="the shape's folder")
    parser.add_argument("folder", type=Path, help="for the rows")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    rows = prompts(shape)
    options.folder.mkdir(parents=True, exist_ok=True)
    with WAYS[options.way](shape, options.path, options.folder) as measured:
        measured(rows[: max(8, len(rows) // 8)])  # caches, pinned memory, clocks
        print(READY, flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            measured(rows)
            print(f"{PASS}{time.perf_counter() - began}", flush=True)


if __name__ == "__main__":
    main()
