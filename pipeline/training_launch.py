"""`specshim train --nnodes N …`: one training as equal processes on several machines, by torchrun or Ray Train.

Both only start processes and start them again when one dies; one that is refused is not tried again. The training
itself reads its rank from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT:
https://pytorch.org/docs/stable/elastic/run.html) and goes on from its last checkpoint. Data, vocabulary, model and
output folder have to be on storage that all machines share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline import refusal
from pipeline.replicas.ray_cluster import connected
from shims.errors import SpecshimError, UsageError
from shims.guardian import guarding

TORCHRUN, RAY_TRAIN = "torchrun", "ray"
_FLAG = "--nnodes"
_PORT = 29500
_ENDING = 40.0  # seconds; torchrun gives its processes 30
PROGRAM = ("-m", "pipeline", "train")


@dataclass(frozen=True)
class Launch:
    """Where a training runs."""

    nnodes: int
    nproc_per_node: int
    launcher: str = TORCHRUN
    rdzv_endpoint: str | None = None
    """host:port where the machines meet, for torchrun on several."""
    ray_address: str = "auto"
    max_restarts: int = 3
    """Times that all processes are started again after one died."""


def wanted(arguments: Sequence[str]) -> bool:
    """Whether a command line is one for several machines."""
    return arguments[:1] == ["train"] and any(a == _FLAG or a.startswith(f"{_FLAG}=") for a in arguments)


def parse(arguments: Sequence[str]) -> tuple[Launch, list[str]]:
    """Take the launcher's options from those of `train`.

    Args:
        arguments: behind the word `train`.

    Returns:
        The launch, and what is left for each process.

    Raises:
        UsageError: an option cannot be used.
    """
    parser = _Parser(
        prog="specshim train", allow_abbrev=False, epilog="All options of `specshim train` go behind these."
    )
    parser.add_argument(_FLAG, type=int, required=True, help="Machines.")
    parser.add_argument("--nproc-per-node", type=int, help="Processes on each (default: one a GPU).")
    parser.add_argument("--launcher", choices=[TORCHRUN, RAY_TRAIN], default=TORCHRUN, help="What starts them.")
    parser.add_argument("--rdzv-endpoint", help="host:port where the machines meet, for torchrun on several.")
    parser.add_argument("--ray-address", default="auto", help="Of the Ray cluster.")
    parser.add_argument("--max-restarts", type=int, default=3, help="Times that all start again after one died.")
    found, rest = parser.parse_known_args(list(arguments))
    each = found.nproc_per_node if found.nproc_per_node is not None else max(1, _gpus())
    for flag, value, low in (
        (_FLAG, found.nnodes, 1),
        ("--nproc-per-node", each, 1),
        ("--max-restarts", found.max_restarts, 0),
    ):
        if value < low:
            raise UsageError(flag, f"at least {low}", str(value), "give a larger number")
    if found.launcher == TORCHRUN and found.nnodes > 1 and not found.rdzv_endpoint:
        raise UsageError(
            "--rdzv-endpoint",
            f"host:port of one of the {found.nnodes} machines, the same on each",
            "nothing",
            f"give e.g. --rdzv-endpoint {socket.gethostname()}:{_PORT}, or --launcher ray",
        )
    return Launch(
        found.nnodes, each, found.launcher, found.rdzv_endpoint, found.ray_address, found.max_restarts
    ), rest  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Refuses in four parts."""

    def error(self, message: str) -> NoReturn:
        raise UsageError("specshim train --nnodes", "options that can be read", message, "see docs/scale.md")


def launch(arguments: Sequence[str], program: Sequence[str] = PROGRAM) -> None:
    """Start the processes of this machine (torchrun) or of all machines (Ray Train), and wait for them.

    Args:
        arguments: behind the word `train`.
        program: what each process runs, behind the interpreter.

    Raises:
        UsageError: an option cannot be used, or the training was refused.
        SpecshimError: the processes died more often than allowed.
    """
    how, rest = parse(arguments)
    if how.launcher == RAY_TRAIN:
        _with_ray_train(how, [*program, *rest])
        return
    with refusal.asked_for() as file:
        code = _ended(torchrun(how, [*program, *rest]), os.environ | {refusal.VARIABLE: str(file)})
        refused = refusal.told(file)
    if refused is not None:
        raise UsageError(*refused)
    if code:
        raise SpecshimError(
            f"torchrun, {how.nproc_per_node} processes on this machine",
            "to end well",
            f"exit code {code}",
            "the cause is above, in the words of the process that failed first; the same command on each machine "
            "goes on from the last checkpoint",
        )


def _ended(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run torchrun to its end; when this process is asked to end, or is killed, the training's processes end, too.

    They have sessions of their own, and torchrun does nothing for them when it is killed: it has to be asked.
    """
    with guarding():
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)
            process.kill()
            raise


def torchrun(how: Launch, program: Sequence[str]) -> list[str]:
    """The command line for this machine; the same on each."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={how.nnodes}"]
    command += [f"--nproc-per-node={how.nproc_per_node}", f"--max-restarts={how.max_restarts}"]
    if how.rdzv_endpoint:
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={how.rdzv_endpoint}", "--rdzv-id=specshim-train"]
    else:
        command.append("--standalone")
    # torchrun wants a file or a module, not an interpreter's options.
    return [*command, *program]


def _with_ray_train(how: Launch, program: Sequence[str]) -> None:
    with connected(how.ray_address, logs=True) as ray:
        try:
            from ray.train import FailureConfig, RunConfig, ScalingConfig
            from ray.train.torch import TorchConfig, TorchTrainer
        except ImportError as error:
            raise UsageError(
                "--launcher ray",
                "Ray Train",
                f"it cannot be imported: {error}",
                "pip install 'specshim[ray]', or --launcher torchrun",
            ) from error
        # Loading torch on all machines from one file server takes longer than Ray's minute.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
        gpus, cpus = (int(ray.cluster_resources().get(name, 0)) for name in ("GPU", "CPU"))
        workers = how.nnodes * how.nproc_per_node
        have, what = (gpus, "GPUs") if gpus else (cpus, "CPU cores")
        if workers > have:
            raise UsageError(
                f"{_FLAG} {how.nnodes} --nproc-per-node {how.nproc_per_node}",
                f"{workers} {what}",
                f"{have} in this Ray cluster",
                "give smaller numbers, or add machines",
            )
        refusals = ray.remote(num_cpus=0)(_Refusals).remote()
        trainer = TorchTrainer(
            _run_process,
            train_loop_config={"program": list(program), "folder": str(Path.cwd()), "refusals": refusals},
            # Ray's own group only carries the address; the training makes its own.
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=bool(gpus)),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=how.max_restarts)),
        )
        failure = None
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001  told of below, if it was no refusal
            failure = error
        refused = ray.get(refusals.told.remote())
        if refused is not None:
            raise UsageError(*refused)
        if failure is not None:
            raise SpecshimError(
                f"Ray Train, {workers} processes",
                "to end well",
                f"{type(failure).__name__}: {str(failure).strip()[:2000] or 'no message'}",
                "the same command goes on from the last checkpoint",
            ) from failure


class _Refusals:
    """An actor that keeps a refusal, on whichever machine it was."""

    def __init__(self) -> None:
        self._refused: refusal.Parts | None = None
        self._begun: set[int] = set()

    def begins(self, rank: int) -> bool:
        """Whether this is the rank's first start."""
        first = rank not in self._begun
        self._begun.add(rank)
        return first

    def tell(self, parts: refusal.Parts) -> None:
        self._refused = self._refused or parts

    def told(self) -> refusal.Parts | None:
        return self._refused


def _run_process(config: dict[str, Any]) -> None:
    """One rank: the training in a process of its own, so that it is the same as under torchrun."""
    import ray
    import torch.distributed as dist
    from ray import train, util

    context, refusals = train.get_context(), config["refusals"]
    if ray.get(refusals.told.remote()) is not None:
        return
    address: list[Any] = [None]
    if context.get_world_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = [(util.get_node_ip_address(), free.getsockname()[1])]
    dist.broadcast_object_list(address, src=0)
    host, port = address[0]
    environment = os.environ | {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": str(host),
        "MASTER_PORT": str(port),
    }
    # Ray may kill this process: what it left behind would wait for the others, with the folder's lock in hand.
    with guarding(), refusal.asked_for() as file:
        if ray.get(refusals.begins.remote(context.get_world_rank())):
            environment[refusal.VARIABLE] = str(file)
        code = subprocess.run([sys.executable, *config["program"]], env=environment, cwd=config["folder"]).returncode
        refused = refusal.told(file)
    if refused is not None:
        ray.get(refusals.tell.remote(refused))
    if code:
        raise RuntimeError(f"rank {environment['RANK']} ended with exit code {code}; what it said is above")


def _gpus() -> int:
    """GPUs of this machine, without a context on any of them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
