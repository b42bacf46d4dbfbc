"""Fixtures and the one check at the end of every session: nothing is left behind."""

import functools
import importlib
import os
import re
import signal
import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from helpers import arrays, pool
from helpers.job import Jobs

os.environ[pool.SESSION_VARIABLE] = uuid.uuid4().hex
_place = pool.LocalPlace()  # where ranks run
_only = None  # names of backends, if not all
REQUIRED = {name.strip() for name in os.environ.get("EPCOMM_TEST_REQUIRE", "").split(",") if name.strip()}


def pytest_addoption(parser):
    group = parser.getgroup("epcomm")
    group.addoption("--backend", metavar="NAMES", help="only these backends, separated by commas")
    group.addoption("--sizes", metavar="N,M", help="sizes of groups, instead of the usual ones: one for each GPU")
    group.addoption("--soft", action="store_true", help="backends that need NICs, over the software HCA")
    group.addoption("--rxe", choices=("quick", "all"), help="on nodes of a virtual machine: tests/rxe/README.md")


def pytest_configure(config):
    """What tests there are depends on the options."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background so
        signal.signal(signal.SIGINT, signal.default_int_handler)  # and ranks would inherit it
    global _place, _only
    names = config.getoption("--backend") or ("ibrc,shm_ibrc" if config.getoption("--rxe") else "")
    _only = [name for name in names.split(",") if name] or None
    if config.getoption("--soft"):
        from epcomm import _registry

        os.environ.update(pool.SoftPlace.SETTINGS)  # probes see it too
        _place = pool.SoftPlace()
        _only = _only or [backend.name for backend in _registry.BACKENDS if backend.needs_nics]
    if config.getoption("--sizes"):
        try:
            _place.sizes = tuple(int(size) for size in config.getoption("--sizes").split(","))
        except ValueError:
            raise pytest.UsageError(f"--sizes {config.getoption('--sizes')}: expected numbers, as 4,8") from None
    if config.getoption("--rxe"):
        sys.path.insert(0, str(Path(__file__).resolve().parent / "rxe"))
        from place import NodesPlace

        _place = NodesPlace(say=lambda text: print(f"rxe: {text}", file=sys.__stderr__, flush=True))
        os.environ[pool.SLOWNESS_VARIABLE] = str(_place.slowness)


def pytest_generate_tests(metafunc):
    """Backends and sizes of groups."""
    for name, rows in (("backend", _backends), ("host_backend", _host_backends)):
        if name in metafunc.fixturenames and not _has_own(metafunc, name):
            metafunc.parametrize(name, rows(), indirect=True, ids=lambda row: row[0], scope="session")
    if "num_ranks" in metafunc.fixturenames and not _has_own(metafunc, "num_ranks"):
        metafunc.parametrize("num_ranks", _place.sizes, indirect=True, ids=pool.size_id, scope="session")
    if "gpu_num_ranks" in metafunc.fixturenames:
        sizes = _place.sizes if metafunc.config.getoption("--sizes") else (1, 2, 3)
        metafunc.parametrize("gpu_num_ranks", sizes, ids=pool.size_id, scope="session")


def _has_own(metafunc, name):
    """Whether the test, or a fixture of its own module, says what `name` is."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if name in (re.split(r"\s*,\s*", names) if isinstance(names, str) else names):
            return True
    found = metafunc._arg2fixturedefs.get(name, ())
    return bool(found) and found[-1].baseid.endswith(".py")


@functools.cache
def _backends():
    """(name, reason why not) of each row of the registry that is asked for."""
    from epcomm import _registry
    from epcomm.errors import EpcommError

    rows = []
    for backend in _registry.BACKENDS:
        if _only and backend.name not in _only:
            continue
        reason = None
        try:
            module = importlib.import_module(f"epcomm._{backend.name}")
            if _place.probes_here:
                module.probe()
        except (ImportError, EpcommError) as error:
            reason = f"backend {backend.name}: {error}"
        rows.append((backend.name, reason))
    return rows


def _need(name, reason):
    """Skip for a reason, or fail if the environment says that this must be tested."""
    if reason is None:
        return
    if name in REQUIRED:
        pytest.fail(f"EPCOMM_TEST_REQUIRE names {name}, but: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def need():
    """``need(name, reason)``: skip, or fail where EPCOMM_TEST_REQUIRE has the name; no reason, nothing happens."""
    return _need


@pytest.fixture(scope="session")
def backend(request):
    """Name of each backend that this machine can load."""
    name, reason = request.param
    _need(name, reason)
    return name


# Contract tests whose cases run on arrays of the backend's own memory; the others write NumPy arrays themselves.
_ON_GPU = {"test_any_routing.py", "test_combine.py", "test_dispatch.py"}


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run where ranks run; with the reason, what hands host arrays to device memory."""
    from epcomm import _registry

    kept = [item for item in items if _place.takes(item, config.getoption("--rxe"))]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    cuda = {backend.name for backend in _registry.BACKENDS if backend.needs_cuda}
    for item in items:
        row = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        if row and row[0] in cuda and row[1] is None and item.path.name not in _ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"gives host arrays; {row[0]} takes GPU arrays"))


@pytest.fixture(scope="session")
def num_ranks(request):
    """Group sizes of the contract."""
    return request.param


@pytest.fixture
def no_launcher(monkeypatch):
    """A command line that starts its own ranks, wherever the tests themselves run."""
    from epcomm.config import LAUNCHER_VARIABLES

    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture(params=arrays.KINDS)
def kind(request):
    """Array kinds of the contract."""
    _need(request.param, arrays.why_not(request.param))
    return request.param


@pytest.fixture(scope="session")
def place():
    """Where ranks run."""
    return _place


@pytest.fixture(scope="session")
def pools():
    """The session's :class:`helpers.pool.PoolCache`."""
    cache = pool.PoolCache(place=_place)
    yield cache
    cache.close()


@pytest.fixture
def ranks(pools, backend, num_ranks):
    """A pool of `num_ranks` ranks."""
    return pools.get(num_ranks, backend)


@pytest.fixture
def two(pools, backend):
    """A pool of two ranks."""
    return pools.get(2, backend)


@pytest.fixture
def three(pools, backend):
    """A pool of three ranks."""
    return pools.get(3, backend)


@pytest.fixture(scope="module")
def _jobs():
    made = Jobs(_place)
    yield made
    made.close()


def _host_backends():
    from epcomm import _registry

    of_devices = {backend.name for backend in _registry.BACKENDS if backend.needs_cuda}
    return [row for row in _backends() if row[0] not in of_devices]


@pytest.fixture(scope="session")
def host_backend(request):
    """Name of each backend on host memory: what faults do is tested with host arrays so far."""
    name, reason = request.param
    _need(name, reason)
    return name


@pytest.fixture
def job(_jobs, host_backend):
    """``job(3)`` is a :class:`helpers.job.Job` of three ranks that may be killed; more arguments: one of its own."""

    def get(num_ranks, **kwargs):
        return _jobs.fresh(num_ranks, host_backend, **kwargs) if kwargs else _jobs.get(num_ranks, host_backend)

    yield get
    _jobs.end_fresh()


def _segments():
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if "epcomm" in path.name} if folder.is_dir() else set()


_segments_before = _segments()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Show what the kernel of the ranks' machine said beside what failed on it."""
    report = (yield).get_result()
    if report.failed and (said := _place.last_words()):
        report.sections.append(("machine", said))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail the session if a process or a shared-memory name of ours is left."""
    _place.close()
    left = [f"process {pid}: {command}" for pid, command in pool.processes_of_session()]
    left += [f"/dev/shm/{name}" for name in sorted(_segments() - _segments_before)]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line("left behind by this session:", red=True)
        for line in left:
            reporter.write_line(f"  {line}", red=True)
