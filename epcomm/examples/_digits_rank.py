"""What one rank of the digits example does."""

import time
from typing import Any, Literal

import numpy as np

import epcomm
from epcomm._launch import Place
from epcomm.examples import _moe
from epcomm.ops import expert_owners


class DigitsRank:
    """Holds this rank's images and experts; each trial is dispatch, experts, combine, check."""

    def __init__(self, place: Place, images: str, layout: Literal["rank", "expert"], backend: str | None,
                 timeout_s: float) -> None:
        self._layout = layout
        pixels = np.frombuffer(bytes.fromhex(images), np.uint8).reshape(-1, _moe.HIDDEN)
        topk_idx, topk_weights = _moe.gate(pixels)
        x = pixels.astype(np.float32)
        mine = _moe.owned_images(len(pixels), place.rank, place.num_ranks)
        # The model of one process: all images in one batch, of which this rank checks its own.
        self._wanted = _moe.one_process(x, topk_idx, topk_weights)[mine]
        self._x, self._topk_idx, self._topk_weights = x[mine], topk_idx[mine], topk_weights[mine]
        owners, _, _ = expert_owners(_moe.NUM_EXPERTS, place.num_ranks)
        self._experts = [number for number, rank in enumerate(owners) if rank == place.rank]
        self._picks = np.bincount(topk_idx.ravel(), minlength=_moe.NUM_EXPERTS)  # of all ranks
        self._comm = epcomm.Communicator(
            num_experts=_moe.NUM_EXPERTS,
            num_topk=_moe.NUM_TOPK,
            hidden=_moe.HIDDEN,
            max_tokens_per_rank=-(-len(pixels) // place.num_ranks),
            dtype="float32",
            backend=backend,
            device="cpu",  # where its arrays are, though a launcher may have imported a torch that sees a GPU
            timeout_s=timeout_s,
        )

    def answer(self, request: str) -> Any:
        return {"trial": self._trial, "describe": self._describe}[request]()

    def _trial(self) -> dict[str, Any]:
        times = [time.perf_counter()]
        out = self._comm.dispatch(self._x, self._topk_idx, self._topk_weights, layout=self._layout)
        times.append(time.perf_counter())
        y = self._by_expert(out) if self._layout == "expert" else self._by_row(out)
        times.append(time.perf_counter())
        z = self._comm.combine(y, out.handle).x
        times.append(time.perf_counter())
        counts = np.asarray(out.num_tokens_per_expert)
        return {
            "seconds": np.diff(times).tolist(),
            "rows": len(out.x),
            "bytes": out.x.nbytes,
            "counts_differ": int((counts != self._picks[self._experts]).sum()),
            # Bits, not values: -0.0 is not 0.0 here.
            "values_differ": int((z.view(np.uint32) != self._wanted.view(np.uint32)).sum()),
        }

    def _by_expert(self, out: Any) -> np.ndarray:
        """Expert layout: each expert has a range of rows; combine applies the weights."""
        y = np.zeros_like(out.x)
        for local, number in enumerate(self._experts):
            rows = slice(out.expert_offsets[local], out.expert_offsets[local + 1])
            y[rows] = _moe.expert(number, out.x[rows])
        return y

    def _by_row(self, out: Any) -> np.ndarray:
        """Rank layout: each row lists its local experts; their weighted sum is made here, picks in order."""
        y = np.zeros_like(out.x)
        for k in range(_moe.NUM_TOPK):
            for local, number in enumerate(self._experts):
                rows = out.topk_idx[:, k] == local
                y[rows] += out.topk_weights[rows, k, None] * _moe.expert(number, out.x[rows])
        return y

    def _describe(self) -> dict[str, Any]:
        return {
            "backend": self._comm.backend,
            "images": len(self._x),
            "experts": self._experts,
            "picks": np.bincount(self._topk_idx.ravel(), minlength=_moe.NUM_EXPERTS).tolist(),
            "values": self._wanted.size,
        }

    def close(self) -> None:
        self._comm.close()
