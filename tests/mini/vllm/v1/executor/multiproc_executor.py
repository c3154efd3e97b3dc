import importlib
import os
from types import SimpleNamespace

from vllm import VERSION


class WorkerProc:
    """The reply of a worker as the parent gets it: a value, or the text of a failure."""

    def __init__(self):
        self.reply = None

    def enqueue_output(self, output):
        self.reply = ("failed", str(output)) if isinstance(output, Exception) else ("done", output)


class _Executor:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.stopped = False
        self.layout = None
        self._half_way = False
        self._worker = _worker(vllm_config)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, unique_reply_rank=None):
        reply = self._ask(lambda: getattr(self._worker, method)(*args))
        return reply if unique_reply_rank is not None and VERSION >= (0, 11, 1) else [reply]

    def execute_model(self, scheduler_output):
        assert not self._half_way, "sample_tokens has to follow execute_model"
        self._half_way = VERSION >= (0, 11, 1)
        # As FlexAttention has it, which the engine core tells before 0.18.
        assert VERSION >= (0, 18) or self._worker.blocks
        self._ask(lambda: self._worker.model_runner.execute_model(scheduler_output))

    def initialize_from_config(self, kv_cache_configs):
        if VERSION >= (0, 29):
            assert self.layout is not None
        if os.environ.get("MINI_FAILS"):
            raise AssertionError

    def shutdown(self):
        print("shut down")

    def get_supported_kv_cache_layouts(self):
        return ["HND"]

    def _ask(self, function):
        process = WorkerProc()
        try:
            process.enqueue_output(function())
        except Exception as error:
            process.enqueue_output(error)
        outcome, value = process.reply
        if outcome == "failed":
            raise RuntimeError(f"Worker failed with error {value!r}")
        return value


if VERSION < (0, 11, 1):
    MultiprocExecutor = _Executor
else:

    class MultiprocExecutor(_Executor):
        def sample_tokens(self, grammar_output):
            self._half_way = False

        if VERSION >= (0, 33):

            def set_kv_cache_layout(self, layout_name, cp_kv_cache_interleave_size):
                self.layout = layout_name

        elif VERSION >= (0, 29):

            def set_kv_cache_layout(self, layout_name):
                self.layout = layout_name


def _worker(vllm_config):
    from mini_model import RUNNERS, MiniWorker, TextModel

    module, _, name = vllm_config.parallel_config.worker_extension_cls.rpartition(".")
    extension = getattr(importlib.import_module(module), name)
    if os.environ.get("MINI_STRANGER"):  # a worker in which nothing was adapted

        class extension:
            def _setup_hidden_states_capture(self, layer_ids):
                pass

    class Worker(extension, MiniWorker):
        blocks = None

        def initialize_cache(self, num_gpu_blocks, num_cpu_blocks):
            self.blocks = num_gpu_blocks

        def get_kv_cache_spec(self):
            spec = SimpleNamespace(block_size=vllm_config.cache_config.block_size)
            return {f"layers.{i}": spec for i in range(6)}

    return Worker(RUNNERS[os.environ.get("MINI_RUNNER", "v1")](TextModel()))
