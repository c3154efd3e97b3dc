from enum import Enum

from mini_scheduler import MiniRequest

from vllm import VERSION


class RequestStatus(Enum):
    FINISHED_ABORTED = 1


if VERSION < (0, 17):

    class Request(MiniRequest):
        def __init__(
            self,
            request_id,
            prompt_token_ids,
            sampling_params,
            pooling_params,
            eos_token_id,
            arrival_time=None,
            block_hasher=None,
        ):
            super().__init__(request_id, prompt_token_ids)

else:

    class Request(MiniRequest):
        def __init__(
            self, request_id, prompt_token_ids, sampling_params, pooling_params, arrival_time=None, block_hasher=None
        ):
            super().__init__(request_id, prompt_token_ids)
