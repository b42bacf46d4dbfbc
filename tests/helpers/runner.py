"""Runs :class:`helpers.cases.Program` steps inside a rank and compares after each of them."""

import numpy as np

from helpers import arrays
from helpers.oracle import assert_bits


def run_programs(context, programs, kind="numpy"):
    """Run each program on a communicator of its own.

    Returns
    -------
    list
        `stats()` of each communicator after its last step.
    """
    answers = []
    if context.on_gpu:
        kind = {"numpy": "cupy", "torch": "torch_cuda"}.get(kind, kind)
    for number, program in enumerate(programs):
        at = "creation"
        try:
            with context.comm(**program["comm"]) as comm:
                session = Session(comm, kind)
                for index, step in enumerate(program["steps"]):
                    at = f"step {index}: {describe(step)}"
                    session.step(step)
                at = "look again at all results"
                session.check_held()
                answers.append(comm.stats())
        except Exception as error:
            raise AssertionError(
                f"program {number} ({program['name']}), kind {kind}, {at}: {type(error).__name__}: {error}"
            ) from error
    return answers


def describe(step):
    """A step in a line, without its arrays."""
    small = {name: value for name, value in step.items() if name not in ("arrays", "want", "want_carried", "options")}
    return f"{small} {step.get('options', '')}"


class Session:
    """Results of one communicator by key, with what they must look like."""

    def __init__(self, comm, kind):
        self.comm = comm
        self.kind = kind
        self.held = {}  # key -> (out, want)
        self.handles = {}
        self.left_out = set()  # keys of dispatches that this engine does not have yet

    def step(self, step):
        """Run one step; on a GPU only what its engine has: rank layout, no capacity."""
        if self.comm.device != "cpu" and self._left_out(step):
            return
        getattr(self, "_" + step["op"])(step)

    def _left_out(self, step):
        options = step.get("options", {})
        out = options.get("layout", "rank") != "rank" or step.get("of") in self.left_out
        out = out or bool(options.get("exact_order")) or options.get("capacity") is not None
        if out and "key" in step:
            self.left_out.add(step["key"])
        return out

    def check_held(self):
        """Every result still held must be what it was."""
        for key, (out, want) in self.held.items():
            check_dispatched(out, want, self.kind, f"{key} looked at again")

    def _given(self, step):
        given = {
            name: arrays.formed(array, step["form"]) for name, array in step["arrays"].items() if array is not None
        }
        return given, {name: array.copy() for name, array in given.items()}

    def _dispatch(self, step):
        given, before = self._given(step)
        call = {name: arrays.to_kind(array, self.kind) for name, array in given.items()}
        if "of" in step:
            call["handle"] = self.handles[step["of"]]
        x = call.pop("x")
        out = self.comm.dispatch(x, **call, **step["options"])
        if step["options"].get("async_op"):
            out.event.wait()
        elif out.event is not None:
            raise AssertionError("event without async_op")
        check_dispatched(out, step["want"], self.kind, step["key"])
        check_unchanged(given, before)
        self.held[step["key"]] = (out, step["want"])
        self.handles[step["key"]] = out.handle

    def _combine(self, step):
        given, before = self._given(step)
        want = step["want"]
        y, options = given["y"], dict(step["options"])
        handle = self.handles[step["of"]]
        if step["source"] == "leased":
            out, wanted = self.held.pop(step["of"])
            arrays.assign(out.x, y)
            argument = out.x
            self.held[step["of"]] = (out, {**wanted, "x": y})
        elif step["source"] == "buffer":
            argument = self.comm.combine_buffer(handle, dtype=y.dtype.name)
            arrays.assign(argument, y)
        else:
            argument = arrays.to_kind(y, self.kind)
        for name in ("topk_weights", "bias"):
            if name in given:
                options[name] = arrays.to_kind(given[name], self.kind)
        target = None
        if step["out"] is not None:
            target = arrays.formed(np.full(want.shape, 77, want.dtype), step["out"])
            options["out"] = arrays.to_kind(target, self.kind)
            if self.kind in arrays.GPU_KINDS:  # elsewhere both are the same memory
                target = options["out"]
        result = self.comm.combine(argument, handle, **options)
        if options.get("async_op"):
            result.event.wait()
        if target is not None:
            if result.x is not options["out"]:
                raise AssertionError("the result is not the array given as out=")
            assert_bits(arrays.to_numpy(target), want, "out=")
        else:
            assert_bits(arrays.to_numpy(result.x), want, "z")
            if step["source"] == "fresh" and not arrays.is_kind(result.x, self.kind):
                raise AssertionError(f"z is a {type(result.x)}, given were arrays of kind {self.kind}")
        if step["want_carried"] is None:
            if result.topk_weights is not None:
                raise AssertionError("topk_weights came back though none were given")
        else:
            assert_bits(arrays.to_numpy(result.topk_weights), step["want_carried"], "carried weights")
        if step["source"] == "fresh":
            check_unchanged(given, before)

    def _barrier(self, step):
        self.comm.barrier()

    def _drop(self, step):
        for key in step["keys"]:
            if key in self.left_out:
                continue
            out, want = self.held[key]
            check_dispatched(out, want, self.kind, f"{key} before it goes")
            del self.held[key]


def check_unchanged(given, before):
    """Inputs are only read."""
    for name, array in given.items():
        if (arrays.bits(array) != arrays.bits(before[name])).any():
            raise AssertionError(f"input {name} was changed")


def check_dispatched(out, want, kind, what):
    """Every field of a `Dispatched` against the oracle."""
    for name in ("x", "scales", "topk_idx", "topk_weights", "num_tokens_per_expert", "expert_offsets"):
        thing = getattr(out, name)
        if (thing is None) != (want[name] is None):
            raise AssertionError(f"{what}.{name} is {type(thing)}, expected {type(want[name])}")
        if thing is not None and not arrays.is_kind(thing, kind):
            raise AssertionError(f"{what}.{name} is a {type(thing)}, given were arrays of kind {kind}")
    x = arrays.to_numpy(out.x)
    if x.shape != want["x"].shape:
        raise AssertionError(f"{what}.x has shape {x.shape}, expected {want['x'].shape}")
    assert_bits(x[want["x_is_defined"]], want["x"][want["x_is_defined"]], f"{what}.x")
    if want["scales"] is not None:
        scales = arrays.to_numpy(out.scales)
        if scales.shape != want["scales"].shape:
            raise AssertionError(f"{what}.scales has shape {scales.shape}, expected {want['scales'].shape}")
        real = want["has_token"]
        assert_bits(scales[real], want["scales"][real], f"{what}.scales")
    for name in ("topk_idx", "topk_weights", "num_tokens_per_expert", "expert_offsets"):
        if want[name] is not None:
            assert_bits(arrays.to_numpy(getattr(out, name)), want[name], f"{what}.{name}")
    if out.counts != want["counts"]:
        raise AssertionError(f"{what}.counts is {out.counts}, expected {want['counts']}")
    for name in ("num_tokens", "overflow"):
        scalar = getattr(out, name)
        if np.ndim(arrays.to_numpy(scalar)) != 0 or int(scalar) != want[name]:
            raise AssertionError(f"{what}.{name} is {scalar!r}, expected {want[name]}")
