"""vLLM's scheduler in small: a token budget, places, blocks of KV cache, preemption, a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class MiniRequest:
    """What the scheduler and the generator read of vLLM's Request."""

    def __init__(self, request_id: str, prompt_token_ids: list[int]) -> None:
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.num_prompt_tokens, self.num_computed_tokens = len(prompt_token_ids), 0


@dataclass
class NewRequest:
    req_id: str
    prompt_token_ids: list[int]


@dataclass
class Output:
    """One step: requests not seen before, tokens of each request, and the position at which they start."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class MiniScheduler:
    """Prefill only. A request that finds no block preempts the newest one, which starts again later."""

    def __init__(
        self,
        budget: int = 8192,
        places: int = 32,
        blocks: int = 1000,
        block_size: int = 16,
        prefix_caching: bool = False,
        chunked: bool = True,
        share: int = 8192,
    ) -> None:
        self.budget, self.places, self.block_size, self.chunked = budget, places, block_size, chunked
        self.prefix_caching, self.share = prefix_caching, share  # share: tokens of one request in one step
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self._free, self._held, self._sent = blocks, {}, set()
        self._cached: set[tuple[int, ...]] = set()

    def add_request(self, request: Any) -> None:
        self.waiting.append(request)

    def finish_requests(self, request_ids: list[str], status: Any) -> None:
        for request in [r for r in (*self.waiting, *self.running) if r.request_id in request_ids]:
            (self.running if request in self.running else self.waiting).remove(request)
            self._release(request)
            self.finished.append(request.request_id)

    def schedule(self) -> Output:
        output, left = Output(), self.budget
        for request in list(self.running):
            wanted = min(left, self.share, request.num_prompt_tokens - request.num_computed_tokens)
            while wanted and request in self.running and not self._fits(request, wanted):
                self._preempt(self.running[-1])
            if wanted and request in self.running:
                left -= self._give(output, request, wanted)
        while self.waiting and left and len(self.running) < self.places:
            request = self.waiting[0]
            if request.num_computed_tokens == 0:
                request.num_computed_tokens = self._from_cache(request)
            rest = request.num_prompt_tokens - request.num_computed_tokens
            wanted = min(left, self.share, rest)
            if not self._fits(request, wanted) or (wanted < rest and not self.chunked):
                break
            self.running.append(self.waiting.pop(0))
            left -= self._give(output, request, wanted)
        return output

    def _from_cache(self, request: Any) -> int:
        lengths = range(0, request.num_prompt_tokens, self.block_size)
        return max((n for n in lengths if tuple(request.prompt_token_ids[:n]) in self._cached), default=0)

    def _fits(self, request: Any, tokens: int) -> bool:
        return self._blocks(request, tokens) - self._held.get(request.request_id, 0) <= self._free

    def _blocks(self, request: Any, tokens: int) -> int:
        return -(-(request.num_computed_tokens + tokens) // self.block_size)

    def _give(self, output: Output, request: Any, tokens: int) -> int:
        name = request.request_id
        held = self._blocks(request, tokens)
        self._free -= held - self._held.get(name, 0)
        self._held[name] = held
        if name not in self._sent:
            self._sent.add(name)
            output.scheduled_new_reqs.append(NewRequest(name, request.prompt_token_ids))
        output.starts[name], output.num_scheduled_tokens[name] = request.num_computed_tokens, tokens
        request.num_computed_tokens += tokens
        if self.prefix_caching:
            whole = range(self.block_size, request.num_computed_tokens + 1, self.block_size)
            self._cached |= {tuple(request.prompt_token_ids[:n]) for n in whole}
        return tokens

    def _preempt(self, request: Any) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        self.waiting.insert(0, request)
        self.preempted.append(request.request_id)

    def _release(self, request: Any) -> None:
        self._free += self._held.pop(request.request_id, 0)
