"""DATA: what speculators 0.5 and later, and its hs-connectors, use of vLLM.

These releases have no generator: they ask a running vLLM server for hidden states, and hs-connectors is
loaded into that server. Nothing here is adapted; it is judged, so that an upgrade gate covers today's
users too. The kinds are those of `shims.touchpoints`, and three more:

    override    a method of a vLLM class that the consumer defines anew; vLLM calls the consumer's, so
                what vLLM's own takes has to fit what the consumer's takes (`CALLED_BY_VLLM`)
    subclass    a class that the consumer derives from: every abstract method has to be among `DEFINED`
    choice      a value that has to be among those of a `Literal`: `home` is the Literal, the key ends in it
"""

from __future__ import annotations

from shims.contract import Call, Parameter, Signature
from shims.touchpoints import Touchpoint

_CLIENT = "data_generation/vllm_client.py"
_TRANSFER = "hs_connectors/transfer.py"
_FP8 = "hs_connectors/fp8_hidden_states_connector.py"
_MOONCAKE = "hs_connectors/mooncake_hidden_states_connector.py"

_KV = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = f"{_KV}.base:KVConnectorBase_V1"
_EXAMPLE = f"{_KV}.example_hidden_states_connector"
_COMPLETION = "vllm.entrypoints.openai.completion.protocol"
_CHAT = "vllm.entrypoints.openai.chat_completion.protocol"

# `extract_hidden_states` came with 0.17; what hs-connectors 0.9 derives from took its present shape in 0.22.
_EXTRACT = ">=0.17"
_CONNECTORS = ">=0.22"


def _one(
    key: str,
    home: str,
    kind: str,
    used_in: str,
    vllm: str = _EXTRACT,
    speculators: str = ">=0.5",
    call: Call | None = None,
) -> Touchpoint:
    return Touchpoint(key, home, kind, used_in, "use", (("", call),) if call else (), speculators, vllm)


def _connector(key: str, home: str, kind: str, used_in: str = _MOONCAKE, call: Call | None = None) -> Touchpoint:
    return _one(key, home, kind, used_in, _CONNECTORS, ">=0.9", call)


_SERVER = (
    # What a request may hold, and what the answer has to hold.
    *(
        _one(f"CompletionRequest.{name}", f"{_COMPLETION}:CompletionRequest.{name}", "field", _CLIENT)
        for name in ("model", "prompt", "max_tokens", "return_token_ids")
    ),
    _one(
        "CompletionResponseChoice.prompt_token_ids",
        f"{_COMPLETION}:CompletionResponseChoice.prompt_token_ids",
        "field",
        _CLIENT,
    ),
    _one(
        "CompletionResponse.kv_transfer_params",
        f"{_COMPLETION}:CompletionResponse.kv_transfer_params",
        "field",
        _CLIENT,
    ),
    *(
        _one(
            f"ChatCompletionRequest.{name}",
            f"{_CHAT}:ChatCompletionRequest.{name}",
            "field",
            _CLIENT,
            speculators=">=0.6",
        )
        for name in ("messages", "max_tokens", "add_generation_prompt", "continue_final_message", "return_token_ids")
    ),
    *(
        _one(
            f"ChatCompletionResponse.{name}",
            f"{_CHAT}:ChatCompletionResponse.{name}",
            "field",
            _CLIENT,
            speculators=">=0.6",
        )
        for name in ("prompt_token_ids", "kv_transfer_params")
    ),
    # How the server is started: --speculative-config and --kv-transfer-config are these constructors' keywords.
    _one("method=extract_hidden_states", "vllm.config.speculative:SpeculativeMethod", "choice", _TRANSFER),
    _one(
        "SpeculativeConfig",
        "vllm.config.speculative:SpeculativeConfig",
        "call",
        _TRANSFER,
        call=Call(0, ("method", "num_speculative_tokens", "draft_model_config")),
    ),
    _one(
        "KVTransferConfig",
        "vllm.config.kv_transfer:KVTransferConfig",
        "call",
        _TRANSFER,
        call=Call(0, ("kv_connector", "kv_role", "kv_connector_extra_config")),
    ),
    _one(
        "KVTransferConfig with module path",
        "vllm.config.kv_transfer:KVTransferConfig",
        "call",
        _TRANSFER,
        vllm=_CONNECTORS,
        speculators=">=0.9",
        call=Call(0, ("kv_connector", "kv_role", "kv_connector_module_path", "kv_connector_extra_config")),
    ),
    _one("kv_connector=ExampleHiddenStatesConnector", f"{_EXAMPLE}:ExampleHiddenStatesConnector", "name", _TRANSFER),
)

_HS_CONNECTORS = (
    _connector("ExampleHiddenStatesConnector._write_tensors", f"{_EXAMPLE}:ExampleHiddenStatesConnector._write_tensors",
               "override", _FP8),
    _connector("ExampleHiddenStatesConnector", f"{_EXAMPLE}:ExampleHiddenStatesConnector", "name"),
    _connector("ExampleHiddenStatesConnector.get_required_kvcache_layout",
               f"{_EXAMPLE}:ExampleHiddenStatesConnector.get_required_kvcache_layout", "call", call=Call(1)),
    _connector("extract_from_kv_cache", f"{_EXAMPLE}:extract_from_kv_cache", "call", call=Call(3)),
    _connector("hs VllmConfig", "vllm.config:VllmConfig", "name"),
    _connector("get_layers_from_vllm_config", "vllm.config:get_layers_from_vllm_config", "call", call=Call(3)),
    _connector("KVConnectorBase_V1", _BASE, "subclass"),
    _connector("KVConnectorBase_V1()", _BASE, "call", call=Call(0, ("vllm_config", "role", "kv_cache_config"))),
    _connector("KVConnectorMetadata", f"{_KV}.base:KVConnectorMetadata", "name"),
    _connector("KVConnectorRole", f"{_KV}.base:KVConnectorRole", "name"),
    _connector("SupportsHMA", f"{_KV}.base:SupportsHMA", "subclass"),
    _connector("KVConnectorBase_V1.has_connector_metadata", f"{_BASE}.has_connector_metadata", "call", call=Call()),
    _connector("KVConnectorBase_V1._get_connector_metadata", f"{_BASE}._get_connector_metadata", "call", call=Call()),
    _connector("KVConnectorBase_V1._vllm_config", f"{_BASE}._vllm_config", "attribute"),
    _connector("KVConnectorBase_V1._kv_transfer_config", f"{_BASE}._kv_transfer_config", "attribute"),
    *(
        _connector(f"KVConnectorBase_V1.{name}", f"{_BASE}.{name}", "override")
        for name in ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "register_kv_caches",
                     "get_finished", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
                     "request_finished", "get_required_kvcache_layout")
    ),
    _connector("SupportsHMA.request_finished_all_groups", f"{_KV}.base:SupportsHMA.request_finished_all_groups",
               "override"),
    _connector("KVTransferConfig.get_from_extra_config",
               "vllm.config.kv_transfer:KVTransferConfig.get_from_extra_config", "call", call=Call(2)),
    _connector("get_tensor_model_parallel_rank",
               "vllm.distributed.parallel_state:get_tensor_model_parallel_rank", "call", call=Call()),
    _connector("init_logger", "vllm.logger:init_logger", "call", call=Call(1)),
    _connector("AttentionMetadata", "vllm.v1.attention.backend:AttentionMetadata", "name"),
    _connector("hs SchedulerOutput", "vllm.v1.core.sched.output:SchedulerOutput", "name"),
    _connector("hs scheduled_new_reqs", "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs", "field"),
    _connector("hs NewRequestData.req_id", "vllm.v1.core.sched.output:NewRequestData.req_id", "field"),
    _connector("hs kv_cache_groups", "vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups", "field"),
    _connector("hs kv_cache_spec", "vllm.v1.kv_cache_interface:KVCacheGroupSpec.kv_cache_spec", "field"),
    _connector("HiddenStateCacheSpec", "vllm.v1.kv_cache_interface:HiddenStateCacheSpec", "name"),
    _connector("CacheOnlyAttentionLayer", "vllm.model_executor.models.extract_hidden_states:CacheOnlyAttentionLayer",
               "name"),
    _connector("VllmConfig.speculative_config", "vllm.config:VllmConfig.speculative_config", "field"),
    _connector("SpeculativeConfig.method", "vllm.config.speculative:SpeculativeConfig.method", "field"),
    _connector("SpeculativeConfig.draft_model_config", "vllm.config.speculative:SpeculativeConfig.draft_model_config",
               "field"),
    _connector("ModelConfig.get_hidden_size", "vllm.config:ModelConfig.get_hidden_size", "call", call=Call()),
    _connector("ModelConfig.dtype", "vllm.config:ModelConfig.dtype", "field"),
    _connector("ModelConfig.hf_config", "vllm.config:ModelConfig.hf_config", "field"),
    _connector("hs Request.request_id", "vllm.v1.request:Request.request_id", "attribute"),
    _connector("Request.kv_transfer_params", "vllm.v1.request:Request.kv_transfer_params", "attribute"),
    _connector("Request.all_token_ids", "vllm.v1.request:Request.all_token_ids", "attribute"),
    _connector("Request.prompt_token_ids", "vllm.v1.request:Request.prompt_token_ids", "attribute"),
)  # fmt: skip

CONSUMERS: tuple[Touchpoint, ...] = (*_SERVER, *_HS_CONNECTORS)


def _takes(*names: str, any_positional: bool = False, any_keyword: bool = False) -> Signature:
    parameters = [Parameter(name) for name in names]
    parameters += [Parameter("args", "var_positional")] if any_positional else []
    parameters += [Parameter("kwargs", "var_keyword")] if any_keyword else []
    return Signature(tuple(parameters))


# What the consumer's own methods take; vLLM calls them as it calls its own.
CALLED_BY_VLLM: dict[str, Signature] = {
    "ExampleHiddenStatesConnector._write_tensors": _takes("tensors", "event", "filename", "lock_fd"),
    "KVConnectorBase_V1.start_load_kv": _takes(any_positional=True, any_keyword=True),
    "KVConnectorBase_V1.wait_for_layer_load": _takes("layer_name"),
    "KVConnectorBase_V1.save_kv_layer": _takes("layer_name", "kv_layer", "attn_metadata", any_keyword=True),
    "KVConnectorBase_V1.wait_for_save": _takes(),
    "KVConnectorBase_V1.register_kv_caches": _takes("kv_caches"),
    "KVConnectorBase_V1.get_finished": _takes("finished_req_ids"),
    "KVConnectorBase_V1.get_num_new_matched_tokens": _takes("request", "num_computed_tokens"),
    "KVConnectorBase_V1.update_state_after_alloc": _takes("request", "blocks", "num_external_tokens"),
    "KVConnectorBase_V1.build_connector_meta": _takes("scheduler_output"),
    "KVConnectorBase_V1.request_finished": _takes("request", "block_ids"),
    "KVConnectorBase_V1.get_required_kvcache_layout": _takes("vllm_config"),
    "SupportsHMA.request_finished_all_groups": _takes("request", "block_ids"),
}
# Methods that the consumer's subclass defines.
DEFINED = frozenset(key.rpartition(".")[2] for key in CALLED_BY_VLLM)
