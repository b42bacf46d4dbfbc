"""B57: setting up fails, dies or hangs on one rank of three. All raise what it has to say; the next try works."""

import contextlib
import os
import signal
import time

import pytest
from helpers import job_calls
from helpers.job import slack
from helpers.job_calls import close, create, once

CULPRIT = 1
STAGES = ["import", "probe", "constructor", "alloc_heap", "export_info", "connect", "engine"]


@contextlib.contextmanager
def failing(backend, stage, what):
    """While the block runs, this process's set-up calls ``what()`` at a stage."""
    import importlib
    import sys

    from epcomm import _host

    name = f"epcomm._{backend}"
    module = importlib.import_module(name)
    Backend, probe, HostEngine = module.Backend, module.probe, _host.HostEngine

    class Failing(Backend):
        def __init__(self, options):
            if stage == "constructor":
                what()
            super().__init__(options)

    def method(at):
        def fails(self, *args):
            if stage == at:
                what()
            return getattr(Backend, at)(self, *args)

        return fails

    def engine(*args):
        if stage == "engine":
            what()
        return HostEngine(*args)

    for at in ("alloc_heap", "export_info", "connect"):
        setattr(Failing, at, method(at))
    module.Backend, _host.HostEngine = Failing, engine
    if stage == "probe":
        module.probe = what
    if stage == "import":
        sys.modules[name] = None
    try:
        yield
    finally:
        sys.modules[name] = module
        module.Backend, module.probe, _host.HostEngine = Backend, probe, HostEngine


def raiser(kind):
    """A function that raises an error of this kind."""

    def what(*_args):
        import epcomm

        text = "broken on purpose"
        if kind == "SystemCallError":
            raise epcomm.SystemCallError(24, text)
        raise (getattr(epcomm, kind, None) or getattr(__import__("builtins"), kind))(text)

    return what


def create_failing(here, stage, kind, backend="named"):
    from epcomm._registry import BACKENDS

    # "any": an automatic choice, from a list that has only this one.
    others = ",".join(row.name for row in BACKENDS if row.name != here.backend)
    options = {} if backend == "named" else {"backend": f"^{others}"}
    context = failing(here.backend, stage, raiser(kind)) if here.rank == CULPRIT else contextlib.nullcontext()
    with context:
        create(here, timeout_s=10, **options)


def check_all_told(ranks, answers, kinds, texts):
    for answer in answers:
        assert answer.failure is not None and answer.failure.kind in kinds, answer
        for text in (f"rank {CULPRIT}", *texts):
            assert text in answer.failure.text, (text, answer.failure.text)
        assert answer.end - answer.start < 2.0 * slack()
    for left in ranks.values(job_calls.what_is_left):
        assert left["mappings"] == 0 and left["files"] == 0 and left["threads"] == 1, left


@pytest.mark.parametrize("stage", STAGES)
def test_b57_one_rank_fails_to_start(job, stage):
    ranks = job(3)
    for backend in ("named", "any"):
        answers = ranks.run(create_failing, stage=stage, kind="BackendUnavailableError", backend=backend)
        text = "cannot be imported" if stage == "import" else "broken on purpose"
        check_all_told(ranks, answers, ["BackendUnavailableError"], [text, ranks.backend])
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


@pytest.mark.parametrize("stage", ["constructor", "alloc_heap", "connect", "engine"])
@pytest.mark.parametrize(
    "kind, raised",
    [
        ("OutOfMemoryError", "OutOfMemoryError"),
        ("SystemCallError", "SystemCallError"),
        ("InvalidArgumentError", "InvalidArgumentError"),
        ("UnsupportedError", "UnsupportedError"),
        ("MemoryError", "OutOfMemoryError"),
        ("RuntimeError", "InternalError"),
        ("OSError", "InternalError"),
    ],
)
def test_b57_what_one_rank_raises_all_raise(job, stage, kind, raised):
    ranks = job(3)
    check_all_told(ranks, ranks.run(create_failing, stage=stage, kind=kind), [raised], ["broken on purpose"])
    ranks.values(create)
    ranks.values(close)


def create_dying(here, stage, what):
    def dies():
        os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])

    context = failing(here.backend, stage, dies) if here.rank == CULPRIT else contextlib.nullcontext()
    with context:
        create(here, timeout_s=2.0 if what == "stop" else 20.0)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_b57_one_rank_dies_while_it_starts(job, stage):
    ranks = job(3)
    for rank in range(3):
        ranks.start(rank, create_dying, stage=stage, what="die")
    ranks.processes[CULPRIT].wait(20)
    at = time.monotonic()
    for rank in (0, 2):
        answer = ranks.answer(rank)
        assert answer.failure is not None and answer.failure.kind == "PeerLostError", answer
        assert answer.failure.peer == CULPRIT and answer.end - at < 1.0 * slack(), answer
    ranks.replace(CULPRIT)
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


@pytest.mark.parametrize("stage", ["alloc_heap", "connect", "engine"])
def test_b57_one_rank_hangs_while_it_starts(job, stage):
    ranks = job(3)
    for rank in range(3):
        ranks.start(rank, create_dying, stage=stage, what="stop")
    for rank in (0, 2):
        answer = ranks.answer(rank)
        assert answer.failure is not None and answer.failure.kind == "CommTimeoutError", answer
        assert answer.failure.peer == CULPRIT and f"rank {CULPRIT}" in answer.failure.text, answer
        assert 1.9 < answer.end - answer.start < 4.0 + slack(), answer
    at = ranks.signal(CULPRIT, signal.SIGCONT)
    late = ranks.answer(CULPRIT)
    assert late.failure is not None and "EpcommError" in late.failure.types and late.end - at < 3.0 + slack(), late
    ranks.new_port()
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def create_and_stop_short(here):
    """The last step, after all ranks agreed, fails here only: Ctrl-C may come there."""
    from epcomm import _create

    made = _create.Made
    if here.rank == CULPRIT:
        _create.Made = raiser("KeyboardInterrupt")
    try:
        create(here)
    finally:
        _create.Made = made


def test_a_rank_that_stops_after_all_had_agreed(job):
    """The others have their communicators; their first call tells."""
    ranks = job(3)
    answers = ranks.run(create_and_stop_short)
    assert answers[CULPRIT].failure is not None and answers[CULPRIT].failure.kind == "KeyboardInterrupt"
    assert answers[0].failure is None and answers[2].failure is None
    for answer in ranks.run(once, ranks=(0, 2), way="expert"):
        assert answer.failure is not None and answer.failure.kind == "PeerLostError", answer
        assert answer.failure.peer == CULPRIT and answer.end - answer.start < 1.0 * slack(), answer
    ranks.values(close, ranks=(0, 2))


def create_with_little_room(here):
    """No address space for the threads that are asked for."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    if here.rank == CULPRIT:
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), hard))
    try:
        create(here, options={"num_threads": 250}, num_channels=2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_b57_no_room_for_threads(job):
    """Some of the threads can be started, the next cannot: an error, not the end of the process."""
    ranks = job(3)
    answers = ranks.run(create_with_little_room)
    check_all_told(ranks, answers, ["SystemCallError"], ["250 host threads", "num_threads"])
    ranks.values(create)
    ranks.values(once, way="expert")
    ranks.values(close)


def async_with_little_room(here):
    """The thread of ``async_op`` cannot be started: refused like any other call."""
    import resource

    told = None

    import epcomm

    comm = here.state["comm"]
    x, idx = job_calls.inputs(here.rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    if here.rank == CULPRIT:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), hard))
    try:
        comm.dispatch(x, idx, async_op=True).event.wait()
    except epcomm.SystemCallError as error:
        told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    job_calls.round_trip(here, "rank, async")
    return told


def test_no_room_for_the_thread_of_an_async_call(job):
    ranks = job(3, env={})  # new processes: no stack of a thread that ended is at hand
    ranks.values(create, options={"num_threads": 1})
    for told in ranks.values(async_with_little_room):
        assert told is not None and f"rank {CULPRIT}" in told and "async_op" in told, told
    ranks.values(close)
