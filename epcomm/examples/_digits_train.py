"""A Mixture-of-Experts classifier of handwritten digits, trained on several ranks and, beside it, in one process.

Data and experts are spread over the ranks. Experts get their gradients through `epcomm.torch`; those of the shared
layers are summed by torch.distributed. The model of one process takes the same steps on the same batches, and each
loss of the ranks has to be its loss, but for the rounding of float32.
"""

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import epcomm.torch
from epcomm import _console, _launch, _nics, bootstrap, config
from epcomm._launch import Place
from epcomm.examples import _moe
from epcomm.ops import expert_owners

WORKER = "epcomm.examples._digits_train:TrainRank"
NUM_CLASSES = 10
NUM_STEPS = 180
BATCH = 128
NUM_TEST = 360
WANTED_ACCURACY = 0.95
# Both runs round every sum in another order. Steps add up what that does, so it is a little more than one sum's.
TOLERANCE = 1e-5
# Scores this close are equal but for rounding: either expert may be the second choice.
NEAR_TIE = 1e-5


class Model(nn.Module):
    """Pixels, a layer, a Mixture-of-Experts layer beside a residual path, classes."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(_moe.HIDDEN, _moe.HIDDEN)
        self.moe = moe
        self.last = nn.Linear(_moe.HIDDEN, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.silu(self.first(images))  # no kink, where rounding would decide about a gradient
        return self.last(x + self.moe(x))


class SpreadExperts(epcomm.torch.ExpertParallel):
    """The layer of the ranks; it remembers which experts it picked."""

    picks: Tensor

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.picks, weights = super().route(x)
        return self.picks, weights


class OwnExperts(nn.Module):
    """The same layer in one process: every expert on its tokens, no communication."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_moe.HIDDEN, _moe.NUM_EXPERTS, bias=False)
        self.experts = epcomm.torch.Experts(_moe.NUM_EXPERTS, _moe.HIDDEN, _moe.INNER, F.silu)
        self.picks: Tensor | None = None  # what the ranks picked
        self.num_near_ties = 0

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, picks = scores.topk(_moe.NUM_TOPK)
        if self.picks is not None and not torch.equal(picks, self.picks):
            # No model says which of two equal scores wins. The ranks' choice counts, if they had one.
            missed = (best - scores.gather(1, self.picks)).abs().max().item()
            if missed > NEAR_TIE:
                raise RuntimeError(f"the ranks picked an expert whose score is {missed:.2e} off the best")
            self.num_near_ties += int((picks != self.picks).any(1).sum())
            picks = self.picks
        weights = scores.gather(1, picks)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(_moe.NUM_EXPERTS):
            token, k = (picks == expert).nonzero(as_tuple=True)
            y = y.index_add(0, token, weights[token, k, None] * self.experts.one(expert, x[token]))
        return y


class Run:
    """Data in the same order everywhere, a model, and its optimizer."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, model: Model) -> None:
        order = np.random.default_rng(0).permutation(len(images))
        self._x = torch.from_numpy(images[order].astype(np.float32) / 16)
        self._labels = torch.from_numpy(labels[order].astype(np.int64))
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)

    def batch(self, step: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
        """Images of a step's batch, or a rank's share of them."""
        num_train = len(self._x) - NUM_TEST
        per_epoch = num_train // BATCH
        order = np.random.default_rng([1, step // per_epoch]).permutation(num_train)
        start = step % per_epoch * BATCH
        part = _moe.owned_images(BATCH, rank, num_ranks)
        return torch.from_numpy(order[start : start + BATCH][part] + NUM_TEST)

    def step(self, rows: Tensor, reduce: Callable[[], None] = lambda: None) -> float:
        """One step on these images; returns their part of the batch's loss."""
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self._x[rows]), self._labels[rows], reduction="sum") / BATCH
        loss.backward()
        reduce()
        self._optimizer.step()
        return loss.item()

    def correct(self, rows: slice) -> int:
        """How many of these test images get their label."""
        with torch.no_grad():
            return int((self.model(self._x[:NUM_TEST][rows]).argmax(1) == self._labels[:NUM_TEST][rows]).sum())


def whole_model() -> tuple[Model, OwnExperts]:
    """The model of one process, with the values that every run begins with, and its experts."""
    torch.manual_seed(0)
    experts = OwnExperts()
    return Model(experts), experts


def unpack(images: str, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Arrays out of what JSON can hold."""
    pixels = np.frombuffer(bytes.fromhex(images), np.uint8).reshape(-1, _moe.HIDDEN)
    return pixels, np.frombuffer(bytes.fromhex(labels), np.uint8)


class TrainRank:
    """One rank: its experts, a copy of the shared layers, its share of each batch."""

    def __init__(self, place: Place, images: str, labels: str, layout: str, backend: str | None,
                 timeout_s: float) -> None:
        torch.set_num_threads(1)
        self._rank, self._num_ranks = place.rank, place.num_ranks
        _init_gloo(place, timeout_s)
        self._comm = epcomm.Communicator(
            dist.group.WORLD, num_experts=_moe.NUM_EXPERTS, num_topk=_moe.NUM_TOPK, hidden=_moe.HIDDEN,
            max_tokens_per_rank=max(BATCH, NUM_TEST), dtype="float32", backend=backend, device="cpu",
            timeout_s=timeout_s)
        whole, _ = whole_model()
        experts = epcomm.torch.Experts(self._comm.num_local_experts, _moe.HIDDEN, _moe.INNER, F.silu)
        self._moe = SpreadExperts(self._comm, _moe.HIDDEN, experts=experts, layout=layout)
        model = Model(self._moe)
        owners, _, _ = expert_owners(_moe.NUM_EXPERTS, self._num_ranks)
        self._experts = mine = [expert for expert, rank in enumerate(owners) if rank == self._rank]
        model.load_state_dict({name: value[mine] if "experts." in name else value
                               for name, value in whole.state_dict().items()})
        self._run = Run(*unpack(images, labels), model)
        self._shared = [value for name, value in model.named_parameters() if "experts." not in name]

    def answer(self, request: Any) -> Any:
        if request == "correct":
            return self._run.correct(_moe.owned_images(NUM_TEST, self._rank, self._num_ranks))
        if request == "describe":
            return {"backend": self._comm.backend, "experts": self._experts, **self._comm.stats()}
        rows = self._run.batch(request, self._rank, self._num_ranks)
        loss = self._run.step(rows, self._sum_gradients)
        return {"loss": loss, "picks": self._moe.picks.tolist()}

    def _sum_gradients(self) -> None:
        """Of the shared layers. An expert has one owner, and its gradient came from all ranks already."""
        gradients = [value.grad for value in self._shared if value.grad is not None]  # all have one
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def close(self) -> None:
        self._comm.close()
        dist.destroy_process_group()


def _init_gloo(place: Place, timeout_s: float) -> None:
    """torch.distributed under any launcher: rank 0 opens a store and tells its port."""
    timeout = timedelta(seconds=timeout_s)
    host = config.get("MASTER_ADDR") or "127.0.0.1"
    with bootstrap.connect(timeout_s=timeout_s) as group:
        store, port = None, 0
        if place.rank == 0:
            store = dist.TCPStore(host, 0, place.num_ranks, True, timeout, wait_for_workers=False)
            port = store.port
        port = int(group.all_gather(str(port).encode())[0])
        if store is None:
            store = dist.TCPStore(host, port, place.num_ranks, False, timeout)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)


def main(arguments: argparse.Namespace) -> int:
    """Train on the ranks and in this process; returns the exit code."""
    images, labels = _moe.load_images(), _load_labels()
    options = {"images": images.tobytes().hex(), "labels": labels.tobytes().hex(), "layout": arguments.layout,
               "backend": arguments.backend, "timeout_s": arguments.timeout_s}
    with _launch.join_or_start(WORKER, options, arguments.ranks, arguments.timeout_s) as ranks:
        whole, experts = whole_model()
        report = _train(ranks, Run(images, labels, whole), experts)
    if ranks.speaks:
        report["layout"] = arguments.layout
        report["model"] = _nics.model_note(report["ranks"][0]["backend"])
        _show(report)
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=2)
        if arguments.plot:
            _draw(report, arguments.plot)
            print(f"loss curve: {arguments.plot}")
    return 0 if report["same_losses"] and report["accuracy"] >= WANTED_ACCURACY else 1


def _load_labels() -> np.ndarray:
    from sklearn.datasets import load_digits

    return load_digits().target.astype(np.uint8)


def _train(ranks: Any, alone: Run, experts: OwnExperts) -> dict[str, Any]:
    torch.set_num_threads(1)
    losses, wanted, problem = [], [], None
    with _console.progress(f"training on {ranks.num_ranks} ranks", NUM_STEPS, silent=not ranks.speaks) as show:
        for step in range(NUM_STEPS):
            answers = ranks.ask(step)
            losses.append(sum(answer["loss"] for answer in answers))
            experts.picks = torch.tensor([pick for answer in answers for pick in answer["picks"]])
            try:
                wanted.append(alone.step(alone.batch(step)))
            except RuntimeError as error:
                problem = f"step {step}: {error}"
                break
            show(step + 1)
    correct = sum(ranks.ask("correct"))
    experts.picks = None
    described = ranks.ask("describe")
    differences = [abs(a - b) / max(1.0, b) for a, b in zip(losses, wanted, strict=False)]
    return {
        "ranks": [{"rank": rank, **told} for rank, told in enumerate(described)],
        "steps": NUM_STEPS,
        "losses": losses,
        "losses_of_one_process": wanted,
        "largest_difference": max(differences),
        "same_losses": problem is None and max(differences) <= TOLERANCE,
        "problem": problem,
        "near_ties": experts.num_near_ties,
        "accuracy": correct / NUM_TEST,
        "accuracy_of_one_process": alone.correct(slice(None)) / NUM_TEST,
    }


def _show(report: dict[str, Any]) -> None:
    ranks = report["ranks"]
    _console.print_table(
        f"training, {report['layout']} layout, backend {ranks[0]['backend']}",
        ("rank", "experts", "calls", "rows sent", "bytes sent"),
        [(rank["rank"], ", ".join(map(str, rank["experts"])) or "none", rank["calls"], rank["rows_sent"],
          _console.human_bytes(rank["bytes_sent"])) for rank in ranks],
        right=range(2, 5),
    )
    if report["model"]:
        print(f"backend {ranks[0]['backend']} {report['model']}")
    losses = report["losses"]
    print(f"{len(losses)} steps of {BATCH} images: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"{report['accuracy']:.1%} of {NUM_TEST} test images right (one process: "
          f"{report['accuracy_of_one_process']:.1%}, wanted: {WANTED_ACCURACY:.0%})")
    verdict = "as in one process" if report["same_losses"] else "NOT as in one process"
    print(f"each loss {verdict}: largest difference {report['largest_difference']:.1e}, "
          f"allowed {TOLERANCE:.0e}; picks decided by rounding: {report['near_ties']}")
    if report["problem"]:
        print(report["problem"])


def _draw(report: dict[str, Any], path: str) -> None:
    """Loss by step, and how far the two runs are apart."""
    import matplotlib

    matplotlib.use("Agg")  # a file, whatever display there is
    import matplotlib.pyplot as plt

    losses, wanted = np.array(report["losses"]), np.array(report["losses_of_one_process"])
    steps = np.arange(1, len(wanted) + 1)
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    of_ranks = f"{len(report['ranks'])} ranks"
    above.plot(steps, losses[: len(steps)], color="#1f6f8b", linewidth=3, alpha=0.5, label=of_ranks)
    above.plot(steps, wanted, color="#202020", linewidth=0.8, linestyle="--", label="one process")
    above.set_ylabel("cross-entropy of the batch")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    above.set_title(f"top-{_moe.NUM_TOPK} of {_moe.NUM_EXPERTS} experts on handwritten digits: "
                    f"{report['accuracy']:.1%} of the test images right", loc="left", fontsize=11)
    below.semilogy(steps, np.maximum(np.abs(losses[: len(steps)] - wanted), 1e-9), ".", color="#8a3b5c", markersize=4)
    below.axhline(TOLERANCE, color="#404040", linewidth=1, linestyle="--")
    below.text(1, TOLERANCE, " allowed", va="bottom", fontsize=8)
    below.set_ylim(5e-10, 10 * TOLERANCE)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
