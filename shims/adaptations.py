"""DATA: what each release needs, one row per difference.

A row says which touchpoint differs, from when to when, what to do about it, why, where the change
can be read, and when the row may go. Which rows are in force is decided in `planning.py`; nothing else
in the package asks for a version.
"""

from __future__ import annotations

from dataclasses import dataclass

from shims.verbs import Compute, Drop, Fill, Moved, Provide, Replace, Substitute, Verb, Wrap
from shims.versions import Stack, within

_SOURCE = "https://github.com/vllm-project/vllm/blob"
_SPECULATORS = "https://github.com/vllm-project/speculators/blob"
_VLLM_PR = "https://github.com/vllm-project/vllm/pull"
_TRANSFORMERS = "https://github.com/huggingface/transformers"
_B = "shims.behaviours"


@dataclass(frozen=True)
class Adaptation:
    """One row.

    Args:
        name: unique, says the difference.
        touchpoint: key in `touchpoints.py`.
        verb: what is done.
        why: what goes wrong without it.
        link: where the upstream change, or the defect, can be read.
        until: when the row may be removed.
        vllm, speculators, transformers: PEP 440 ranges in which it holds; '' is every release.
        defect: True where the row mends a fault of speculators itself, on every vLLM.
        behavioural: True where no signature calls for the row: only what happens at run time does, and
            only live cases prove it.
    """

    name: str
    touchpoint: str
    verb: Verb
    why: str
    link: str
    until: str
    vllm: str = ""
    speculators: str = "<0.5"
    transformers: str = ""
    defect: bool = False
    behavioural: bool = False

    def holds_for(self, stack: Stack) -> bool:
        """Whether the versions of `stack` select this row."""
        return (
            within(stack.vllm, self.vllm)
            and within(stack.speculators, self.speculators)
            and within(stack.transformers, self.transformers)
        )

    @property
    def range(self) -> str:
        """The ranges as one line, for example `vllm >=0.17, speculators <0.5`."""
        parts = {"vllm": self.vllm, "speculators": self.speculators, "transformers": self.transformers}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value)

    def as_dict(self) -> dict[str, str]:
        return {
            "name": self.name,
            "touchpoint": self.touchpoint,
            "verb": self.verb.describe(),
            "range": self.range,
            "why": self.why,
            "link": self.link,
            "until": self.until,
        }


_ENDS_03 = "speculators 0.3 is no longer supported here"
_ENDS = "speculators 0.3 and 0.4 are no longer supported here"

_IMPORTS = (
    Adaptation(
        name="pydantic-finds-torch",
        touchpoint="configuration_utils.torch",
        verb=Provide(f"{_B}.imports:lazy_torch"),
        why="PreTrainedConfig has a field annotated 'torch.dtype', which pydantic resolves in a module that does not "
        "import torch at run time; `import speculators` ends in NameError",
        link=f"{_TRANSFORMERS}/issues/45070",
        until=_ENDS,
        transformers=">=5.4",
    ),
    Adaptation(
        name="attention-mask-module-gone",
        touchpoint="modeling_attn_mask_utils",
        verb=Provide(f"{_B}.imports:attention_mask_module"),
        why="speculators.models.eagle imports a mask helper from a module that transformers removed; "
        "`import speculators` ends in ModuleNotFoundError",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/models/eagle.py",
        until=_ENDS,
        transformers=">=5.24",
    ),
    Adaptation(
        name="hashing-module-missing",
        touchpoint="vllm.utils.hashing",
        verb=Provide(f"{_B}.imports:hashing_module"),
        why="get_hash_fn_by_name still lives in vllm.utils; speculators 0.4 imports it from vllm.utils.hashing",
        link=f"{_SOURCE}/v0.11.0/vllm/utils/__init__.py",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
        speculators=">=0.4,<0.5",
    ),
    Adaptation(
        name="generator-on-the-direct-engine",
        touchpoint="speculators' generator",
        verb=Provide(f"{_B}.imports:generator_module"),
        why="speculators 0.5 removed VllmHiddenStatesGenerator; code that uses it gets the same class on the direct "
        "engine",
        link=f"{_SPECULATORS}/v0.5.0/src/speculators/data_generation",
        until="speculators has a generator again, or nobody asks for it",
        speculators=">=0.5",
        behavioural=True,
    ),
    *(
        Adaptation(
            name=f"{name}-moved".lstrip("_").replace("_", "-"),
            touchpoint=name,
            verb=Moved(f"vllm.v1.core.kv_cache_planning:{name}"),
            why=f"{name} left kv_cache_utils; the import ends in ImportError",
            link=f"{_VLLM_PR}/53558",
            until=_ENDS,
            vllm=">=0.33",
        )
        for name in (
            "_get_kv_cache_groups_uniform_spec",
            "get_kv_cache_config_from_groups",
            "unify_hybrid_kv_cache_specs",
        )
    ),
)

_CONFIGS = (
    Adaptation(
        name="scheduler-config-wants-encoder-decoder",
        touchpoint="SchedulerConfig",
        verb=Fill("is_encoder_decoder", False),
        why="SchedulerConfig requires is_encoder_decoder; speculators 0.3 does not give it",
        link=f"{_VLLM_PR}/29859",
        until=_ENDS_03,
        vllm=">=0.12",
        speculators="<0.4",
    ),
    Adaptation(
        name="scheduler-config-unaware-of-encoder-decoder",
        touchpoint="SchedulerConfig",
        verb=Drop("is_encoder_decoder"),
        why="SchedulerConfig does not know is_encoder_decoder yet; speculators 0.4 gives it",
        link=f"{_SOURCE}/v0.11.0/vllm/config/scheduler.py",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
        speculators=">=0.4,<0.5",
    ),
    Adaptation(
        name="chunked-prefill-on",
        behavioural=True,
        touchpoint="SchedulerConfig",
        verb=Fill("enable_chunked_prefill", True),
        why="a hand-made SchedulerConfig leaves chunked prefill off: prompts past the token budget of a step wait "
        "and come back in another order, and a budget below the prompt length is refused",
        link=f"{_SOURCE}/v0.11.0/vllm/config/scheduler.py",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
    ),
    Adaptation(
        name="prefix-caching-off",
        behavioural=True,
        touchpoint="CacheConfig",
        verb=Fill("enable_prefix_caching", False),
        why="cached tokens never pass through the model, so their states would be missing; without a block hasher "
        "the cache also ends in an empty AssertionError in block_pool",
        link=f"{_SPECULATORS}/v0.3.0/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS_03,
        speculators="<0.4",
    ),
    Adaptation(
        name="block-size-chosen-by-vllm",
        behavioural=True,
        touchpoint="CacheConfig",
        verb=Drop("block_size"),
        why="speculators fixes 16 tokens a block; attention backends have sizes of their own (the CPU's warns of 16 "
        "and refuses it from vLLM 0.29 on, MLA kernels want 64); left out, vLLM asks the platform and the backend",
        link=f"{_SOURCE}/v0.29.0/vllm/platforms/interface.py",
        until=_ENDS,
    ),
)

_KV_CACHE = (
    Adaptation(
        name="kv-cache-layout-resolved",
        touchpoint="MultiprocExecutor.collective_rpc",
        verb=Wrap(f"{_B}.kv_cache:publish_layout_after_specs"),
        why="the engine core resolves one KV-cache layout and publishes it to the workers before any KV planning; "
        "a hand-built engine never does",
        link=f"{_VLLM_PR}/51718",
        until=_ENDS,
        vllm=">=0.29,<0.33",
    ),
    Adaptation(
        name="kv-cache-layout-resolved-with-interleave",
        touchpoint="MultiprocExecutor.collective_rpc",
        verb=Wrap(f"{_B}.kv_cache:publish_layout_and_interleave_after_specs"),
        why="as kv-cache-layout-resolved; workers also want the context-parallel interleave size",
        link=f"{_SOURCE}/v0.33.0/vllm/v1/engine/core.py",
        until=_ENDS,
        vllm=">=0.33",
    ),
    Adaptation(
        name="kv-cache-specs-dropped",
        touchpoint="get_kv_cache_config_from_groups",
        verb=Drop("kv_cache_specs"),
        why="get_kv_cache_config_from_groups reads the specs from the groups now",
        link=f"{_SOURCE}/v0.12.0/vllm/v1/core/kv_cache_utils.py",
        until=_ENDS_03,
        vllm=">=0.12",
        speculators="<0.4",
    ),
    Adaptation(
        name="kv-cache-specs-wanted",
        touchpoint="get_kv_cache_config_from_groups",
        verb=Compute("kv_cache_specs", f"{_B}.kv_cache:specs_of_groups"),
        why="get_kv_cache_config_from_groups still requires the spec of each layer",
        link=f"{_SOURCE}/v0.11.2/vllm/v1/core/kv_cache_utils.py",
        until="vLLM 0.11 is no longer supported here",
        vllm="<0.12",
        speculators=">=0.4,<0.5",
    ),
    Adaptation(
        name="memory-query-on-cpu",
        touchpoint="torch.cuda.mem_get_info",
        verb=Substitute(f"{_B}.memory:torch_facade"),
        why="without a GPU the query raises; the KV cache is then sized from free RAM",
        link=f"{_SPECULATORS}/v0.3.0/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS_03,
        speculators="<0.4",
        defect=True,
    ),
    Adaptation(
        name="memory-query-answers-zero-on-cpu",
        touchpoint="mem_get_info",
        verb=Wrap(f"{_B}.memory:free_and_total"),
        why="without an accelerator the query answers (0, 0) and no KV cache fits",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/utils/util.py",
        until=_ENDS,
        speculators=">=0.4,<0.5",
        defect=True,
    ),
)

_SCHEDULING = (
    Adaptation(
        name="scheduler-wants-block-size",
        touchpoint="Scheduler",
        verb=Compute("block_size", f"{_B}.kv_cache:block_size_of_call"),
        why="Scheduler requires the block size of the KV cache; speculators 0.3 gives none",
        link=f"{_SOURCE}/v0.11.1/vllm/v1/core/sched/scheduler.py",
        until=_ENDS_03,
        vllm=">=0.11.1",
        speculators="<0.4",
    ),
    Adaptation(
        name="scheduler-block-size-of-the-cache",
        touchpoint="Scheduler",
        verb=Compute("block_size", f"{_B}.kv_cache:block_size_of_call"),
        why="speculators 0.4 gives the scheduler a fixed block size of 16; the KV cache may have another, which "
        "attention backends (MLA, the CPU's) choose",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS,
        vllm=">=0.11.1",
        speculators=">=0.4,<0.5",
        behavioural=True,
    ),
    Adaptation(
        name="scheduler-unaware-of-block-size",
        touchpoint="Scheduler",
        verb=Drop("block_size"),
        why="Scheduler does not know block_size yet",
        link=f"{_SOURCE}/v0.11.0/vllm/v1/core/sched/scheduler.py",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
        speculators=">=0.4,<0.5",
    ),
    Adaptation(
        name="request-without-eos",
        touchpoint="Request",
        verb=Drop("eos_token_id"),
        why="Request lost eos_token_id (it comes with the sampling parameters)",
        link=f"{_SOURCE}/v0.17.0/vllm/v1/request.py",
        until=_ENDS,
        vllm=">=0.17",
    ),
    Adaptation(
        name="one-step-execute-model",
        touchpoint="MultiprocExecutor.sample_tokens",
        verb=Provide(f"{_B}.executor:no_second_half"),
        why="execute_model still does the whole step; there is no sample_tokens to call after it",
        link=f"{_VLLM_PR}/26866",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
    ),
    Adaptation(
        name="rpc-replies-with-a-list",
        touchpoint="MultiprocExecutor.collective_rpc",
        verb=Wrap(f"{_B}.executor:single_reply"),
        why="collective_rpc(unique_reply_rank=) answers with a list of one; later releases with the value itself",
        link=f"{_SOURCE}/v0.11.0/vllm/v1/executor/multiproc_executor.py",
        until="vLLM 0.11.0 is no longer supported here",
        vllm="<0.11.1",
    ),
)

_GENERATOR = (
    *(
        Adaptation(
            name=f"remote-code-as-asked-{what}",
            touchpoint=name,
            verb=Substitute(f"{_B}.overrides:pretrained"),
            why=f"the {what} is loaded with a fixed answer on remote code (yes for the configuration, no for the "
            "tokenizer); with `overrides(trust_remote_code=…)` the caller's answer counts in every place",
            link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py",
            until=_ENDS,
            defect=True,
        )
        for what, name in (("configuration", "transformers.AutoConfig"), ("tokenizer", "transformers.AutoTokenizer"))
    ),
    Adaptation(
        name="workers-told-of-their-blocks",
        touchpoint="VllmHiddenStatesGenerator.__init__",
        verb=Wrap(f"{_B}.generator:tell_blocks"),
        why="the engine core tells the workers how many blocks the KV cache has, and the generator has none; "
        "FlexAttention, which serves float32 on a GPU in 0.11.0, asserts that it knows",
        link=f"{_SOURCE}/v0.16.0/vllm/v1/engine/core.py",
        until="vLLM 0.17 is no longer supported here (0.18 tells them in initialize_from_config)",
        vllm="<0.18",
    ),
    Adaptation(
        name="loud-construction",
        touchpoint="VllmHiddenStatesGenerator.__init__",
        verb=Wrap(f"{_B}.generator:construct"),
        why="a failure while the engine is built leaves workers running and may carry an empty message",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="workers-end-before-the-interpreter",
        touchpoint="VllmHiddenStatesGenerator.__del__",
        verb=Replace(f"{_B}.generator:collected"),
        why="when the interpreter ends, shutting an executor down fails for want of modules, and so does the message "
        "that this failed: a good run ends with a traceback from vLLM 0.30 on",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="capture-confirmed-by-workers",
        touchpoint="VllmHiddenStatesGenerator._setup_capture",
        verb=Replace(f"{_B}.generator:setup_capture"),
        why="a worker that runs without the shims would capture rows in an order nobody checks; each worker has to "
        "confirm the capture",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/custom_worker.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="requests-followed-by-id",
        touchpoint="VllmHiddenStatesGenerator.generate",
        verb=Replace(f"{_B}.generator:generate"),
        why="0.3 aborts split prompts and slices rows by position in the list; 0.4 sorts request ids as text and "
        "never admits more than 32 requests: states of other prompts, without an error",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/vllm_hidden_states_generator.py",
        until=_ENDS,
        defect=True,
    ),
)

_WORKER = (
    Adaptation(
        name="capture-by-hooks",
        touchpoint="HiddenStatesWorkerExtension._setup_hidden_states_capture",
        verb=Replace(f"{_B}.capture:setup_hidden_states_capture"),
        why="the replaced model forward loses what an architecture adds (embedding scale, extra inputs, renamed "
        "embeddings) and takes the batch order from an attribute that model runner V2 does not have",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/custom_worker.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="capture-reset-by-id",
        touchpoint="HiddenStatesWorkerExtension._reset_capture",
        verb=Replace(f"{_B}.capture:reset_capture"),
        why="rows left by a call that failed must not reach the next one",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/custom_worker.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="states-proved-by-content",
        touchpoint="HiddenStatesWorkerExtension._get_captured_states",
        verb=Replace(f"{_B}.capture:get_captured_states"),
        why="rows are handed out by request id, after their token ids and positions were compared with the request",
        link=f"{_SPECULATORS}/v0.4.0.1/src/speculators/data_generation/custom_worker.py",
        until=_ENDS,
        defect=True,
    ),
    Adaptation(
        name="worker-failures-carry-their-traceback",
        touchpoint="WorkerProc.enqueue_output",
        verb=Wrap(f"{_B}.executor:explain_failure"),
        why="vLLM sends str(exception) to the parent: a bare AssertionError arrives as an empty message",
        link=f"{_SOURCE}/v0.16.0/vllm/v1/executor/multiproc_executor.py",
        until=_ENDS,
        defect=True,
    ),
)

ADAPTATIONS: tuple[Adaptation, ...] = (*_IMPORTS, *_CONFIGS, *_KV_CACHE, *_SCHEDULING, *_GENERATOR, *_WORKER)
