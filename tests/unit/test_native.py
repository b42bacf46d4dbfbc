"""Builds and runs the native programs, plain and under each sanitizer that this machine has."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers.native import build, check, run

pytestmark = pytest.mark.timeout(900)
# Building takes half a minute each on two idle cores, once; the runs take seconds.
VARIANTS = [pytest.param(name, id=name or "plain", marks=[pytest.mark.slow] if name else []) for name in build.OPTIMISE]


@pytest.fixture(scope="module", params=VARIANTS)
def sanitize(request):
    """Each way to build; one that is not to be had here is a skip with the compiler's reason."""
    reason = build.missing_sanitizer(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def needs_verbs_headers():
    """Skip where setup.py too skips what is built on verbs."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <infiniband/verbs.h>\n")
        if subprocess.run([*build.compiler(), "-fsyntax-only", str(source)], capture_output=True).returncode:
            pytest.skip("no <infiniband/verbs.h> (libibverbs-dev)")


def test_heap(sanitize):
    check("heap_test", sanitize)


def test_formats(sanitize):
    check("formats_test", sanitize)


def test_quantized_rows_of_kernels(sanitize):
    """The kernels' own text as warps of a host."""
    check("quantize_test", sanitize)


def test_sums_of_kernels(sanitize):
    """The kernels' own text as warps of a host."""
    check("sums_test", sanitize, "--one-in", "4" if sanitize else "1")


@pytest.mark.parametrize(("program", "file", "right", "wrong"), [
    ("quantize_test", "quantize_shared.cuh", "inverse, r, 2)", "inverse, 0, 2)"),
    ("quantize_test", "quantize_shared.cuh", "__any_sync(~0u, amax >= 0x7f800000u)", "amax >= 0x7f800000u"),
    ("sums_test", "sums.cuh", "R::add(sum, x[r][u])", "R::add(sum, x[kRows - 1 - r][u])"),
    ("sums_test", "sums.cuh", "* 512 < left", "* 512 <= left"),
])  # fmt: skip
def test_a_planted_mistake_of_a_kernel_is_found(tmp_path, monkeypatch, program, file, right, wrong):
    """Another round's scale, lanes that part, ranks in another order, a load behind the row's end."""
    for folder in ("cuda", "include", "backends", "tests/native"):
        shutil.copytree(build.ROOT / folder, tmp_path / folder)
    text = (tmp_path / "cuda" / file).read_text()
    assert text.count(right) == 1
    (tmp_path / "cuda" / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(build, "ROOT", tmp_path)
    status, output = run(program, "")
    assert status == 1 and "is false" in output, output[-2000:]


@pytest.mark.parametrize("over", ["direct", "far", "mixed", "shm"])
def test_engine(sanitize, over):
    """Plain loops under the sanitizers: they do not see what vector instructions touch."""
    isa = ["--isa", "plain"] if sanitize else []
    output = check("engine_test", sanitize, "--over", over, "--programs", "40", *isa)
    assert "40 programs, 1600 calls, all as the oracle says" in output


def test_engine_with_the_loops_of_this_machine(sanitize):
    check("engine_test", sanitize, "--programs", "20", "--seed", "1000")


def test_engine_with_slow_links(sanitize):
    check("engine_test", sanitize, "--over", "far", "--programs", "6", "--delay-us", "400", "--seed", "2000")


def test_faults(sanitize):
    check("faults_test", sanitize)


def test_shm(sanitize):
    check("shm_test", sanitize)


def test_rdma(sanitize):
    """Queue pairs over scripted verbs; needs libibverbs' headers, not the library."""
    needs_verbs_headers()
    check("rdma_test", sanitize)


def test_proxy(sanitize):
    """The command ring and the proxy over a scripted NIC."""
    needs_verbs_headers()
    check("proxy_test", sanitize)


def test_ibrc(sanitize):
    """The whole backend over the software HCA, ranks as threads."""
    needs_verbs_headers()
    check("ibrc_test", sanitize)


@pytest.mark.parametrize("puts, disorder", [(100_000, 0), (20_000, 5)])
def test_many_puts_between_processes(tmp_path, puts, disorder):
    """Log-uniform sizes on 8 channels over two ports, each payload checked when its signal is seen."""
    needs_verbs_headers()
    program = build.build("put_stress")
    common = ["--provider", "soft", "--paths", "soft0:1:0,soft1:1:0", "--folder", str(tmp_path), "--puts", str(puts),
              "--soft-seed", str(disorder)]  # fmt: skip
    ranks = [subprocess.Popen([str(program), "--rank", str(rank), *common], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for rank in range(2)]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0 and f"{puts // 2} puts in" in output, output


def test_mlx5(sanitize):
    """A million work requests: rdma-core's bytes where its header is installed, else written down vectors."""
    check("mlx5_test", sanitize)


def test_softhca(sanitize):
    """200,000 work requests at depth 64, 32 producers, 10 seeds of chaos, every fault, planted mistakes."""
    needs_verbs_headers()
    check("softhca_test", sanitize)


def test_ibgda(sanitize):
    """Alone and shared, disorder, every ending, a port that dies with and without failover."""
    needs_verbs_headers()
    check("ibgda_test", sanitize)


@pytest.mark.parametrize(("over", "plant"), [("far", "overtake"), ("far", "no-quiet"), ("mixed", "overtake")])
def test_a_planted_mistake_of_the_transport_is_found(over, plant):
    """The oracle sees rows that came late or from memory that was reused."""
    status, output = run("engine_test", "", "--over", over, "--plant", plant, "--programs", "40")
    assert status == 1, output[-2000:]
    assert "is false" in output


@pytest.mark.slow
def test_a_planted_data_race_is_found():
    """ThreadSanitizer sees that nothing orders the rows before their signal."""
    reason = build.missing_sanitizer("thread")
    if reason:
        pytest.skip(reason)
    status, output = run("engine_test", "thread", "--over", "direct", "--plant", "unordered", "--isa", "plain",
                         "--programs", "40")
    assert status != 0
    assert "WARNING: ThreadSanitizer: data race" in output


def test_the_cache_sees_every_change(tmp_path, monkeypatch):
    """A changed header or source makes a new object; nothing changed makes none."""
    for folder in build.HEADER_FOLDERS:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    header, source = tmp_path / "include" / "answer.h", tmp_path / "tests" / "native" / "probe.cpp"
    header.write_text("constexpr int kAnswer = 3;\n")
    source.write_text('#include "answer.h"\nint main() { return kAnswer; }\n')
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "PROGRAMS", {"probe": []})
    first = build.build("probe")
    assert build.build("probe") == first
    assert subprocess.run([str(first)]).returncode == 3
    header.write_text("constexpr int kAnswer = 4;\n")
    second = build.build("probe")
    assert second != first
    assert subprocess.run([str(second)]).returncode == 4
