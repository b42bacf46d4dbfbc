"""The group over a `torch.distributed.ProcessGroup`: its own all-gather, on tensors of bytes."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from epcomm._bootstrap.deadline import Deadline, timed_out
from epcomm._bootstrap.group import Group, lost
from epcomm.errors import CommTimeoutError, EpcommError, InvalidArgumentError

_ROUND_BYTES = 1 << 26  # received in one step, all ranks together
_LONGEST_SLEEP_S = 0.01


def distributed() -> Any:
    """`torch.distributed` if it is imported and usable, else None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() else None


def recognises(group: object) -> bool:
    """Whether an object is a torch process group, or what torch gives to ranks that are in none."""
    dist = distributed()
    if dist is None:
        return False
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, dist.ProcessGroup):
        return True
    return group is outside or (type(group) is type(outside) and group == outside)


def default_group(rank: int, num_ranks: int) -> Any:
    """The default process group if it has this rank and size, else None."""
    dist = distributed()
    if dist is None or not dist.is_initialized():
        return None
    same = dist.get_rank() == rank and dist.get_world_size() == num_ranks
    return dist.group.WORLD if same else None


class TorchGroup(Group):
    """Ranks of a process group, in its own order.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    """

    kind = "torch-group"

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._dist = distributed()
        try:
            rank = self._dist.get_rank(group) if isinstance(group, self._dist.ProcessGroup) else -1
        except (ValueError, KeyError, AssertionError):
            text = "group: torch.distributed does not know this group: destroyed, or made without new_group"
            raise InvalidArgumentError(text) from None
        if rank < 0:
            raise InvalidArgumentError(
                "group: this process is not a member of the torch.distributed group; make the communicator on its "
                "members only"
            )
        self._group = group
        self._device = self._choose_device()
        super().__init__(rank, self._dist.get_world_size(group), timeout_s)

    def _choose_device(self) -> Any:
        """CPU if the group moves CPU tensors (gloo, MPI), else what its backend needs (NCCL: CUDA)."""
        import torch

        try:
            config = self._dist.get_backend_config(self._group)
        except (ValueError, AssertionError):
            text = "group: a process group that init_process_group or new_group did not make"
            raise InvalidArgumentError(text) from None
        devices = [entry.split(":")[0] for entry in config.split(",")]
        if "cpu" in devices:
            return torch.device("cpu")
        if "cuda" in devices:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(devices[0])

    def _exchange(self, payload: bytes, what: str, deadline: Deadline) -> Sequence[bytes]:
        sizes = self._step(len(payload).to_bytes(8, "little"), 8, what, deadline)
        lengths = [int.from_bytes(size, "little") for size in sizes]
        received = [bytearray() for _ in lengths]
        # All ranks know the longest, so all make the same number of steps.
        longest, width = max(lengths), max(1, _ROUND_BYTES // self.num_ranks)
        for start in range(0, longest, width):
            parts = self._step(payload[start : start + width], min(width, longest - start), what, deadline)
            for rank, part in enumerate(parts):
                received[rank] += part[: max(0, lengths[rank] - start)]
        return [bytes(part) for part in received]

    def _step(self, data: bytes, width: int, what: str, deadline: Deadline) -> list[bytes]:
        """One all-gather of ``width`` bytes per rank."""
        import torch

        mine = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8).to(self._device)
        theirs = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        try:
            work = self._dist.all_gather(theirs, mine, group=self._group, async_op=True)
            pause_s = 0.0002
            # A blocking wait would not see signals, and its deadline would be the group's.
            while not work.is_completed():
                self._check_closing(what)
                if deadline.passed():
                    raise timed_out(what, deadline, [], self.num_ranks, "a torch group does not tell who is missing")
                time.sleep(min(pause_s, deadline.tick()))
                pause_s = min(1.5 * pause_s, _LONGEST_SLEEP_S)
            work.wait()
        except EpcommError:
            raise
        except RuntimeError as error:  # all that torch's backends raise
            text = f"{what}: the torch group failed: {str(error).splitlines()[0]}"
            if "timed out" in text.lower():  # the group's own timeout, set when it was made, is the shorter one
                raise CommTimeoutError(text) from None
            raise lost(text, None) from None
        return [part.cpu().numpy().tobytes() for part in theirs]

    def _release(self) -> None:
        self._group = None

    def _leave(self) -> None:
        self._release()
