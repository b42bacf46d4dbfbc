"""Device code: compiled at run time by NVRTC, kept as cubins, loaded once for the life of the process.

:data:`UNITS` lists every unit of ``cuda/``. :func:`load` gives the kernels of one on a device: from our cache, or
compiled now. Whoever launches kernels loads them at creation, since loading can wait for a busy device and must not
happen between calls or under stream capture. This is the only file that names CuPy's compiler.

CuPy's own way from source to kernel is not used: it adds ``-ftz=true`` behind the options, never aims at ``sm_90a``,
and its cache does not look into headers.
"""

import argparse
import logging
import os
import re
import struct
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from epcomm import _console, _kernel_cache, _paths
from epcomm._nvrtc import CompileFailed, Compiler, Library, Resources, resources
from epcomm.errors import CudaError, InternalError, UnsupportedError

_log = logging.getLogger("epcomm")

OPTIONS = (
    "-std=c++17",
    # Sums are defined to the last bit: each product and sum rounded, subnormals kept, IEEE division.
    "-ftz=false",
    "-fmad=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "--no-source-include",
    "--no-cache",  # NVRTC's own, with the driver: what comes from there has no log, and others may write it
    "--ptxas-options=-v",
)
ARCHS = ((8, 0), (9, 0), (10, 0))  # what CI compiles for
_LEAST = (8, 0)


class Unit(NamedTuple):
    """A ``.cu`` file with what it is specialised on.

    Attributes
    ----------
    file : str
        Name in ``cuda/``.
    kernels : tuple of str
        The ``extern "C"`` kernels it must have.
    includes : tuple of str
        Headers put in front of the file, such as a device policy.
    defines : tuple of (str, int or str)
        Macros.
    may_use_stack : tuple of str
        Kernels that may have a stack frame, for calls that are not inlined; CI refuses that of all others, and
        registers that are spilled of any.
    """

    file: str
    kernels: tuple[str, ...]
    includes: tuple[str, ...] = ()
    defines: tuple[tuple[str, Any], ...] = ()
    may_use_stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        extras = [*self.includes, *(f"{name}={value}" for name, value in self.defines)]
        return f"{self.file} ({', '.join(extras)})" if extras else self.file


_FLOATS = ("float32", "float16", "bfloat16")
LAYOUT = Unit("layout.cu", ("epcomm_layout",))
PERMUTE = Unit(
    "permute.cu",
    ("epcomm_permute_count", "epcomm_permute_scan", "epcomm_permute_place", "epcomm_permute_rows",
     "epcomm_permute_rows_any", "epcomm_permute_fill"),
)  # fmt: skip
UNPERMUTE = Unit(
    "unpermute.cu",
    ("epcomm_unpermute_invert", "epcomm_unpermute_check", *(f"epcomm_unpermute_{name}" for name in _FLOATS)),
)
CAST = Unit(
    "cast.cu",
    (*(f"epcomm_{way}_{name}" for way in ("quantize", "dequantize") for name in _FLOATS), "epcomm_convert"),
)
# The device engine's kernels reach peers through a policy; a wait that takes long is a call of its own.
_NVLINK: dict[str, Any] = {"includes": ("epcomm/device/nvlink.cuh",), "defines": (("EPCOMM_WIRE", "nvlink"),)}
DISPATCH = Unit(
    "dispatch.cu",
    ("epcomm_enter", "epcomm_send", "epcomm_send_quantized", "epcomm_collect", "epcomm_copy"),
    may_use_stack=("epcomm_enter", "epcomm_send", "epcomm_send_quantized"),
    **_NVLINK,
)
_REDUCE = ("epcomm_reduce_two", "epcomm_reduce_four", "epcomm_reduce_many")
COMBINE = Unit("combine.cu", ("epcomm_carry", *_REDUCE), may_use_stack=_REDUCE, **_NVLINK)
# Not the engine's: what `python -m epcomm bench` measures it against.
FLOOR = Unit("floor.cu", ("epcomm_floor_push", "epcomm_floor_pull", "epcomm_floor_delay"))
UNITS = (LAYOUT, PERMUTE, UNPERMUTE, CAST, DISPATCH, COMBINE, FLOOR)


class Built(NamedTuple):
    """A compiled unit. ``path`` is its file in the cache, None if it could not be kept."""

    image: bytes
    resources: dict[str, Resources]
    log: str
    path: Path | None = None


# sources --------------------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|([^\n]*))', re.MULTILINE)


def sources(unit: Unit) -> tuple[str, dict[str, str]]:
    """Text of a unit, and every header of ours that it reaches by whatever path through its conditions.

    NVRTC gets these texts and no folder, so that what is compiled is what the cache's key was made of. A header that
    is not ours is not found by NVRTC: names that only host compilers read stand behind ``#ifndef __CUDACC_RTC__``.
    """
    source = "".join(f'#include "{header}"\n' for header in unit.includes)
    source += f'#line 1 "{unit.file}"\n' + (_paths.cuda_dir() / unit.file).read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    new = [source]
    while new:
        for quoted, angled, other in _INCLUDE.findall(new.pop()):
            if other:
                raise InternalError(f"{unit}: #include {other}: expected a literal name, so that the cache sees it")
            name = quoted or angled
            if name not in headers and (text := _header(name)) is not None:
                headers[name] = text
                new.append(text)
    return source, headers


def _header(name: str) -> str | None:
    for folder in (_paths.include_dir(), _paths.cuda_dir()):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    return None


# compilers ------------------------------------------------------------------------------------------------------------


class _CupyCompiler:
    """The NVRTC that CuPy finds."""

    def __init__(self) -> None:
        from cupy.cuda import nvrtc

        self._nvrtc: Any = nvrtc
        self.version = tuple(nvrtc.getVersion())
        self.archs = list(nvrtc.getSupportedArchs())

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(
            source, name, [text.encode() for text in headers.values()], [header.encode() for header in headers]
        )
        try:
            try:
                nvrtc.compileProgram(program, tuple(options))
            except nvrtc.NVRTCError as error:
                raise CompileFailed(f"nvrtcCompileProgram: {error}\n{nvrtc.getProgramLog(program)}") from None
            return _whole(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program).rstrip("\0").strip()
        finally:
            nvrtc.destroyProgram(program)


def _whole(image: bytes) -> bytes:
    """The image as long as its header says: CuPy takes the last byte, a zero, for the end of a string."""
    program_headers, section_headers = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 54)
    end = max(program_headers + program_size * programs, section_headers + section_size * sections)
    return image.ljust(end, b"\0")


def compiler(library: str | Path | None = None) -> Compiler:
    """CuPy's NVRTC, or that of a library file.

    Raises
    ------
    UnsupportedError
        There is none; the text names the extra to install.
    """
    if library is not None:
        return Library(library)
    try:
        return _CupyCompiler()
    except Exception as error:  # ImportError without CuPy, RuntimeError without the library, and others
        raise UnsupportedError(f"no CUDA compiler: {error}; install {_extra(None)}") from error


def _extra(major: int | None) -> str:
    which = f"epcomm[cuda{major}]" if major in (12, 13) else "epcomm[cuda13] or epcomm[cuda12]"
    return f"{which} (CuPy and NVRTC)"


def arch_of(capability: tuple[int, int], nvrtc: Compiler) -> str:
    """Architecture to compile for: ``sm_90a`` and its like where the device has them.

    Raises
    ------
    UnsupportedError
        The device is older than 8.0, or newer than this NVRTC knows.
    """
    major, minor = capability
    number = 10 * major + minor
    version = "{}.{}".format(*nvrtc.version)
    if capability < _LEAST:
        raise UnsupportedError(f"the device is sm_{number}; kernels are built for sm_80 and newer")
    if number in nvrtc.archs:
        return f"sm_{number}a" if major >= 9 else f"sm_{number}"
    older = [arch for arch in nvrtc.archs if 10 * major <= arch < number]
    if not older:
        raise UnsupportedError(
            f"the device is sm_{number}; NVRTC {version} builds for sm_{max(nvrtc.archs)} at most: install a newer one"
        )
    return f"sm_{max(older)}"  # runs on every later device of the same major number


def versions_problem(torch: int | None, cupy: int, nvrtc: int, driver: int) -> str | None:
    """What is wrong with these CUDA majors, if anything; torch's is None without torch or CUDA in it.

    One process cannot hold libraries of two majors safely, and a driver runs what is not newer than itself.
    """
    wanted = torch if torch is not None else nvrtc if nvrtc == cupy else min(driver, 13)
    if driver >= max(cupy, nvrtc, wanted) and cupy == nvrtc == wanted:
        return None
    told = [f"CuPy {cupy}", f"NVRTC {nvrtc}", f"driver {driver}"]
    if torch is not None:
        told.insert(0, f"torch {torch}")
    if driver < wanted:
        wanted = driver
        advice = f"update the driver, or install {_extra(wanted)}"
        advice += " and a torch for that CUDA" if torch is not None and torch != wanted else ""
    else:
        advice = f"install {_extra(wanted)}"
    return f"CUDA majors differ: {', '.join(told)}; {advice}"


def check_versions(nvrtc: Compiler) -> None:
    """Compare the CUDA majors of torch, CuPy, NVRTC and driver.

    Raises
    ------
    UnsupportedError
        They do not fit each other; the text has them all and names the extra to install.
    """
    import cupy

    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    driver = cupy.cuda.runtime.driverGetVersion() // 1000
    if driver == 0:
        raise UnsupportedError("no CUDA driver on this machine")
    problem = versions_problem(
        int(cuda.split(".")[0]) if cuda else None, cupy.cuda.runtime.runtimeGetVersion() // 1000, nvrtc.version[0],
        driver,
    )  # fmt: skip
    if problem is not None:
        raise UnsupportedError(problem)


# from source to cubin -------------------------------------------------------------------------------------------------


def build(unit: Unit, arch: str, nvrtc: Compiler, where: Path | None = None) -> Built:
    """Compile a unit, or take it from the cache folder `where`.

    Raises
    ------
    CudaError
        NVRTC refused the source; the text is its log.
    """
    source, headers = sources(unit)
    options = (f"-arch={arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in unit.defines))
    key = _kernel_cache.key_of([1, unit.file, source, headers, options, list(nvrtc.version)])
    if where is not None and (entry := _kernel_cache.read(where, key)) is not None:
        path, note = entry
        kernels = {name: Resources(*numbers) for name, numbers in note["kernels"].items()}
        return Built(path.read_bytes(), kernels, note["log"], path)
    try:
        image, log = nvrtc.compile(unit.file, source, headers, options)
    except CompileFailed as error:
        version = "{}.{}".format(*nvrtc.version)
        raise CudaError(f"{unit} does not compile for {arch} with NVRTC {version}: {error}") from None
    kernels = resources(log)
    missing = set(unit.kernels) - set(kernels)
    if not kernels:  # a log of another form: loading will tell what there is
        kernels = dict.fromkeys(unit.kernels, Resources(0, 0, 0, 0))
    elif missing:
        raise InternalError(f"{unit}: no kernel {', '.join(sorted(missing))}; compiled: {', '.join(sorted(kernels))}")
    built = Built(image, kernels, log)
    if where is not None:
        try:
            note = {"kernels": kernels, "log": log, "unit": str(unit), "arch": arch}
            built = built._replace(path=_kernel_cache.write(where, key, image, note))
        except OSError as error:
            _log.warning("kernels of %s are not kept in %s: %s", unit, where, error)
    return built


# on a device ----------------------------------------------------------------------------------------------------------


class Module:
    """The kernels of a unit on one device.

    Attributes
    ----------
    functions : dict of str to int
        ``CUfunction`` of each kernel, in the device's primary context, valid for the life of the process.
    resources : dict of str to Resources
        What the driver says that each takes.
    raw : dict of str to cupy.RawKernel
        The same kernels, to launch from Python.
    arch : str
    """

    def __init__(self, unit: Unit, device: int, built: Built, arch: str) -> None:
        import cupy

        self.arch = arch
        self.functions: dict[str, int] = {}
        self.resources: dict[str, Resources] = {}
        self.raw: dict[str, Any] = {}
        self._kept: list[Any] = []
        with cupy.cuda.Device(device), tempfile.TemporaryDirectory(prefix="epcomm-") as folder:
            path = built.path
            if path is None:  # the driver wants a file
                path = Path(folder) / "kernels.cubin"
                path.write_bytes(built.image)
            raw = cupy.RawModule(path=str(path))
            for name in unit.kernels:
                kernel = raw.get_function(name)
                # Asking for attributes loads the kernel now, whatever CUDA_MODULE_LOADING says.
                attributes = kernel.attributes
                self.resources[name] = Resources(
                    attributes["num_regs"], attributes["shared_size_bytes"], attributes["local_size_bytes"],
                    built.resources[name].spill_bytes,
                )  # fmt: skip
                self.functions[name] = int(kernel.kernel.ptr)
                self.raw[name] = kernel
                self._kept.append(kernel.kernel)
            self._kept.append(raw)


_modules: dict[tuple[int, int, Unit], Module] = {}  # by process too: a fork inherits no CUDA context
_modules_lock = threading.Lock()


def load(unit: Unit, device: int) -> Module:
    """The kernels of a unit on a device; compiled and loaded by the first call of a process, then at hand.

    Raises
    ------
    UnsupportedError
        CuPy, NVRTC or the driver is missing or does not fit; the text says what to install.
    CudaError
        The unit does not compile, or the driver refuses it.
    """
    key = (os.getpid(), device, unit)
    with _modules_lock:
        module = _modules.get(key)
        if module is None:
            module = _modules[key] = _load(unit, device)
        return module


def _load(unit: Unit, device: int) -> Module:
    nvrtc = compiler()
    check_versions(nvrtc)
    import cupy

    try:
        capability = cupy.cuda.Device(device).compute_capability
        arch = arch_of((int(capability[:-1]), int(capability[-1])), nvrtc)
        where = _kernel_cache.folder()
        if where is None:
            _log.warning("no cache folder: kernels are compiled anew in each process (EPCOMM_CACHE_DIR names one)")
        return Module(unit, device, build(unit, arch, nvrtc, where), arch)
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise CudaError(f"{unit} on cuda:{device}: {error}") from error


# report ---------------------------------------------------------------------------------------------------------------


def report(nvrtc: Compiler, capabilities: Iterable[tuple[int, int]] = ARCHS) -> list[tuple[Any, ...]]:
    """(unit, arch, kernel, registers, shared, stack, spill bytes) of everything, compiled now."""
    rows: list[tuple[Any, ...]] = []
    for unit in UNITS:
        for capability in capabilities:
            arch = arch_of(capability, nvrtc)
            built = build(unit, arch, nvrtc)
            rows += [(str(unit), arch, name, *built.resources[name]) for name in unit.kernels]
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m epcomm.kernels``: compile everything and say what it takes. Needs no GPU."""
    parser = argparse.ArgumentParser(prog="python -m epcomm.kernels", description=main.__doc__)
    parser.add_argument("--nvrtc", metavar="FILE", help="library to compile with; default CuPy's")
    nvrtc = compiler(parser.parse_args(arguments).nvrtc)
    columns = ("unit", "arch", "kernel", "registers", "shared", "stack", "spills")
    title = "kernels, compiled by NVRTC {}.{}".format(*nvrtc.version)
    _console.print_table(title, columns, report(nvrtc), right=(3, 4, 5, 6))
    return 0


if __name__ == "__main__":
    sys.exit(main())
