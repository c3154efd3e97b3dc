"""Several devices: who this process is, and how the processes agree.

`torchrun --nproc-per-node N -m pipeline train …` starts N equal processes. Each trains on its own part of every
batch; gradients and metrics are averaged. speculators' trainer itself is run as if it were alone: what it does for
several devices differs from release to release, needs an accelerator, and in 0.4 loses the initial weights.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.devices import device_type, make_current
from shims.errors import UsageError

_HERE = "specshim/first"
_EVERY = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Ranks:
    """This process among its equals."""

    rank: int = 0
    size: int = 1
    local: int = 0
    """Number of this process on its machine."""

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def device(self, wanted: str) -> str:
        """The device of this process: ``auto`` and ``cuda`` mean this process's own.

        Raises:
            UsageError: one device was named for several processes.
        """
        wanted, own = device_type(wanted), f"cuda:{self.local}"
        if self.size > 1 and wanted.startswith("cuda:") and wanted != own:
            raise UsageError("--device", "cuda or auto under torchrun", wanted, "each process takes its own device")
        return own if wanted == "cuda" and self.size > 1 else wanted

    def summed(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Every value added up over the processes, in float64."""
        numbers = {name: float(value) for name, value in values.items()}
        if self.size == 1:
            return numbers
        import torch
        import torch.distributed as dist

        names = sorted(numbers)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor([numbers[name] for name in names], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def averaged(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Every value's mean over the processes."""
        return {name: value / self.size for name, value in self.summed(values).items()}

    def told(self, value: Any) -> Any:
        """What the first process says."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value if self.first else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """What every process says, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait_for_first(self) -> None:
        """Until the first process is here, however long that takes: collectives give up after some minutes."""
        if self.size == 1:
            return
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        if self.first:
            store.set(_HERE, "")
        while not store.check([_HERE]):
            time.sleep(_EVERY)

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()


def ranks_of_environment() -> Ranks:
    """As torchrun says; alone where it does not."""
    if "LOCAL_RANK" not in os.environ:
        return Ranks()
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Ranks(rank, size, local)


class joined:
    """The processes' group while the block runs: NCCL between GPUs, gloo between CPUs; none for one process.

    A GPU that is named is the current one from then on.
    """

    def __init__(self, ranks: Ranks, device: str) -> None:
        self._ranks, self._device = ranks, device

    def __enter__(self) -> Ranks:
        make_current(self._device)
        if self._ranks.size > 1:
            import torch.distributed as dist

            dist.init_process_group("nccl" if self._device.startswith("cuda") else "gloo")
        return self._ranks

    def __exit__(self, kind: object, *_error: object) -> None:
        # NCCL's end waits for every process, and the others wait for this one in the training: only its exit, which
        # torchrun sees, ends them. https://github.com/pytorch/torchtitan/pull/1342
        if self._ranks.size > 1 and kind is None:
            import torch.distributed as dist

            dist.destroy_process_group()


def replicated(draft: Any, ranks: Ranks, device: str) -> Any:
    """The draft with its gradients averaged over the processes, every process holding all of it."""
    if ranks.size == 1:
        return draft
    import torch
    from torch.nn.parallel import DistributedDataParallel

    # It would cut a compiled draft at its buckets, and cannot cut flex_attention
    # (https://github.com/pytorch/pytorch/issues/104674). To go once it can in every torch that speculators allows.
    torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(draft, device_ids=[ranks.local] if device.startswith("cuda") else None)


def sharding(trainer_class: Any, dtype: Any) -> Any:
    """A trainer that spreads the draft's parameters over the processes, by speculators' own function (FSDP).

    It does so where its base has looked at the draft and put it on its device, before the optimizer is made.

    Args:
        dtype: to compute in.
    """
    import inspect

    try:
        from speculators.train.distributed import apply_fully_sharded
    except ImportError:
        from speculators.train.utils import apply_fully_sharded

    takes_dtype = "param_dtype" in inspect.signature(apply_fully_sharded).parameters

    class ShardingTrainer(trainer_class):  # type: ignore[misc]
        def setup_model(self) -> None:
            super().setup_model()
            if takes_dtype:
                apply_fully_sharded(self.model, param_dtype=dtype)
                return
            with _computing_in(inspect.getmodule(apply_fully_sharded), dtype):
                apply_fully_sharded(self.model)

    return ShardingTrainer


@contextlib.contextmanager
def _computing_in(module: Any, dtype: Any) -> Iterator[None]:
    """Let 0.5 and 0.6 shard for another type than the bfloat16 that is written in their function."""
    policy = module.MixedPrecisionPolicy
    module.MixedPrecisionPolicy = lambda **given: policy(**{**given, "param_dtype": dtype})
    try:
        yield
    finally:
        module.MixedPrecisionPolicy = policy


def whole_state(draft: Any, is_sharded: bool) -> dict[str, Any]:
    """The draft's tensors, whole and on the CPU; on every process when sharded, all of them have to call this."""
    if not is_sharded:
        return {name: value.detach().cpu() for name, value in draft.state_dict().items()}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return dict(get_model_state_dict(draft, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))


def optimizer_states(draft: Any, optimizers: list[Any], is_sharded: bool) -> list[Any]:
    """The optimizers' states, whole."""
    if not is_sharded:
        return [optimizer.state_dict() for optimizer in optimizers]
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return [get_optimizer_state_dict(draft, optimizer, options=options) for optimizer in optimizers]


def restore_optimizers(draft: Any, optimizers: list[Any], states: list[Any], is_sharded: bool) -> None:
    """Undo :func:`optimizer_states`, sharded or not: a training may go on on other devices."""
    for optimizer, state in zip(optimizers, states, strict=True):
        if not is_sharded:
            optimizer.load_state_dict(state)
            continue
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        named = _by_name(draft, optimizer, state)
        set_optimizer_state_dict(draft, optimizer, named, options=StateDictOptions(full_state_dict=True))


def _by_name(draft: Any, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with its parameters named: without FSDP they are numbered, in the same order."""
    names = {id(weight): name for name, weight in draft.named_parameters()}
    mine = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    theirs = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(theirs, mine, strict=True))
    return {
        "state": {name_of[number]: value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def restore_weights(draft: Any, weights: dict[str, Any], is_sharded: bool) -> list[str]:
    """Put whole tensors into the draft; returns the names it does not have."""
    if not is_sharded:
        return list(draft.load_state_dict(weights, strict=False).unexpected_keys)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    return list(set_model_state_dict(draft, weights, options=options).unexpected_keys)
