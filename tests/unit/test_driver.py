"""The CUDA driver, found at run time: what is missing is one typed error with the reason, and nothing else breaks."""

import re

import pytest
from helpers import fake_cuda

from epcomm import _nvlink
from epcomm.errors import BackendUnavailableError, InvalidArgumentError

PROBE = """
from epcomm import _nvlink
try:
    _nvlink.probe()
    print("fine")
except Exception as error:
    print(type(error).__name__, error)
"""


def probe(library=None, **fake):
    done = fake_cuda.python(PROBE, library, **fake)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refused(said, *words):
    assert said.startswith("BackendUnavailableError nvlink: "), said
    for word in words:
        assert word in said


def test_each_symbol_is_asked_for_once():
    names = fake_cuda.symbols()
    assert len(names) > 35
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"cu[A-Z]\w+", name) for name in names)


def test_a_driver_that_has_everything():
    assert probe() == "fine"


def test_probe_makes_no_context():
    code = PROBE + "import ctypes; print(ctypes.CDLL('libcuda.so.1').fake_cuda_live(b'contexts'))"
    assert fake_cuda.python(code).stdout.split() == ["fine", "0"]


def test_no_driver(tmp_path):
    (tmp_path / "libcuda.so.1").touch()  # found before a real one, and no library
    refused(probe(str(tmp_path)), "no NVIDIA driver", "libcuda.so.1")


def test_an_old_driver():
    refused(probe(version=11080), "too old", "CUDA 11.8", "12.0")


def test_a_library_without_any_function():
    refused(probe(fake_cuda.compile_library("int nothing;")), "too old", "CUDA 0.0")


def test_a_driver_without_one_function():
    source = """
    extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
      *version = 12040;
      return 0;
    }"""
    refused(probe(fake_cuda.compile_library(source)), "CUDA 12.4", "has no cuInit")


def test_a_driver_that_does_not_start():
    refused(probe(init=100), "cuInit", "CUDA_ERROR_NO_DEVICE (100)", "as the fake was told")


def test_no_visible_gpu():
    refused(probe(gpus=""), "no GPU", "CUDA_VISIBLE_DEVICES")


def test_an_old_gpu():
    refused(probe(capability=75), "GPU 0 (Fake 0)", "7.5", "8.0")


@pytest.mark.parametrize("device", [-1, True, "cuda:0", 65536])
def test_device_is_an_index(device):
    with pytest.raises(InvalidArgumentError, match="device="):
        _nvlink.Backend({"device": device})


def test_share_is_one_of_the_ways():
    with pytest.raises(InvalidArgumentError, match="nvlink_share='pigeon'.*fabric"):
        _nvlink.Backend({"nvlink_share": "pigeon"})


def test_a_backend_object_needs_no_driver():
    backend = _nvlink.Backend()
    assert backend.name == "nvlink" and backend.share == "auto" and backend.heap_ptr == 0
    backend.close()
    backend.close()


CREATE = """
import epcomm, sys
assert not {"torch", "cupy"} & set(sys.modules)
try:
    epcomm.Communicator(num_experts=2, num_topk=1, hidden=8, max_tokens_per_rank=4, timeout_s=20, **OPTIONS).close()
    print("fine")
except Exception as error:
    print(type(error).__name__, error)
"""


def create(options, library=None, **fake):
    done = fake_cuda.python(CREATE.replace("OPTIONS", repr(options)), library, **fake)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("options", [{"device": "cuda:0"}, {"device": 0}, {"device": "cuda:0", "backend": "nvlink"}])
def test_a_gpu_without_a_driver_is_unavailable(tmp_path, options):
    (tmp_path / "libcuda.so.1").touch()
    said = create(options, str(tmp_path))
    assert said.startswith("BackendUnavailableError"), said
    assert "nvlink: rank 0: nvlink: no NVIDIA driver" in said


def test_a_gpu_that_runs_no_kernels_is_a_typed_error():
    said = create({"device": "cuda:0"})
    assert said.startswith(("CudaError rank 0: ", "UnsupportedError rank 0: ")), said


def test_the_default_stays_on_the_host():
    assert create({}) == "fine"


def test_a_device_out_of_range_names_the_range():
    code = "from epcomm import _nvlink\n_nvlink.Backend({'device': 3}).alloc_heap(1 << 16)"
    done = fake_cuda.python(code, gpus="0,1")
    assert "BackendUnavailableError: device=3: this process sees 2 GPUs" in done.stderr


def test_unavailable_is_what_probe_raises_here_if_anything():
    try:
        _nvlink.probe()
    except BackendUnavailableError as error:
        assert "nvlink: " in str(error)
