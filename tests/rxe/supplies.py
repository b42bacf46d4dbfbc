"""What a virtual machine with Soft-RoCE is made of: QEMU, a kernel, its modules in an initramfs.

Packages that are missing are installed with apt, as root or with sudo. A kernel, and a QEMU where the installed one is
too old, are unpacked into ``${XDG_CACHE_HOME:-~/.cache}/epcomm/rxe`` and not installed. Later runs need no network.
"""

import contextlib
import fcntl
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "depmod": "kmod",
    "zstd": "zstd",
    "ip": "iproute2",
    "rdma": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
PACKAGES = ("busybox-static", "ibverbs-providers")
MODULES = (
    "9pnet_virtio", "9p", "overlay", "virtio_pci", "virtio_console", "ib_uverbs", "rdma_rxe", "veth", "bridge",
    "sch_netem", "crc32_generic", "crc32c_generic",
)  # fmt: skip
# Emulated processors of older ones may run code that another is just patching; now and then the kernel dies of it.
SOUND_QEMU = (8, 1)
# Before this one rxe knows a single network namespace.
SPLIT_KERNEL = 7
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class SuppliesError(RuntimeError):
    """Something cannot be had; the text says what, and what was tried."""


class Supplies(NamedTuple):
    """What to boot. ``split`` tells whether a device can live in a node's own network namespace."""

    qemu: tuple[str, ...]
    kernel: Path
    initramfs: Path
    modules: Path
    release: str
    split: bool
    steady: bool  # QEMU copes with kernels that patch themselves


def cache():
    """The folder, made if needed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "epcomm" / "rxe"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def gather(say=lambda text: None):
    """All of it, fetched and built where needed; one process at a time."""
    if os.uname().machine != "x86_64":
        raise SuppliesError(f"the virtual machine is x86-64, this is {os.uname().machine}")
    folder = cache()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(say)
        qemu, steady = _qemu(folder, say)
        kernel = _kernel(folder, say)
        return Supplies(qemu, _unpacked_kernel(kernel), _initramfs(kernel, say), kernel / "lib/modules",
                        kernel.name, _is_split(kernel), steady)  # fmt: skip


def _run(*command, **options):
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "PATH": PATH}, **options
    )


def _as_root(*command):
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    return _run(*sudo, "env", "DEBIAN_FRONTEND=noninteractive", *command)


def installed(package):
    """Whether dpkg has it."""
    return _run("dpkg-query", "-W", "-f", "${db:Status-Status}", package).stdout == "installed"


def install(packages, say=lambda text: None):
    """Let apt install packages."""
    if not packages:
        return
    say(f"installing {' '.join(packages)}")
    command = ("apt-get", "install", "-y", "--no-install-recommends", *packages)
    done = _as_root(*command)
    if done.returncode:
        _as_root("apt-get", "update")
        done = _as_root(*command)
    if done.returncode:
        raise SuppliesError(f"cannot install {' '.join(packages)}:\n{(done.stdout + done.stderr)[-2000:]}")


def _install(say):
    missing = {package for name, package in PROGRAMS.items() if not shutil.which(name, path=PATH)}
    install(sorted(missing | {package for package in PACKAGES if not installed(package)}), say)


# ------------------------------------------------------------------------------------------- other suites


class _Suite:
    """One suite of the mirror that this machine uses already; the machine's own lists stay as they are."""

    def __init__(self, name, folder):
        self._options = []
        if name is None:  # this machine's own
            return
        targets = ("apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)", "Created-By: Packages")
        found = re.search(r"^Debian\|(.+)$", _run(*targets).stdout, re.M)
        if not found:
            _as_root("apt-get", "update")
            found = re.search(r"^Debian\|(.+)$", _run(*targets).stdout, re.M)
        keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
        if not found or not keys.exists():
            raise SuppliesError(f"no Debian mirror to take suite {name} from")
        own = folder / "apt" / name
        for part in ("lists/partial", "cache/archives/partial"):
            (own / part).mkdir(parents=True, exist_ok=True)
        (own / "sources.list").write_text(f"deb [signed-by={keys}] {found[1]} {name} main\n")
        settings = {
            "Dir::Etc::SourceList": own / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": own / "lists",
            "Dir::Cache": own / "cache",
            "APT::Sandbox::User": "root",
            "APT::Default-Release": name,
        }
        self._options = [word for pair in settings.items() for word in ("-o", "=".join(map(str, pair)))]
        done = _run("apt-get", *self._options, "update")
        if done.returncode:
            raise SuppliesError(f"suite {name}: {done.stderr[-500:]}")

    def newest_kernel(self):
        """(package, release) of the newest kernel image, or None."""
        names = _run("apt-cache", *self._options, "pkgnames", "linux-image-").stdout.split()
        found = [re.fullmatch(r"linux-image-(\d+\.\d+\.\d+\S*?(?<!rt)(?<!cloud)-(?:amd64|generic))", name)
                 for name in names]  # fmt: skip
        found = [match for match in found if match and self._has(match[0])]
        newest = max(found, key=lambda match: [int(number) for number in re.findall(r"\d+", match[1])], default=None)
        return newest and (newest[0], newest[1])

    def _has(self, package):
        return "Candidate: (none)" not in self._policy(package) and "Candidate: " in self._policy(package)

    def _policy(self, package):
        return _run("apt-cache", *self._options, "policy", package).stdout

    def unpack(self, packages, target):
        """Fetch packages (those that exist) and unpack them into a folder."""
        with tempfile.TemporaryDirectory(dir=target.parent) as fetched:
            for package in packages:
                if not self._has(package):
                    continue
                done = _run("apt-get", *self._options, "-o", "APT::Sandbox::User=root", "download", package,
                            cwd=fetched)  # fmt: skip
                if done.returncode:
                    raise SuppliesError(f"cannot fetch {package}: {done.stderr[-500:]}")
            for archive in Path(fetched).glob("*.deb"):
                if (done := _run("dpkg-deb", "-x", str(archive), str(target))).returncode:
                    raise SuppliesError(f"cannot unpack {archive.name}: {done.stderr[-500:]}")


# -------------------------------------------------------------------------------------------------- QEMU


def _qemu(folder, say):
    own = ("qemu-system-x86_64",)
    if _is_sound(own):
        return own, True
    unpacked = folder / "qemu"
    if not unpacked.exists():
        say("fetching a newer QEMU")
        with contextlib.suppress(SuppliesError, OSError):
            made = _empty(folder / "new")
            suite = _Suite(f"{_codename()}-backports", folder)
            suite.unpack(("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"), made)
            made.rename(unpacked)
    share = unpacked / "usr/share"
    newer = (str(unpacked / "usr/bin/qemu-system-x86_64"), "-L", str(share / "qemu"), "-L", str(share / "seabios"))
    return (newer, True) if _is_sound(newer) else (own, False)


def _codename():
    found = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.M)
    return found[1] if found else "unstable"


def _is_sound(qemu):
    try:
        found = re.search(r"version (\d+)\.(\d+)", _run(qemu[0], "--version").stdout)
    except OSError:
        return False
    return bool(found) and (int(found[1]), int(found[2])) >= SOUND_QEMU


# ------------------------------------------------------------------------------------------------ kernel


def _kernel(folder, say):
    """Folder of an unpacked kernel, by preference one whose rxe knows network namespaces."""
    chosen = folder / "kernel"
    if chosen.is_symlink() and (chosen / "complete").exists():
        return chosen.resolve()
    reasons, spare = [], None
    for name in dict.fromkeys((f"{_codename()}-backports", "trixie-backports", "unstable", None)):
        try:
            suite = _Suite(name, folder)
            package, release = suite.newest_kernel() or (None, None)
            if package is None or (name and int(release.split(".")[0]) < SPLIT_KERNEL):
                reasons.append(f"{name}: its newest kernel is {release}")
                continue
            kernel = _unpack_kernel(suite, package, release, folder, say)
            spare = spare or kernel
            if _is_split(kernel):
                spare = kernel
                break
        except SuppliesError as error:
            reasons.append(f"{name or 'own suite'}: {error}")
    if spare is None:
        raise SuppliesError("no kernel with rdma_rxe can be had: " + "; ".join(reasons))
    chosen.unlink(missing_ok=True)
    chosen.symlink_to(spare)
    return spare


def _unpack_kernel(suite, package, release, folder, say):
    target = folder / release
    if (target / "complete").exists():
        return target
    say(f"fetching {package}")
    made = _empty(folder / "new")
    parts = ("linux-base", "linux-binary", "linux-modules", "linux-modules-extra")  # how releases divide it
    suite.unpack((package, *(f"{part}-{release}" for part in parts)), made)
    modules = next(made.rglob(f"modules/{release}"), None)
    image = next(made.rglob("vmlinuz*"), None)
    if modules is None or image is None or not any(modules.rglob("rdma_rxe.ko*")):
        raise SuppliesError(f"{package} has no rdma_rxe")
    shutil.rmtree(target, ignore_errors=True)
    (target / "lib/modules").mkdir(parents=True)
    image.rename(target / "vmlinuz")
    modules.rename(target / "lib/modules" / release)
    shutil.rmtree(made, ignore_errors=True)
    _run("depmod", "-b", str(target), release, check=True)
    (target / "complete").touch()
    return target


def _empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _is_split(kernel):
    rxe = _plain(next((kernel / "lib/modules").rglob("rdma_rxe.ko*")))
    return b"rxe_ns_init" in rxe and b"rxe_disassociate_ucontext" in rxe


def _plain(path):
    """Bytes of a file, unpacked."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(path)], capture_output=True, check=True).stdout
    return path.read_bytes()


def _unpacked_kernel(kernel):
    """The ELF image inside: without hardware virtualization its unpacking would be slow."""
    packed, plain = kernel / "vmlinuz", kernel / "vmlinux"
    if plain.exists():
        return plain
    image = packed.read_bytes()
    for magic, unpack in ((b"\x28\xb5\x2f\xfd", _unzstd), (b"\xfd7zXZ\0", _unxz)):
        at = image.find(magic)
        for _ in range(4):
            if at < 0:
                break
            found = unpack(image[at:])
            if found[:4] == b"\x7fELF":
                plain.write_bytes(found)
                return plain
            at = image.find(magic, at + 1)
    return packed


def _unzstd(data):  # what follows the compressed part makes the tool fail after the fact
    return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True).stdout


def _unxz(data):
    try:
        return lzma.LZMADecompressor().decompress(data)
    except lzma.LZMAError:
        return b""


# --------------------------------------------------------------------------------------------- initramfs


def archive(files):
    """A cpio archive, as the kernel unpacks it: path -> bytes, or None for a folder. Archives may be joined."""
    out = bytearray()
    for number, (path, data) in enumerate([*files.items(), ("TRAILER!!!", b"")], 1):
        mode = 0o040755 if data is None else 0o100755
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data or b""), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        out += b"\0" * (-len(out) % 4) + (data or b"")
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def _initramfs(kernel, say):
    built, start = kernel / "initramfs", (HERE / "init.sh").read_bytes()
    recipe = repr((MODULES, start, (HERE / "supplies.py").read_bytes()))
    if built.exists() and (kernel / "initramfs.recipe").read_text() == recipe:
        return built
    say("building the initramfs")
    paths = []
    for module in MODULES:
        shown = _run("modprobe", "-d", str(kernel), "-S", kernel.name, "--show-depends", module).stdout
        paths += [words[1] for words in map(str.split, shown.splitlines()) if words[0] == "insmod"]
    files = dict.fromkeys(("bin", "dev", "proc", "sys", "lower", "upper", "new", "modules", "job"))
    order = []
    for path in dict.fromkeys(map(Path, paths)):
        order.append(path.name.partition(".")[0])
        files[f"modules/{order[-1]}"] = _plain(path)
    files["modules.order"] = "".join(f"{name}\n" for name in order).encode()
    listed = _run("dpkg", "-L", "busybox-static").stdout.split()
    files["bin/busybox"] = Path(next(path for path in listed if path.endswith("bin/busybox"))).read_bytes()
    files["init"] = start
    built.write_bytes(archive(files))
    (kernel / "initramfs.recipe").write_text(recipe)
    return built
