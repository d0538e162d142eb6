"""One process or many: who am I, what do we agree on, and how the model is wrapped."""

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oelm.errors import UserError
from oelm.freezing import hashes
from oelm.train.config import TrainConfig
from oelm.train.errors import RunError, StoppedError

PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Processes:
    """This process among all that train the run together."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all must ask."""
        if self.world == 1:
            return flag
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes)
        return bool(votes)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes; all must ask."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn the noise of a broken connection into one line: its cause is another rank's error."""
        try:
            yield
        except RuntimeError as error:
            broken = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
            if self.world > 1 and any(word in str(error).lower() for word in broken):
                raise RunError(
                    f"rank {self.rank} lost contact with another rank, whose own error is the cause"
                ) from error
            raise

    def require_equal(self, model: nn.Module, step: int) -> None:
        """Raise unless every process holds the same weights, bit for bit, of the same step."""
        if self.world == 1:
            return
        found: list[dict[str, str]] = [{} for _ in range(self.world)]
        dist.all_gather_object(found, {"step": str(step), **hashes(model)})
        for name, value in found[0].items():
            if any(other[name] != value for other in found):
                raise RuntimeError(f"the processes hold different values of {name}")


@contextlib.contextmanager
def processes(config: TrainConfig) -> Iterator[Processes]:
    """Join the others if `torchrun` (or srun with its variables) started us; choose the device."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = _device(config.device, local)
    if config.batch_size % (world * config.grad_accumulation):
        raise UserError(
            f"batch_size {config.batch_size} cannot be split into {world} processes × "
            f"{config.grad_accumulation} accumulation steps"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.threads or max(1, (cores or 1) // here))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if world > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Flags travel by Gloo even where gradients travel by NCCL: asking waits for no GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    together = True
    try:
        yield Processes(rank, world, device)
    except BaseException as error:
        # After an error of our own the group stays open until we exit: closing it would let the
        # others fail, and say so, before our error is shown.
        together = isinstance(error, StoppedError)
        raise
    finally:
        if world > 1 and together:
            dist.destroy_process_group()


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cpu"
        if torch.cuda.is_available():
            wanted = "cuda"
        elif torch.backends.mps.is_available():
            wanted = "mps"
    try:
        device = torch.device(wanted)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot use device '{wanted}': {reason}; try --device cpu") from None
    return device


class Wrapped:
    """The model as it is stepped: compiled, and synchronised with the other processes.

    `model` stays the plain module, which counts, hashes and checkpoints are made of.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, processes: Processes) -> None:
        self.model, self.processes = model, processes
        self.kind = config.parallel if processes.world > 1 else "single"
        if self.kind == "fsdp":
            # Imported where needed: it costs a second.
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(processes.device.type, (processes.world,))
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        # Typed as a module, which it is; torch calls it a function.
        self.compiled: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
        self.stepped = self.compiled

    def wrap(self, step: int) -> None:
        """Wrap (again). DDP knows the parameters that trained when it was made, and no others:
        toggling requires_grad under a live wrapper leaves gradients unsynchronised, silently."""
        if self.kind == "ddp":
            device = self.processes.device
            self.unwrap()
            # Frozen tensors are equal everywhere and stay so: nothing of them is ever sent.
            buffers = [name for name, _ in self.compiled.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
                self.compiled, buffers
            )
            self.stepped = DistributedDataParallel(
                self.compiled,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
        self.processes.require_equal(self.model, step)

    def unwrap(self) -> None:
        """Let go of DDP and its hooks at once: it refers to itself, so the collector must be asked.

        Had it the last hold on the process group, the group would end with it, waiting for Gloo's
        threads while they wait for the interpreter: for ever (seen with torch 2.13).
        """
        if isinstance(self.stepped, DistributedDataParallel):
            self.stepped = self.compiled
            gc.collect()

    @contextlib.contextmanager
    def synchronised(self, wanted: bool) -> Iterator[None]:
        """Whether gradients of the backward pass inside are averaged over the processes."""
        if isinstance(self.stepped, DistributedDataParallel) and not wanted:
            with self.stepped.no_sync():
                yield
            return
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(wanted)  # type: ignore[operator]
        yield
