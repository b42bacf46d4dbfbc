"""What ``python -m epcomm info`` tells. It opens no device, allocates no heap and imports no array library."""

import importlib
import importlib.metadata
import io
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epcomm import _console, _gpu, _info_rdma, _registry, config
from epcomm._version import __version__
from epcomm.errors import EpcommError

# Distribution names under which an optional package may be installed; the first found is told.
OPTIONAL_PACKAGES = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "mpi4py": ("mpi4py",),
    "rich": ("rich",),
    "matplotlib": ("matplotlib",),
    "scikit-learn": ("scikit-learn",),
}

LIMITS = {
    "payload": "any dtype of 1, 2 or 4 bytes whose row fits ceil16(hidden * itemsize) of the communicator's dtype",
    "row arithmetic": "combine sums float32, float16 and bfloat16 rows",
    "topk_idx": "int32 or int64; -1 is no pick",
    "num_topk": "1 to num_experts",
    "num_experts": "1 or more; a rank may own none",
    "hidden": "any; rows that are not a multiple of 16 bytes take a slower path",
    "quantize": "fp8 e4m3, one float32 scale per 128 channels",
    "offsets": "64-bit throughout",
}


def collect() -> dict[str, Any]:
    """Everything ``info`` tells, as plain values that JSON can hold."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "package": str(Path(__file__).parent),
        "backends": [_backend(row) for row in _registry.BACKENDS],
        "devices": _devices(),
        "rdma": _info_rdma.collect(),
        "limits": dict(LIMITS),
        "environment": environment(),
        "unknown_variables": config.unknown(),
        "packages": {name: _version_of(names) for name, names in OPTIONAL_PACKAGES.items()},
    }


def as_json() -> str:
    """One JSON object."""
    return json.dumps(collect(), indent=2) + "\n"


def as_text() -> str:
    """Tables for people."""
    info = collect()
    out = _Text()
    title = f"epcomm {info['version']}  (Python {info['python']}, {info['package']})"
    backends = [
        (row["name"], row["state"], ", ".join(row["capabilities"]) or row["reason"], row["summary"])
        for row in info["backends"]
    ]
    _console.print_table(title, ("backend", "state", "capabilities, or what is missing", "what it is"), backends,
                         caption="in order of preference; EPCOMM_BACKEND chooses", file=out)
    _console.print_table("devices", ("what", "value"),
                         [(_label(k), _value(k, v)) for k, v in info["devices"].items()], file=out)
    _info_rdma.print_tables(info["rdma"], out)
    _console.print_table("limits", ("what", "range"), list(info["limits"].items()), file=out)
    variables = [(name, row["error"] or _value(name, row["value"]), "set" if row["set"] else "default", row["help"])
                 for name, row in info["environment"].items()]
    _console.print_table("environment variables", ("variable", "in effect", "from", "meaning"), variables, file=out)
    if info["unknown_variables"]:
        _console.print_table("variables without effect", ("variable", "why"), list(info["unknown_variables"].items()),
                             file=out)
    _console.print_table("packages", ("package", "version"),
                         [(name, version or "not installed") for name, version in info["packages"].items()], file=out)
    return out.getvalue()


def plan(num_ranks: int, num_channels: int | None, as_json: bool) -> str:
    """Queue pairs that a rank on this machine would have; JSON or a table."""
    made = _info_rdma.plan(num_ranks, num_channels)
    if as_json:
        return json.dumps(made, indent=2) + "\n"
    out = _Text()
    _info_rdma.print_plan(made, out)
    return out.getvalue()


class _Text(io.StringIO):
    """Text that is laid out as wide as the terminal it will go to."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value)) or "none"
    if value is None:
        return "unknown" if name.endswith("_bytes") else "not set"
    return _console.human_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ").replace("dev shm", "/dev/shm").replace("cuda mps", "CUDA MPS")


def _backend(row: _registry.Backend) -> dict[str, Any]:
    """One backend: ``available`` with its capabilities, or why not."""
    told: dict[str, Any] = {"name": row.name, "summary": row.summary, "state": "available", "capabilities": [],
                            "reason": None}
    try:
        module = importlib.import_module(f"epcomm._{row.name}")
    except ImportError as error:
        return {**told, "state": "not built", "reason": str(error)}
    try:
        module.probe()
        told["capabilities"] = _registry.capability_names(module.Backend().caps)
    except EpcommError as error:
        return {**told, "state": "unavailable", "reason": str(error)}
    return told


def _devices() -> dict[str, Any]:
    return {
        "cpu": _field(_read("/proc/cpuinfo"), "model name") or platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "instruction_sets": _instruction_sets(),
        "memory_available_bytes": _memory_available(),
        "dev_shm_free_bytes": _free("/dev/shm"),
        "memfd": _works(lambda: os.memfd_create("epcomm-info", os.MFD_CLOEXEC)),
        "pidfd": _works(lambda: os.pidfd_open(os.getpid())),
        "locked_memory_limit_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": _limit(resource.RLIMIT_NOFILE),
        "gpus": _gpus(),
        "cuda_mps": _gpu.under_mps(0) or False,
        "rdma_devices": _names("/sys/class/infiniband"),
    }


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str | None:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _instruction_sets() -> list[str]:
    """The host loops that this machine could run, best first; the host engine decides for itself."""
    flags = set((_field(_read("/proc/cpuinfo"), "flags") or "").split())
    found = []
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        found.append("avx512")
    if {"avx2", "f16c"} <= flags:
        found.append("avx2")
    return [*found, "plain"]


def _memory_available() -> int | None:
    """Least of what the kernel says is available and what the control group leaves; ``None`` if unknown."""
    text = _field(_read("/proc/meminfo"), "MemAvailable")
    if text is None:
        return None
    available = int(text.split()[0]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _works(attempt: Callable[[], int]) -> bool | str:
    """Whether a call that returns a descriptor works here, or the reason why not."""
    try:
        os.close(attempt())
    except AttributeError:
        return "no: this Python was built without it"
    except OSError as error:
        return f"no: {error.strerror}"
    return True


def _limit(which: int) -> int | str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _gpus() -> list[str]:
    """Names from the driver's text files: asking CUDA would open a device and spoil a later fork."""
    root = "/proc/driver/nvidia/gpus"
    return [
        f"{_field(_read(f'{root}/{name}/information'), 'Model') or 'NVIDIA GPU'} ({name})" for name in _names(root)
    ]


def _version_of(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def environment() -> dict[str, dict[str, Any]]:
    """Each variable of ``config.VARIABLES`` with the value in effect, then those that a launcher has set.

    Secrets are masked. A value outside its range does not stop the listing: its row carries the error.
    """
    told = {}
    launchers = [variable for variable in config.LAUNCHER_VARIABLES if config.is_set(variable.name)]
    for variable in (*config.VARIABLES, *launchers):
        is_set = config.is_set(variable.name)
        value, error = None, None
        try:
            value = config.get(variable.name)
        except EpcommError as problem:
            error = "outside its range (not shown)" if variable.secret else str(problem)
        if variable.secret and is_set:
            value = "(set)"
        told[variable.name] = {"value": value, "set": is_set, "default": variable.default, "help": variable.help,
                               "error": error}
    return told


def environment_markdown() -> str:
    """The README's table of variables."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in config.VARIABLES:
        default = "" if variable.default is None else f"`{variable.default}`"
        lines.append(f"| `{variable.name}` | {default} | {variable.help} |")
    return "\n".join(lines)
