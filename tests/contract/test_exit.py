"""B24, B28: programs that end without close(), in any order, and programs that fork."""

import pytest
from helpers import scripts
from helpers.pool import free_port

# ------------------------------------------------------------- B24: one rank leaves, the other still needs it


@pytest.mark.parametrize(
    "how, code, reason",
    [
        ("end of main", "pass", "left"),
        ("sys.exit", "sys.exit(0)", "left"),
        ("exception", "raise RuntimeError('on purpose')", "left"),
        ("os._exit", "os._exit(0)", "ended"),
        ("close", "comm.close()", "left"),
        ("del", "del comm", "left"),
        ("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", "ended"),
    ],
)
def test_b24_a_rank_leaves_while_its_peer_sleeps(host_backend, how, code, reason):
    """Rank 1 sleeps, then combines what rank 0 will not send any more: a typed error, and a good end."""
    if reason == "ended":  # a NIC still sends when the call has returned; who ends so does not wait for it
        code = f"time.sleep(0.3); {code}"
    script = f"""
comm = create()
x, idx = job_calls.inputs(rank)
out = comm.dispatch(x, idx, layout="expert")
if rank == 0:
    {code}
else:
    time.sleep(1)
    try:
        comm.combine(np.array(out.x), out.handle)
        print("no error")
    except epcomm.PeerLostError as error:
        print(error.peer, error)
    comm.close()
"""
    ended = scripts.run(host_backend, 2, script)
    wanted = {"exception": 1, "SIGTERM": -15}.get(how, 0)
    scripts.check_clean(ended, [wanted, 0])
    assert ended[1].out.startswith("0 combine") and reason in ended[1].out, ended[1]
    assert "ResourceWarning" not in ended[1].err, ended[1].err


@pytest.mark.parametrize("call", ["comm.barrier()", "round_trip(comm, 'expert')", "round_trip(comm, 'rank, async')"])
def test_b24_a_daemon_thread_in_a_call_does_not_abort_the_exit(host_backend, call):
    """The interpreter of rank 0 ends while another of its threads waits for a peer that does not come."""
    script = f"""
import threading
comm = create()
class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)  # the end takes so long that the thread's wait looks for signals meanwhile
if rank == 0:
    threading.Thread(target=lambda: {call}, daemon=True).start()
    time.sleep(0.3)
    late = Late()
else:
    time.sleep(1.5)
"""
    ended = scripts.run(host_backend, 2, script)
    assert [one.code for one in ended] == [0, 0], ended
    assert "terminate" not in ended[0].err, ended[0].err


def test_b24_what_a_rank_sent_before_it_left_counts(host_backend):
    """Rank 0 ends right after its last call; rank 1 gets its own result of that call."""
    script = """
comm = create()
if rank == 1:
    time.sleep(0.5)
for way in job_calls.WAYS:
    round_trip(comm, way)
print("right")
"""
    ended = scripts.run(host_backend, 2, script)
    scripts.check_clean(ended)
    assert [one.out for one in ended] == ["right\n"] * 2


# --------------------------------------------------------------- B24: freed only when the interpreter ends

ENDS = {
    "global": "comm = create(); out = round_trip(comm)",
    "global, nothing called": "comm = create()",
    "global with results": "comm = create(); outs = [round_trip(comm, way) for way in job_calls.WAYS]",
    "global with a buffer": "comm = create(); buffer = comm.combine_buffer(round_trip(comm).handle)",
    "only the results": "comm = create(); outs = [round_trip(comm, 'rank, copied'), round_trip(comm)]; del comm",
    "many": "comms = [create() for _ in range(4)]; outs = [round_trip(comm) for comm in comms]",
    "cycle": "comm = create(); round_trip(comm); box = [comm]; box.append(box); del comm, box",
    "class attribute": "class Layer: comm = create()\nround_trip(Layer.comm)",
    "module of its own": "import types; sys.modules['other'] = types.ModuleType('other'); "
    "sys.modules['other'].comm = create(); round_trip(sys.modules['other'].comm)",
    "epcomm's own module": "epcomm.default = create(); round_trip(epcomm.default)",
    "frame of an exception": "def f():\n    comm = create(); round_trip(comm); raise KeyError\n"
    "try:\n    f()\nexcept KeyError as error:\n    kept = error",
    "thread local": "local = threading.local(); local.comm = create(); round_trip(local.comm)",
    "closed at exit": "import atexit; comm = create(); round_trip(comm); atexit.register(comm.close)",
    "closed by a finalizer": "import weakref; comm = create(); round_trip(comm); "
    "class_ = type('C', (), {}); thing = class_(); weakref.finalize(thing, comm.close)",
    "with, left by exit": "with create() as comm:\n    round_trip(comm)\n    sys.exit(0)",
    "events waited for": "comm = create(); x, idx = job_calls.inputs(rank); "
    "out = comm.dispatch(x, idx, async_op=True); out.event.wait()",
    "events never waited for": "comm = create(); x, idx = job_calls.inputs(rank); "
    "out = comm.dispatch(x, idx, async_op=True)",
    "async combine never waited for": "comm = create(); out = round_trip(comm); "
    "comm.combine(np.array(out.x), out.handle, async_op=True)",
    "daemon thread in a call": "comm = create(); round_trip(comm)\n"
    "def run():\n    try:\n        comm.barrier()\n    except epcomm.PeerLostError:\n        pass\n"
    "if rank == 0:\n    threading.Thread(target=run, daemon=True).start(); time.sleep(0.3)",
}


@pytest.mark.parametrize("how", list(ENDS))
def test_b24_freed_when_the_interpreter_ends(host_backend, how):
    """Nobody calls close(); all ranks end well and in time, with a warning at most."""
    ended = scripts.run(host_backend, 2, ENDS[how] + "\n", timeout_s=15)
    scripts.check_clean(ended, warnings=4 if how == "many" else 1)


def test_b24_a_call_in_flight_does_not_keep_the_interpreter(host_backend):
    """The peer never comes to the second half of the call, and lives on."""
    code = """
comm = create()
x, idx = job_calls.inputs(rank)
if rank == 0:
    out = comm.dispatch(x, idx, async_op=True)
    assert not out.event.done()
    print(time.monotonic(), flush=True)
    del x, idx, out
else:
    comm._engine = job_calls._Stalled(SimpleNamespace(tell=lambda: None, wait=lambda: time.sleep(4)), comm._engine,
                                      "dispatch_finish")
    try:
        round_trip(comm, "rank, copied")
    except epcomm.PeerLostError as error:
        print(error.peer, error)
    comm.close()
"""
    ended = scripts.run(host_backend, 2, code)
    scripts.check_clean(ended)
    assert ended[1].seconds - ended[0].seconds > 1.0, [one.seconds for one in ended]
    assert ended[1].out.startswith("0 "), ended[1]


@pytest.mark.parametrize("python", [("-X", "dev"), ("-W", "error"), ("-O",)], ids=lambda options: options[-1])
def test_b24_interpreter_options(host_backend, python):
    """Warnings as errors or development mode change nothing for the peers."""
    ended = scripts.run(host_backend, 2, ENDS["global with results"], python=python)
    assert [one.code for one in ended] == [0, 0], ended
    if python != ("-W", "error"):
        scripts.check_clean(ended)


def test_b24_the_warning_says_what_to_do(host_backend):
    ended = scripts.run(host_backend, 1, "comm = create(); del comm; print('after')")
    scripts.check_clean(ended)
    for text in ("ResourceWarning", "rank 0 of 1", "with statement or call close()"):
        assert text in ended[0].err, ended[0].err
    ended = scripts.run(host_backend, 1, "comm = create(); comm.close(); del comm")
    scripts.check_clean(ended, warnings=0)


# ---------------------------------------------------------------------------------------------- B28: fork

FORK_FIRST = """
import multiprocessing
from epcomm import _info, _registry

assert epcomm.__version__
assert any(row["state"] == "available" for row in _info.collect()["backends"])
for row in _registry.BACKENDS:
    __import__(f"epcomm._{row.name}")
epcomm.Communicator.required_bytes(num_ranks=2, **job_calls.SHAPE)
assert len(os.listdir("/proc/self/task")) == 1, "importing or asking started a thread"


def worker(number):
    global rank, num_ranks
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(number), "2"
    here.rank, here.num_ranks = number, 2
    with create() as comm:
        for way in job_calls.WAYS:
            round_trip(comm, way)


if METHOD == "multiprocessing":
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker, args=(number,)) for number in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(20)
    assert [process.exitcode for process in workers] == [0, 0]
else:
    pids = []
    for number in range(2):
        pid = os.fork()
        if pid == 0:
            worker(number)
            sys.exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
here.rank, here.num_ranks = 0, 1
with create() as comm:
    round_trip(comm)
"""


@pytest.mark.parametrize("method", ["multiprocessing", "os.fork"])
def test_b28_workers_of_a_parent_that_imported_and_asked(host_backend, method):
    """Importing, asking for version, backends and sizes leave nothing that a fork could break."""
    scripts.check_clean(scripts.run(host_backend, 1, f"METHOD = {method!r}\n" + FORK_FIRST), warnings=0)


FORK_LATER = """
import multiprocessing


def child(comm, held):
    out, event = held
    x, idx = job_calls.inputs(rank)
    calls = {
        "dispatch": lambda: comm.dispatch(x, idx),
        "combine": lambda: comm.combine(np.array(out.x), out.handle),
        "combine_buffer": lambda: comm.combine_buffer(out.handle),
        "barrier": comm.barrier,
        "check": comm.check,
        "stats": comm.stats,
        "abort": comm.abort,
        "event.wait": event.wait,
        "event.done": event.done,
    }
    for name, call in calls.items():
        try:
            call()
        except epcomm.EpcommError as error:
            assert "fork" in str(error) and str(os.getppid()) in str(error), (name, error)
        else:
            raise AssertionError(f"{name} in a forked child raised nothing")
    repr(comm), comm.caps, comm.rank, comm.plan()
    assert out.x.shape[0] > 0 and out.x[0, 0] == out.x[0, 1]  # still to be read
    if ENDING == "close":
        comm.close()
        comm.close()
    elif ENDING == "collect":
        comm.__dict__.clear()
        del held, out, event, calls, call
        gc.collect()


comm = create(num_slots=3)
out = round_trip(comm)
x, idx = job_calls.inputs(rank)
flight = comm.dispatch(x, idx, async_op=True)
event = flight.event
for _ in range(2):
    if METHOD == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=child, args=(comm, (out, event)))
        process.start()
        process.join(20)
        assert process.exitcode == 0, process.exitcode
    else:
        pid = os.fork()
        if pid == 0:
            child(comm, (out, event))
            if ENDING == "_exit":
                os._exit(0)
            if ENDING == "gone":
                del comm, out, flight, event
                gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    event.wait()
    # The parent's heap, thread and peers are as they were.
    want = np.array(out.x)
    for way in job_calls.WAYS:
        round_trip(comm, way)
    np.testing.assert_array_equal(out.x, want)
    comm.check()
comm.close()
"""


@pytest.mark.parametrize(
    "method, ending",
    [
        ("os.fork", "exit"),
        ("os.fork", "_exit"),
        ("os.fork", "close"),
        ("os.fork", "collect"),
        ("os.fork", "gone"),
        ("multiprocessing", "exit"),
        ("multiprocessing", "close"),
    ],
)
def test_b28_an_inherited_communicator_is_inert(host_backend, method, ending):
    """Every call in the child is a typed error; however it ends, the parent goes on rightly."""
    code = f"METHOD, ENDING = {method!r}, {ending!r}\n" + FORK_LATER
    scripts.check_clean(scripts.run(host_backend, 2, code), warnings=0)


def test_b28_a_child_may_make_its_own(host_backend):
    """While the parent's lives and is used."""
    code = """
comm = create()
round_trip(comm)
pid = os.fork()
if pid == 0:
    os.environ["MASTER_PORT"] = os.environ["EPCOMM_PORT"] = os.environ["OTHER_PORT"]
    with create() as mine:
        for way in job_calls.WAYS:
            round_trip(mine, way)
    sys.exit(0)
for way in job_calls.WAYS:
    round_trip(comm, way)
assert os.waitpid(pid, 0)[1] == 0
round_trip(comm)
comm.close()
"""
    scripts.check_clean(scripts.run(host_backend, 2, code, env={"OTHER_PORT": str(free_port())}), warnings=0)


def test_b28_a_fork_while_another_thread_calls(host_backend):
    """The child inherits locks that nobody will release; it must not wait for them."""
    code = """
comm = create()
stop = threading.Event()


def calls():
    for _ in range(200):
        round_trip(comm)


thread = threading.Thread(target=calls)
thread.start()
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        for call in (comm.barrier, comm.stats, comm.check, comm.abort):
            try:
                call()
                os._exit(3)
            except epcomm.InvalidArgumentError:
                pass
        comm.close()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
thread.join()
comm.close()
"""
    scripts.check_clean(scripts.run(host_backend, 2, code), warnings=0)


def test_b28_the_death_of_a_forked_child_is_no_loss_of_its_parent(host_backend):
    """A child holds copies of descriptors; its end must not look like its parent's."""
    code = """
comm = create()
round_trip(comm)
if rank == 0:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
for _ in range(3):
    round_trip(comm)
    comm.check()
comm.close()
"""
    scripts.check_clean(scripts.run(host_backend, 2, code), warnings=0)
