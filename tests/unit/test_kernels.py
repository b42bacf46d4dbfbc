"""Device code without a GPU: everything compiles, keeps to its registers, and the cache cannot be fooled."""

import importlib
import importlib.util
import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest

from epcomm import CudaError, InternalError, InvalidArgumentError, UnsupportedError, _kernel_cache, _paths, kernels
from epcomm._nvrtc import CompileFailed, Resources, resources


def nvrtc_file(major):
    """Library file of a wheel, or None; several majors lie beside each other."""
    found = importlib.util.find_spec("nvidia")
    folders = list(found.submodule_search_locations) if found is not None else []
    files = [path for folder in folders for path in Path(folder).glob(f"*/lib/libnvrtc.so.{major}")]
    return files[0] if files else None


@pytest.fixture(scope="module", params=("nvrtc13", "nvrtc12"))
def nvrtc(request, need):
    """The compilers of both majors: CuPy's where it has that one, else the library file of a wheel."""
    major = int(request.param[-2:])
    try:
        found = kernels.compiler()
        if found.version[0] == major:
            return found
    except UnsupportedError:
        pass
    file = nvrtc_file(major)
    need(request.param, None if file else f"no NVRTC {major} wheel")
    return kernels.compiler(file)


class FakeCompiler:
    """Compiles nothing; its image is made of what it was given."""

    version = (13, 0)
    archs = (80, 90, 100)
    kernel = "epcomm_one"

    def __init__(self):
        self.calls = 0

    def compile(self, name, source, headers, options):
        self.calls += 1
        text = f"{name}{source}{sorted(headers.items())}{options}".encode()
        return b"\x7fELF" + text, f"ptxas info    : Compiling entry function '{self.kernel}' for 'sm_90a'\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small cuda/ and include/ of our own, with one unit."""
    (tmp_path / "include" / "epcomm" / "device").mkdir(parents=True)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "one.cu").write_text('#include "epcomm/a.h"\n#ifdef NEVER\n#include <near.cuh>\n#endif\n')
    (tmp_path / "cuda" / "near.cuh").write_text("#include <cstdint>\n// near\n")
    (tmp_path / "include" / "epcomm" / "a.h").write_text('#pragma once\n  #  include "epcomm/b.h"\n')
    (tmp_path / "include" / "epcomm" / "b.h").write_text('#include "epcomm/a.h"\n')
    (tmp_path / "include" / "epcomm" / "device" / "policy.cuh").write_text("// policy\n")
    monkeypatch.setattr(_paths, "include_dir", lambda: tmp_path / "include")
    monkeypatch.setattr(_paths, "cuda_dir", lambda: tmp_path / "cuda")
    return tmp_path


ONE = kernels.Unit("one.cu", ("epcomm_one",))


# --------------------------------------------------------------------------------------------- compiling


@pytest.mark.parametrize("capability", kernels.ARCHS, ids=lambda pair: "sm_{}{}".format(*pair))
@pytest.mark.parametrize("unit", kernels.UNITS, ids=str)
def test_every_unit_compiles_without_spills(nvrtc, unit, capability):
    built = kernels.build(unit, kernels.arch_of(capability, nvrtc), nvrtc)
    assert built.image.startswith(b"\x7fELF")
    assert "warning" not in built.log.lower(), built.log
    for name in unit.kernels:
        taken = built.resources[name]
        assert 0 < taken.registers <= 255 and taken.shared_bytes <= 48 * 1024, (name, taken)
        assert taken.spill_bytes == 0, (name, taken)
        assert taken.stack_bytes == 0 or name in unit.may_use_stack, (name, taken)


WIRES = ("nvlink", "ibrc", "ibgda")
# Every member of a policy, and for `ibgda` the path for many posters too.
WIRE_KERNEL = """
using P = epcomm::device::EPCOMM_WIRE;
extern "C" __global__ void epcomm_one(P::Ctx ctx, int peer, epcomm::uint64_t* out) {
  P::put(ctx, peer, 0, 64, 128, 7168);
  if (threadIdx.x == 0) P::signal(ctx, peer, 0, 8, 1);
  P::put_signal(ctx, peer, 1, 64, 128, 7168, 16, 1);
  if (threadIdx.x != 0) return;
  epcomm::device::WaitInfo info;
  out[0] = P::wait(ctx, peer, 8, 1, 0, &info) + P::quiet(ctx, peer, 0, 1000);
  out[1] = info.seen + (P::peer_ptr(ctx, peer, 0) != nullptr);
#ifdef MANY
  using Q = epcomm::mlx5::Queue<epcomm::device::GpuMemory>;
  auto* const queue = reinterpret_cast<epcomm::device::IbgdaQueue*>(ctx.queues);
  const epcomm::uint64_t number = Q::reserve(&queue->numbers, 1);
  while (!Q::has_room(queue->rings, &queue->numbers, number)) Q::poll_shared(queue->rings, &queue->numbers, 4);
  const epcomm::uint8_t bytes[3] = {1, 2, 3};
  Q::set(queue->rings, number, epcomm::mlx5::write_inline(number, queue->rings.qpn, 0, {64, 7}, bytes, 3));
  while (!Q::is_next(&queue->numbers, number)) epcomm::device::GpuMemory::pause();
  Q::commit(&queue->numbers, number, 1);
  while (!Q::ring_ready(queue->rings, &queue->numbers)) {}
#endif
}
"""


@pytest.mark.parametrize("capability", kernels.ARCHS, ids=lambda pair: "sm_{}{}".format(*pair))
@pytest.mark.parametrize("wire", WIRES)
def test_every_policy_compiles(nvrtc, tmp_path, monkeypatch, wire, capability):
    monkeypatch.setattr(_paths, "cuda_dir", lambda: tmp_path)
    (tmp_path / "one.cu").write_text(("#define MANY\n" if wire == "ibgda" else "") + WIRE_KERNEL)
    unit = ONE._replace(includes=(f"epcomm/device/{wire}.cuh",), defines=(("EPCOMM_WIRE", wire),))
    built = kernels.build(unit, kernels.arch_of(capability, nvrtc), nvrtc)
    assert built.image.startswith(b"\x7fELF") and "warning" not in built.log.lower(), built.log


@pytest.mark.parametrize("wire", ["ibrc", "ibgda"])
@pytest.mark.parametrize("unit", [kernels.DISPATCH, kernels.COMBINE], ids=str)
def test_the_engine_compiles_over_a_policy_without_pointers(nvrtc, unit, wire):
    over = unit._replace(includes=(f"epcomm/device/{wire}.cuh",), defines=(("EPCOMM_WIRE", wire),))
    built = kernels.build(over, "sm_90a", nvrtc)
    assert set(unit.kernels) <= set(built.resources) and "warning" not in built.log.lower(), built.log


def test_units_name_files_and_kernels_that_there_are():
    files = {path.name for path in _paths.cuda_dir().glob("*.cu")}
    assert {unit.file for unit in kernels.UNITS} == files
    for file in files:
        text = (_paths.cuda_dir() / file).read_text()
        plain = set(re.findall(r"^\s+(epcomm_\w+)\(const __grid_constant__", text, re.MULTILINE))
        listed = {name for unit in kernels.UNITS if unit.file == file for name in unit.kernels}
        assert plain <= listed


def test_options_are_those_that_the_sums_need():
    for option in ("-ftz=false", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-std=c++17", "--no-cache"):
        assert option in kernels.OPTIONS
    assert not any(option.startswith(("-I", "--include-path")) for option in kernels.OPTIONS)


def test_a_product_and_a_sum_stay_two_instructions(nvrtc, tree):
    """Contraction shows as a fused instruction: compiled with and without, the images must differ."""
    body = 'extern "C" __global__ void epcomm_one(float* x) { x[0] = x[1] * x[2] + x[3]; }\n'
    (tree / "cuda" / "one.cu").write_text(body)
    ours = kernels.build(ONE, "sm_90a", nvrtc).image
    (tree / "cuda" / "one.cu").write_text(body.replace("x[1] * x[2] + x[3]", "__fadd_rn(__fmul_rn(x[1], x[2]), x[3])"))
    apart = kernels.build(ONE, "sm_90a", nvrtc).image
    (tree / "cuda" / "one.cu").write_text(body.replace("x[1] * x[2] + x[3]", "__fmaf_rn(x[1], x[2], x[3])"))
    fused = kernels.build(ONE, "sm_90a", nvrtc).image
    assert ours == apart != fused


def test_a_source_that_does_not_compile_is_a_typed_error_with_the_log(nvrtc, tree):
    (tree / "cuda" / "one.cu").write_text('extern "C" __global__ void epcomm_one() { no_such_thing(); }\n')
    with pytest.raises(CudaError, match=r"one\.cu does not compile for sm_90a with NVRTC 1[23]\.\d+: ") as caught:
        kernels.build(ONE, "sm_90a", nvrtc)
    assert 'one.cu(1): error: identifier "no_such_thing" is undefined' in str(caught.value)


def test_an_unknown_architecture_is_a_typed_error(nvrtc, tree):
    with pytest.raises(CudaError, match="sm_10"):
        kernels.build(ONE, "sm_10", nvrtc)


def test_only_our_folders_are_searched(nvrtc, tree, monkeypatch):
    monkeypatch.chdir(tree)
    (tree / "stranger.h").write_text("// not ours\n")
    (tree / "cuda" / "one.cu").write_text('#include "stranger.h"\n')
    with pytest.raises(CudaError, match=r"stranger\.h"):
        kernels.build(ONE, "sm_90a", nvrtc)


def test_a_kernel_that_is_not_there_is_found_at_once(tree):
    with pytest.raises(InternalError, match="no kernel epcomm_two; compiled: epcomm_one"):
        kernels.build(ONE._replace(kernels=("epcomm_one", "epcomm_two")), "sm_90a", FakeCompiler())


def test_a_log_that_says_nothing_is_no_error(tree):
    fake = FakeCompiler()
    fake.compile = lambda *arguments: (b"\x7fELF", "")
    assert kernels.build(ONE, "sm_90a", fake).resources == {"epcomm_one": Resources(0, 0, 0, 0)}


def test_both_ways_to_one_library_give_the_same_image(tree, need):
    file = nvrtc_file(13)
    try:
        cupys = kernels.compiler()
    except UnsupportedError as error:
        need("nvrtc13", str(error))
    need("nvrtc13", None if file else "no NVRTC 13 wheel")
    given = kernels.compiler(file)
    if cupys.version != given.version:
        pytest.skip(f"CuPy found NVRTC {cupys.version}, the wheel is {given.version}")
    (tree / "cuda" / "one.cu").write_text('extern "C" __global__ void epcomm_one(int* x) { *x = 7; }\n')
    one, other = (kernels.build(ONE, "sm_90a", which) for which in (cupys, given))
    assert one.image == other.image and one.resources == other.resources


@pytest.mark.parametrize(
    ("capability", "archs", "wanted"),
    [
        ((8, 0), (80, 90, 100), "sm_80"),
        ((8, 9), (80, 89, 90), "sm_89"),
        ((8, 7), (80, 86, 90), "sm_86"),
        ((9, 0), (80, 90, 100), "sm_90a"),
        ((10, 0), (80, 90, 100), "sm_100a"),
        ((10, 3), (90, 100, 103), "sm_103a"),
        ((10, 3), (90, 100, 120), "sm_100"),
        ((12, 1), (90, 120, 121), "sm_121a"),
    ],
)
def test_architecture_of_a_device(capability, archs, wanted):
    fake = FakeCompiler()
    fake.archs = archs
    assert kernels.arch_of(capability, fake) == wanted


@pytest.mark.parametrize(
    ("capability", "text"),
    [((7, 5), "sm_75; kernels are built for sm_80"), ((12, 0), r"sm_120; NVRTC 13\.0 builds for sm_100 at most")],
)
def test_devices_that_are_too_old_or_too_new(capability, text):
    """B59: the error names both architectures."""
    with pytest.raises(UnsupportedError, match=text):
        kernels.arch_of(capability, FakeCompiler())


@pytest.mark.parametrize(
    ("torch", "cupy", "nvrtc", "driver", "text"),
    [
        (13, 13, 13, 13, None),
        (12, 12, 12, 12, None),
        (12, 12, 12, 13, None),
        (None, 12, 12, 13, None),
        (None, 13, 13, 14, None),
        (13, 12, 12, 13, r"torch 13, CuPy 12, NVRTC 12, driver 13; install epcomm\[cuda13\]"),
        (12, 13, 13, 13, r"torch 12, CuPy 13.*install epcomm\[cuda12\]"),
        (None, 13, 12, 13, r"CuPy 13, NVRTC 12, driver 13; install epcomm\[cuda13\]"),
        (None, 12, 13, 12, r"install epcomm\[cuda12\]"),
        (None, 13, 13, 12, r"driver 12; update the driver, or install epcomm\[cuda12\]"),
        (13, 13, 13, 12, r"update the driver, or install epcomm\[cuda12\] .* and a torch for that CUDA"),
    ],
)
def test_cuda_majors(torch, cupy, nvrtc, driver, text):
    problem = kernels.versions_problem(torch, cupy, nvrtc, driver)
    assert problem is None if text is None else re.search(text, problem), problem


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"install epcomm\[cuda13\] or epcomm\[cuda12\]"):
        kernels.load(kernels.LAYOUT, 0)


def test_without_a_driver_there_is_a_typed_error():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.driverGetVersion() != 0:
        pytest.skip("this machine has a CUDA driver")
    with pytest.raises(UnsupportedError, match="no CUDA driver"):
        kernels.load(kernels.LAYOUT, 0)


def test_only_one_file_names_cupys_compiler():
    root = Path(kernels.__file__).parent
    for path in [*root.rglob("*.py"), *root.rglob("*.pyx")]:
        if path.name != "kernels.py":
            text = path.read_text(encoding="utf-8")
            for word in ("cupy.cuda.nvrtc", "cuda import nvrtc", "RawModule", "RawKernel", "compile_with_cache"):
                assert word not in text, (path, word)


# ------------------------------------------------------------------------------------------------ report

LOG_13 = """
ptxas info    : 12 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     128 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 192 bytes cumulative stack size
ptxas info    : Compile time = 33.210 ms
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 12304 bytes smem, 372 bytes cmem[0]
"""


def test_resources_are_read_from_the_log():
    assert resources(LOG_13) == {"first": Resources(32, 0, 192, 24), "second": Resources(255, 12304, 0, 8)}
    assert resources(LOG_13.replace("ptxas         .     ", "    ")) == resources(LOG_13)
    assert resources("") == {}


def test_a_spill_is_seen(nvrtc, tree):
    """The report is worth something: a kernel without enough registers shows in it."""
    (tree / "cuda" / "one.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) epcomm_one(float* x, int n) {\n'
        "  float a[96];\n#pragma unroll\n  for (int i = 0; i < 96; ++i) a[i] = x[i * n];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < 96; ++i) x[i] = a[95 - i] * a[i];\n}\n"
    )
    taken = kernels.build(ONE, "sm_90a", nvrtc).resources["epcomm_one"]
    assert taken.spill_bytes > 0 and taken.registers <= 32


def test_the_report_has_every_kernel(nvrtc, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "UNITS", kernels.UNITS[:1])
    monkeypatch.setattr(kernels, "compiler", lambda library=None: nvrtc)
    assert kernels.main([]) == 0
    text = capsys.readouterr().out
    assert "epcomm_layout" in text and "sm_90a" in text


# ----------------------------------------------------------------------------------------------- sources


def test_every_header_that_is_reached_is_taken_whatever_its_condition(tree):
    source, headers = kernels.sources(ONE)
    assert source.startswith('#line 1 "one.cu"\n')
    assert set(headers) == {"epcomm/a.h", "epcomm/b.h", "near.cuh"}
    source, headers = kernels.sources(ONE._replace(includes=("epcomm/device/policy.cuh",)))
    assert source.startswith('#include "epcomm/device/policy.cuh"\n#line')
    assert "epcomm/device/policy.cuh" in headers


def test_an_include_by_a_macro_is_refused(tree):
    (tree / "include" / "epcomm" / "b.h").write_text("#include POLICY\n")
    with pytest.raises(InternalError, match="#include POLICY"):
        kernels.sources(ONE)


# ------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def private(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def test_a_unit_is_compiled_once(tree, private):
    fake = FakeCompiler()
    first = kernels.build(ONE, "sm_90a", fake, private)
    again = kernels.build(ONE, "sm_90a", fake, private)
    assert fake.calls == 1 and first == again and again.path.read_bytes() == first.image
    assert (again.path.stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize("changed", ["source", "header", "hidden header", "arch", "define", "version"])
def test_whatever_decides_about_the_image_is_in_the_key(tree, private, changed):
    fake, unit, arch = FakeCompiler(), ONE, "sm_90a"
    kernels.build(unit, arch, fake, private)
    if changed == "source":
        (tree / "cuda" / "one.cu").write_text("// other\n")
    elif changed == "header":
        (tree / "include" / "epcomm" / "b.h").write_text("// other\n")
    elif changed == "hidden header":
        (tree / "cuda" / "near.cuh").write_text("// other\n")
    elif changed == "arch":
        arch = "sm_80"
    elif changed == "define":
        unit = unit._replace(defines=(("EPCOMM_X", 1),))
    else:
        fake.version = (13, 1)
    kernels.build(unit, arch, fake, private)
    assert fake.calls == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone", "note cut", "note empty", "note of a stranger"])
def test_a_damaged_entry_is_compiled_again_and_replaced(tree, private, damage):
    fake = FakeCompiler()
    good = kernels.build(ONE, "sm_90a", fake, private)
    (note,) = private.glob("*.json")
    image = good.path
    if damage == "cut":
        image.write_bytes(good.image[:-1])
    elif damage == "flipped":
        image.write_bytes(good.image[:-1] + bytes([good.image[-1] ^ 1]))
    elif damage == "empty":
        image.write_bytes(b"")
    elif damage == "gone":
        image.unlink()
    elif damage == "note cut":
        note.write_text(note.read_text()[:-9])
    elif damage == "note empty":
        note.write_text("")
    else:
        note.write_text("[1, 2]")
    again = kernels.build(ONE, "sm_90a", fake, private)
    assert fake.calls == 2 and again.path.read_bytes() == good.image
    assert kernels.build(ONE, "sm_90a", fake, private) == again and fake.calls == 2
    assert not [path for path in private.iterdir() if path.name.startswith(".")]


def test_a_full_disk_costs_the_cache_only(tree, private, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_kernel_cache, "_put", full)
    built = kernels.build(ONE, "sm_90a", FakeCompiler(), private)
    assert built.path is None and built.image
    assert "No space left" in caplog.text


def test_the_folder_is_made_private(tmp_path):
    old = os.umask(0)
    try:
        made = _kernel_cache.folder({"EPCOMM_CACHE_DIR": str(tmp_path / "a" / "b")})
    finally:
        os.umask(old)
    assert made == tmp_path / "a" / "b" and made.stat().st_mode & 0o777 == 0o700
    assert _kernel_cache.folder({"EPCOMM_CACHE_DIR": str(made)}) == made


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777, 0o1777])
def test_a_folder_that_others_can_enter_is_refused(private, mode):
    private.chmod(mode)
    with pytest.raises(InvalidArgumentError, match=rf"EPCOMM_CACHE_DIR=.*mode {mode:04o}; .*chmod 700"):
        _kernel_cache.folder({"EPCOMM_CACHE_DIR": str(private)})


def test_a_folder_of_somebody_else_is_refused(private):
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    os.chown(private, 12345, 12345)
    with pytest.raises(InvalidArgumentError, match="a folder of uid 12345"):
        _kernel_cache.folder({"EPCOMM_CACHE_DIR": str(private)})


def test_what_is_no_folder_is_refused(private, tmp_path):
    (tmp_path / "link").symlink_to(private)
    (tmp_path / "file").write_text("")
    for name in ("link", "file", "file/below"):
        with pytest.raises(InvalidArgumentError, match="EPCOMM_CACHE_DIR="):
            _kernel_cache.folder({"EPCOMM_CACHE_DIR": str(tmp_path / name)})


def test_without_a_home_that_can_be_written_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _kernel_cache.folder({}) is None


def _race(folder, barrier, results):
    """One of several ranks that start together."""
    where = Path(folder)
    fake = FakeCompiler()
    barrier.wait(60)
    for number in range(20):
        built = kernels.build(kernels.LAYOUT._replace(kernels=("epcomm_one",), defines=(("N", number),)), "sm_90a",
                              fake, where)  # fmt: skip
        assert built.path.read_bytes() == built.image
    results.put((os.getpid(), fake.calls))


def test_eight_ranks_at_once(private):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    ranks = [context.Process(target=_race, args=(str(private), barrier, results)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    try:
        told = [results.get(timeout=90) for _ in ranks]
    finally:
        for rank in ranks:
            rank.join(30)
            if rank.is_alive():
                rank.kill()
                rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert all(20 >= calls >= 0 for _, calls in told) and sum(calls for _, calls in told) >= 20
    assert len(list(private.glob("*.json"))) == len(list(private.glob("*.cubin"))) == 20
    assert len(list(private.iterdir())) == 40


def test_a_failed_library_call_names_it(tmp_path, need):
    file = nvrtc_file(13) or nvrtc_file(12)
    need("nvrtc13", None if file else "no NVRTC wheel")
    with pytest.raises(CompileFailed, match="nvrtcCompileProgram: NVRTC_ERROR_INVALID_OPTION"):
        kernels.compiler(file).compile("x.cu", "", {}, ["--no-such-option"])
