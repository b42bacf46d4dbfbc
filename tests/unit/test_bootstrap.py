"""The group and our own rendezvous: exchange, deadlines, lost ranks, numbers. Ranks are threads or small processes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
from helpers import meeting
from helpers.meeting import Task, join, loopback, ranks

from epcomm import (
    CommTimeoutError,
    EpcommError,
    InvalidArgumentError,
    PeerLostError,
    SystemCallError,
    UnsupportedError,
    bootstrap,
)
from epcomm._bootstrap import address, frames, group, rendezvous
from epcomm._bootstrap.deadline import Deadline
from epcomm._bootstrap.star import CALL_LIMITS

pytestmark = pytest.mark.timeout(60)


def host(num_ranks, place, number=1, timeout_s=10.0, key=None):
    return rendezvous.host(num_ranks, place, key, number, Deadline(timeout_s), CALL_LIMITS)


def meet(rank, num_ranks, place, number=1, timeout_s=10.0, key=None):
    return rendezvous.meet(rank, num_ranks, place, key, number, Deadline(timeout_s))


def close_all(*outcomes):
    """Close whatever connections or groups came out."""
    for outcome in outcomes:
        if isinstance(outcome, dict):
            close_all(*outcome.values())
        elif hasattr(outcome, "close"):
            outcome.close()


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the state that this test needs never came"
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------------ exchange


@pytest.mark.parametrize("num_ranks", [2, 3, 16, 64])
def test_all_gather_keeps_rank_order_and_any_length(num_ranks):
    def body(group):
        assert (group.num_ranks, group.kind) == (num_ranks, "rendezvous")
        first = group.all_gather(bytes([group.rank]) * group.rank)
        group.barrier()
        return first, group.all_gather(b"" if group.rank != 1 else b"only rank 1")

    expected = [bytes([rank]) * rank for rank in range(num_ranks)]
    second = [b"only rank 1" if rank == 1 else b"" for rank in range(num_ranks)]
    assert ranks(num_ranks, body) == [(expected, second)] * num_ranks


def test_megabytes_of_uneven_length():
    def part(rank):
        return bytes(range(256)) * (rank * 11_003)

    results = ranks(4, lambda group: group.all_gather(memoryview(part(group.rank))))
    assert results == [[part(rank) for rank in range(4)]] * 4


def test_barrier_waits_for_the_last():
    entered = []

    def body(group):
        if group.rank == 2:
            time.sleep(0.3)
        entered.append(group.rank)
        group.barrier()
        return len(entered)

    assert ranks(3, body) == [3, 3, 3]


def test_one_rank_needs_nobody(monkeypatch):
    for name in set(os.environ) - set(meeting.clean_environment()):
        monkeypatch.delenv(name)
    with bootstrap.connect(timeout_s=5) as alone:
        assert (alone.rank, alone.num_ranks, alone.kind) == (0, 1, "single")
        assert alone.all_gather(b"me") == [b"me"]
        alone.barrier()


def open_descriptors():
    """How many there are, without those that garbage still holds."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_after_a_hundred_creations():
    place = loopback()
    descriptors = open_descriptors()

    def body():
        for _ in range(100):
            yield ranks(3, lambda group: group.all_gather(b"%d" % group.rank), place=place)

    assert all(result == [[b"0", b"1", b"2"]] * 3 for result in body())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("epcomm")]
    assert open_descriptors() == descriptors


def test_a_second_group_is_made_while_the_first_is_open():
    place = loopback()

    def body(rank):
        with join(rank, 3, place) as first, join(rank, 3, place) as second:
            return [second.all_gather(b"second %d" % rank), first.all_gather(b"first %d" % rank)]

    tasks = [Task(body, rank) for rank in range(3)]
    expected = [[b"%s %d" % (word, rank) for rank in range(3)] for word in (b"second", b"first")]
    assert [task.result() for task in tasks] == [expected] * 3


# ------------------------------------------------------------------------------------------------------- numbers


def test_a_rank_ahead_is_served_later():
    place = loopback()
    first = Task(host, 3, place, 1)
    ahead = Task(meet, 1, 3, place, 2)
    time.sleep(0.3)
    assert first.running and ahead.running
    early = [Task(meet, rank, 3, place, 1) for rank in (1, 2)]
    members = first.result()
    assert sorted(members) == [1, 2]
    second = Task(host, 3, place, 2)
    last = Task(meet, 2, 3, place, 2)
    again = second.result()
    assert sorted(again) == [1, 2]
    close_all(members, again, *[task.result() for task in (*early, ahead, last)])


def test_a_rank_behind_is_told_and_is_in_step_next_time():
    place = loopback()
    serving = Task(host, 2, place, 2)
    error = Task(meet, 1, 2, place, 1).result()
    assert isinstance(error, PeerLostError) and error.peer == 0
    for part in ("communicator 1", "communicator 2", "next attempt is number 2"):
        assert part in str(error)
    joined = Task(meet, 1, 2, place, 2).result()
    close_all(serving.result(), joined)


def test_a_failed_creation_counts_on_every_rank():
    place = loopback()
    failed = ranks(3, lambda group: None, place=place, timeout_s=0.3, only=(0, 1))
    assert isinstance(failed[0], CommTimeoutError) and isinstance(failed[1], CommTimeoutError)
    late = Task(join, 2, 3, place, None, 10)
    time.sleep(0.1)
    others = [Task(join, rank, 3, place, None, 10) for rank in (0, 1)]
    assert isinstance(late.result(), PeerLostError)
    third = Task(join, 2, 3, place, None, 10)
    groups = [*[task.result() for task in others], third.result()]
    assert all(isinstance(made, bootstrap.Group) for made in groups), groups
    close_all(*groups)


# --------------------------------------------------------------------------------------- wrong claims, creation


def test_the_second_claim_of_a_rank_is_refused_and_the_job_goes_on():
    place = loopback()
    serving = Task(host, 3, place)
    first = Task(meet, 1, 3, place)
    time.sleep(0.2)
    error = Task(meet, 1, 3, place).result()
    assert isinstance(error, InvalidArgumentError)
    assert "RANK=1: two processes claim rank 1" in str(error) and f"process {os.getpid()}" in str(error)
    other = Task(meet, 2, 3, place)
    assert sorted(serving.result()) == [1, 2]
    close_all(serving.result(), first.result(), other.result())


@pytest.mark.parametrize(("rank", "num_ranks", "text"), [(1, 4, "WORLD_SIZE=4"), (7, 2, "RANK=7"), (0, 2, "RANK=0")])
def test_a_wrong_size_or_rank_is_refused_and_the_job_goes_on(rank, num_ranks, text):
    place = loopback()
    serving = Task(host, 2, place)
    error = Task(meet, rank, num_ranks, place).result()
    assert isinstance(error, InvalidArgumentError) and text in str(error)
    right = Task(meet, 1, 2, place)
    close_all(serving.result(), right.result())
    assert sorted(serving.result()) == [1]


def test_another_version_is_named_on_that_client_and_the_job_goes_on():
    place = loopback()
    serving = Task(host, 2, place)
    wait_until(lambda: _listening(place))
    with meeting.process(
        "import sys\n"
        "from epcomm._bootstrap import frames, handshake, rendezvous\n"
        "from epcomm._bootstrap.address import Place\n"
        "from epcomm._bootstrap.deadline import Deadline\n"
        "frames.VERSION = handshake.VERSION = 2\n"
        "frames.encode.__defaults__ = (b'', 2)\n"
        "rendezvous.meet(1, 2, Place(sys.argv[1], int(sys.argv[2])), None, 1, Deadline(10))\n",
        *place,
    ) as child:
        output, _ = child.communicate(timeout=20)
    assert "UnsupportedError" in output and "speaks version 1, this rank version 2" in output
    right = Task(meet, 1, 2, place)
    assert sorted(serving.result()) == [1]
    close_all(serving.result(), right.result())


def _listening(place):
    with open("/proc/net/tcp") as table:
        return any(line.split()[1].endswith(f":{place.port:04X}") and line.split()[3] == "0A" for line in table
                   if ":" in line.split()[0])


# ----------------------------------------------------------------------------------------------------- deadlines


def test_missing_ranks_are_named_on_all_that_came():
    results = ranks(5, lambda group: None, timeout_s=0.5, only=(0, 1, 4))
    for rank in (0, 1, 4):
        error = results[rank]
        assert isinstance(error, CommTimeoutError) and error.peer == 2
        for part in ("creating communicator 1", "ranks 2, 3 of 5 are missing", "after 0.5 s", "timeout_s=0.5",
                     "EPCOMM_TIMEOUT_S", "rank 0 listens on 127.0.0.1"):
            assert part in str(error), str(error)


def test_the_shortest_deadline_ends_the_wait_for_all():
    place = loopback()
    hosting = Task(join, 0, 3, place, None, 30)
    client = Task(join, 1, 3, place, None, 0.5)
    for task in (hosting, client):
        error = task.result(5)
        assert isinstance(error, CommTimeoutError) and "rank 2 of 3 is missing" in str(error)
        assert "timeout_s=0.5 of rank 1" in str(error)
        assert 0.4 < task.elapsed < 3


def test_a_rank_without_rank_0_says_where_it_looked():
    place = loopback()
    task = Task(join, 2, 3, place, None, 0.4)
    error = task.result(5)
    assert isinstance(error, CommTimeoutError) and error.peer == 0
    assert f"looked for rank 0 at {place}" in str(error) and "Connection refused" in str(error)
    assert 0.4 <= task.elapsed < 3


def test_a_name_that_nobody_knows():
    place = address.Place("no-such-host.invalid", 29500)
    client = Task(join, 1, 2, place, b"key", 0.5).result(20)
    assert isinstance(client, CommTimeoutError) and "no-such-host.invalid" in str(client)
    hosting = Task(join, 0, 2, place, b"key", 5).result(20)
    assert isinstance(hosting, InvalidArgumentError) and "MASTER_ADDR=no-such-host.invalid" in str(hosting)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_call_that_one_rank_never_makes(absent):
    def body(group):
        group.barrier()
        if group.rank == absent:
            time.sleep(1.0)  # longer than the others wait
            return None
        start = time.monotonic()
        with pytest.raises(CommTimeoutError) as caught:
            group.all_gather(b"")
        return str(caught.value), caught.value.peer, time.monotonic() - start

    results = ranks(3, body, timeout_s=0.4)
    for rank in {0, 1, 2} - {absent}:
        text, peer, elapsed = results[rank]
        assert peer == absent and f"rank {absent} of 3 is missing" in text
        assert "bootstrap all_gather (call 2)" in text and "0.4" in text and "EPCOMM_TIMEOUT_S" in text
        assert elapsed < 3


def test_a_taken_port_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(address, "BIND_PATIENCE_S", 0.2)
    place = loopback()
    with meeting.process(
        "import socket, sys\n"
        "s = socket.create_server((sys.argv[1], int(sys.argv[2])))\n"
        "print('up', flush=True); sys.stdin.read()", *place
    ) as other:
        assert other.stdout.readline() == "up\n"
        with pytest.raises(SystemCallError, match="set EPCOMM_PORT to a free port") as caught:
            join(0, 2, place, None, 5)
        assert caught.value.errno == 98 and str(place) in str(caught.value)


# ---------------------------------------------------------------------------------------------------- lost ranks

_MEMBER = """
import sys, time
from epcomm import bootstrap
from epcomm._bootstrap.address import Place
from epcomm._bootstrap.deadline import Deadline
from epcomm._bootstrap import rendezvous
if sys.argv[3] == "creating":
    found = rendezvous._find(2, 4, Place(sys.argv[1], int(sys.argv[2])), None, 1, Deadline(30))
else:
    group = bootstrap._rendezvous(2, 4, Place(sys.argv[1], int(sys.argv[2])), None, 30)
print("up", flush=True)
time.sleep(60)
"""


def test_a_rank_that_dies_during_creation_is_named_within_a_second():
    place = loopback()
    with meeting.process(_MEMBER, *place, "creating") as member:
        tasks = {rank: Task(join, rank, 4, place, None, 30) for rank in (0, 1)}
        assert member.stdout.readline() == "up\n"
        time.sleep(0.2)
        member.kill()
        died = time.monotonic()
        time.sleep(0.1)
        tasks[3] = Task(join, 3, 4, place, None, 30)  # not even here yet
        for task in tasks.values():
            error = task.result(5)
            assert isinstance(error, PeerLostError) and error.peer == 2, error
            assert "rank 2 was lost" in str(error)
        assert time.monotonic() - died < 1.2


@pytest.mark.parametrize("waiting", [(0, 1, 3), (0, 3)])
def test_a_rank_that_dies_in_a_call_is_named_within_a_second(waiting):
    place = loopback()
    with meeting.process(_MEMBER, *place, "calling") as member:
        creations = {rank: Task(join, rank, 4, place, None, 30) for rank in (0, 1, 3)}
        groups = {rank: task.result() for rank, task in creations.items()}
        assert member.stdout.readline() == "up\n"
        tasks = {rank: Task(groups[rank].all_gather, b"x") for rank in waiting}
        time.sleep(0.2)
        member.kill()
        died = time.monotonic()
        for task in tasks.values():
            error = task.result(5)
            assert isinstance(error, PeerLostError) and error.peer == 2 and "rank 2 was lost" in str(error)
        assert time.monotonic() - died < 1
        for rank in {1} - set(waiting):  # who calls later hears of it too
            with pytest.raises(PeerLostError, match="rank 2 was lost"):
                groups[rank].barrier()
        for rank in waiting:
            with pytest.raises(PeerLostError, match="rank 2 was lost"):
                groups[rank].barrier()  # at once, though nobody else calls
        close_all(groups)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_left_is_no_mystery(leaver):
    def body(group):
        group.barrier()
        if group.rank == leaver:
            return None
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        return caught.value.peer, str(caught.value)

    results = ranks(3, body)
    for rank in {0, 1, 2} - {leaver}:
        assert results[rank][0] == leaver and f"rank {leaver} left the group" in results[rank][1]


def test_leaving_right_after_the_last_call_spoils_nothing():
    """Rank 1 is gone long before rank 2 has read its share."""
    slow = threading.Event()

    def body(group):
        if group.rank == 2:
            group._host.receive = lambda receive=group._host.receive: slow.wait(0.05) or receive()
        return [len(part) for part in group.all_gather(b"x" * 3_000_000)]

    assert ranks(3, body) == [[3_000_000] * 3] * 3


# --------------------------------------------------------------------------------------------- refused arguments


@pytest.mark.parametrize(("bad", "text"), [("text", "str is not bytes-like"), (b"too long", "8 bytes, at most 4")])
def test_a_refused_argument_is_raised_on_all_and_the_next_call_works(monkeypatch, bad, text):
    monkeypatch.setattr(group, "MAX_PART_BYTES", 4)

    def body(group):
        with pytest.raises(InvalidArgumentError) as caught:
            group.all_gather(bad if group.rank == 1 else b"ok")
        return str(caught.value), group.all_gather(b"%d" % group.rank)

    for message, after in ranks(3, body):
        assert message.startswith("rank 1: data: ") and text in message
        assert after == [b"0", b"1", b"2"]


def test_different_operations_are_one_error_on_all():
    def body(group):
        with pytest.raises(InvalidArgumentError) as caught:
            group.barrier() if group.rank == 2 else group.all_gather(b"")
        return str(caught.value)

    for message in ranks(3, body):
        assert message == ("bootstrap: ranks called different operations: rank 0 all_gather, rank 1 all_gather, "
                           "rank 2 barrier")


@pytest.mark.parametrize("value", [0, -1, "soon", float("nan"), 1e12])
def test_a_bad_timeout_is_refused_at_once(value):
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        bootstrap.connect(timeout_s=value)


@pytest.mark.parametrize(("bad", "name"), [(3, "int"), ("world", "str"), ([], "list")])
def test_a_group_of_another_kind_is_refused_with_its_type(bad, name):
    with pytest.raises(InvalidArgumentError, match=rf"group is of type {name}; allowed: None .*, a torch\."):
        bootstrap.connect(bad, timeout_s=1)


# ---------------------------------------------------------------------------------------- interrupts, lifetime


class _Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for itself."""


@pytest.fixture
def interrupt_main():
    """Interrupts the main thread, which waits in a call, after a delay."""

    def handler(_signum, _frame):
        raise _Interrupt("Ctrl-C")

    def after(delay_s):
        main = threading.main_thread().ident
        Task(lambda: (time.sleep(delay_s), signal.pthread_kill(main, signal.SIGUSR1)))

    before = signal.signal(signal.SIGUSR1, handler)
    yield after
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("main_rank", [0, 1])
def test_ctrl_c_ends_a_creation_and_the_others_hear_of_it(interrupt_main, main_rank):
    place = loopback()
    other = Task(join, 1 - main_rank, 3, place, None, 30)
    interrupt_main(0.4)
    start = time.monotonic()
    with pytest.raises(_Interrupt):
        join(main_rank, 3, place, None, 30)
    assert time.monotonic() - start < 2
    error = other.result(2)
    assert isinstance(error, PeerLostError) and error.peer == main_rank
    assert f"rank {main_rank} gave up: _Interrupt: Ctrl-C" in str(error)


@pytest.mark.parametrize("main_rank", [0, 1])
def test_ctrl_c_ends_a_call_and_the_others_hear_of_it(interrupt_main, main_rank):
    place = loopback()
    creations = {rank: Task(join, rank, 3, place, None, 30) for rank in range(3)}
    groups = {rank: task.result() for rank, task in creations.items()}
    others = [rank for rank in range(2) if rank != main_rank]
    tasks = [Task(groups[rank].barrier) for rank in others]
    interrupt_main(0.3)
    with pytest.raises(_Interrupt):
        groups[main_rank].barrier()
    for task in tasks:
        error = task.result(2)
        assert isinstance(error, PeerLostError) and error.peer == main_rank and "gave up: _Interrupt" in str(error)
    with pytest.raises(PeerLostError, match="gave up"):
        groups[main_rank].barrier()
    close_all(groups)


def test_close_is_idempotent_and_ends_a_wait_of_another_thread():
    place = loopback()
    creations = [Task(join, rank, 2, place, None, 30) for rank in range(2)]
    hosting, member = [task.result() for task in creations]
    waiting = Task(hosting.barrier)
    time.sleep(0.1)
    hosting.close()
    hosting.close()
    assert isinstance(waiting.result(1), UnsupportedError)
    with pytest.raises(UnsupportedError, match="this group is closed"):
        hosting.barrier()
    with pytest.raises(EpcommError):
        member.barrier()
    member.close()
    assert repr(member) == "<epcomm group: rank 1 of 2, rendezvous, closed>"


def test_a_forgotten_group_warns_and_frees_its_socket():
    place = loopback()
    creations = [Task(join, rank, 2, place, None, 30) for rank in range(2)]
    groups = [task.result() for task in creations]
    del creations
    descriptors = open_descriptors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups.pop()
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert "rank 1 of 2" in str(caught[0].message)
    assert open_descriptors() == descriptors - 1
    groups[0].close()


_FORK = """
import os, sys
from helpers import meeting
place = meeting.loopback()
tasks = [meeting.Task(meeting.join, rank, 2, place) for rank in range(2)]
groups = [task.result() for task in tasks]
child = os.fork()
if not child:
    for group in groups:
        try:
            group.barrier()
        except Exception as error:
            assert "belongs to process" in str(error), error
        else:
            os._exit(3)
        group.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
calls = [meeting.Task(group.all_gather, b"alive") for group in groups]
assert [call.result() for call in calls] == [[b"alive"] * 2] * 2
for group in groups:
    group.close()
print("fine")
"""


def test_a_forked_child_cannot_disturb_the_parents_group():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK],
        env=meeting.clean_environment(PYTHONPATH=f"{meeting.ROOT}{os.pathsep}{meeting.ROOT / 'tests'}"),
        capture_output=True, text=True, timeout=30,
    )
    assert done.stdout == "fine\n", done.stdout + done.stderr


def test_a_broken_frame_of_a_member_names_it():
    def body(group):
        group.barrier()
        if group.rank == 2:
            group._host._sock.sendall(frames.HEADER.pack(frames.MAGIC, frames.VERSION, frames.Kind.DATA, 1 << 40))
            time.sleep(0.3)
            return None
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        return caught.value.peer, str(caught.value)

    for peer, text in ranks(3, body)[:2]:
        assert peer == 2 and f"a frame of {1 << 40} bytes" in text and "are allowed" in text
