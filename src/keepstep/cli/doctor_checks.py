"""The checks of `keepstep doctor`: each is one small function that returns its findings.

No check changes the machine: it removes what it creates (a directory, a memfd). torch is imported only
in a subprocess with a deadline, because that takes seconds and may hang on a broken driver.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from keepstep._version import VERSION
from keepstep.arena.memfd import MADV_POPULATE_READ, SEALS, Memfd
from keepstep.cli.keepers import find_runs
from keepstep.cli.tables import format_seconds
from keepstep.config import Config, as_environment, resolve
from keepstep.control.secret_file import read_secret, security_level
from keepstep.control.status import fetch_status
from keepstep.errors import Error
from keepstep.identity import ensure_private, identify, runtime_dir
from keepstep.keeper.workers import memory_limits
from keepstep.layout import format_bytes

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TORCH_S = 60.0  # to import torch and register a page with CUDA: usually seconds, minutes on a cold network disk
PROBE_BYTES = 1 << 20
OLDEST_TORCH = (2, 6)
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's fixed number of the machine's own namespace
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor."""

    name: str
    level: str  # ok, warning or problem
    text: str
    todo: str = ""  # what to do about it


def examine(config: Config, *, torch: bool) -> Iterator[Finding]:
    """Run every check in order. A check that raises is a finding; the others still run."""
    yield from _guard("versions", check_versions)
    yield from _guard("entry point", check_entry_point)
    yield from _guard("settings", lambda: check_settings(config))
    yield from _guard("run id", lambda: check_run_id(config))
    yield from _guard("security", lambda: check_security(config))
    yield from _guard("runtime directory", lambda: check_runtime_dir(config))
    yield from _guard("memory", lambda: check_memory(config))
    yield from _guard("oom kill", lambda: check_oom_group(Path("/")))
    yield from _guard("shared memory", check_memfd)
    yield from _guard("populate", check_populate)
    yield from _guard("/dev/shm", check_dev_shm)
    yield from _guard("memlock", check_memlock)
    yield from _guard("pidfd", check_pidfd)
    yield from _guard("pid namespace", check_pid_namespace)
    yield from _guard("torchrun restarts", check_shared_store)
    yield from _guard("cuda", lambda: check_cuda(torch=torch))
    yield from _guard("other runs", lambda: check_other_runs(config))


def _guard(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Error as error:
        return [Finding(name, PROBLEM, error.message, error.hint)]
    except OSError as error:
        return [
            Finding(name, PROBLEM, error.strerror or str(error), "look for a sandbox or a container that forbids it")
        ]


# Installed packages


def check_versions() -> list[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    texts, missing = [f"keepstep {VERSION}", f"python {python}"], []
    for package in ("torch", "numpy", "msgspec", "xxhash", "rich", "prometheus_client"):
        try:
            texts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        names = " ".join(missing)
        return [Finding("versions", PROBLEM, f"not installed: {names}", f"pip install {names}")]
    if _release(metadata.version("torch")) < OLDEST_TORCH:
        return [Finding("versions", PROBLEM, f"torch {metadata.version('torch')} is too old", "use torch 2.6 or newer")]
    return [Finding("versions", OK, ", ".join(texts))]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_entry_point() -> list[Finding]:
    points = [point for point in metadata.entry_points(group="torchrun.handlers") if point.name == "keepstep"]
    if points:
        return [Finding("entry point", OK, "torchrun finds --rdzv-backend=keepstep")]
    text = "torchrun does not find --rdzv-backend=keepstep: keepstep is on the path but not installed"
    return [Finding("entry point", PROBLEM, text, "pip install keepstep (or pip install -e . in a checkout)")]


# Settings


def check_settings(config: Config) -> list[Finding]:
    given = as_environment(config)
    if not given:
        return [Finding("settings", OK, "all at their defaults")]
    return [Finding("settings", OK, f"{name}={value}, from {_origin(name, value)}") for name, value in given.items()]


def _origin(name: str, value: str) -> str:
    """Source of a value: the command line overrides the environment, which overrides the file."""
    if as_environment(resolve(local_file=False)).get(name) != value:
        return "the command line"
    return "the environment" if os.environ.get(name) else os.environ["KEEPSTEP_CONFIG_FILE"]


def check_run_id(config: Config) -> list[Finding]:
    identity = identify(config)
    if identity.outlives_launch:
        return [Finding("run id", OK, f"{identity.run_id} on node {identity.node_id}")]
    text = f"none is set here (node {identity.node_id}); under torchrun it is --rdzv-id"
    return [Finding("run id", OK, text, "without one, a later launch does not find the state of an earlier one")]


def check_security(config: Config) -> list[Finding]:
    read_secret(config)
    todo = "" if config.secret_file else "with several nodes whoever reaches the store is a member; set secret_file"
    return [Finding("security", OK, security_level(config), todo)]


def check_runtime_dir(config: Config) -> list[Finding]:
    directory = runtime_dir(config)
    new = not directory.exists()
    try:
        ensure_private(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    finally:
        if new and directory.exists():
            directory.rmdir()
    return [Finding("runtime directory", OK, f"{directory}: private and writable")]


# Memory


def _slots_of(config: Config, usable_bytes: int) -> str:
    if config.arena.slots != "auto":
        return f"a rank needs its state times {config.arena.slots} slots"
    largest = format_bytes(max(0, usable_bytes) // memory_limits.ROOM_SLOTS)
    return (
        f"arena.slots is auto: three slots while the state of this node's ranks is at most {largest}, else two. "
        "A snapshot at every step needs arena.slots=4 where the copy takes as long as the step"
    )


def check_memory(config: Config) -> list[Finding]:
    limits = memory_limits.measure()
    cgroup = "no cgroup limit"
    if limits.cgroup_limit_bytes is not None:
        used = format_bytes(limits.cgroup_used_bytes)
        cgroup = f"cgroup limit {format_bytes(limits.cgroup_limit_bytes)} with {used} in use"
    usable = limits.free_bytes - memory_limits.RESERVE_BYTES
    text = f"{format_bytes(max(0, usable))} are free (MemAvailable {format_bytes(limits.available_bytes)}, {cgroup})"
    if usable <= 0:
        return [Finding("memory", PROBLEM, text, "raise the limit, or end processes that use the memory")]
    return [Finding("memory", OK, text, _slots_of(config, usable))]


def check_oom_group(root: Path) -> list[Finding]:
    """Whether an OOM kill takes the whole cgroup: cgroup v2 only, v1 has no such switch."""
    group = _find_oom_group(root)
    if group is None:
        return [Finding("oom kill", OK, "ends one process; the keeper and its memory stay")]
    text = f"memory.oom.group is set in {group}: one OOM kill ends trainers, keeper and launcher together"
    todo = "count an OOM kill as the loss of the node, or run the keeper in a container of its own (keepstep keeper)"
    return [Finding("oom kill", WARNING, text, todo)]


def _find_oom_group(root: Path) -> Path | None:
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    paths = [line.split(":", 2)[2] for line in lines if line.startswith("0::")]
    mount = root / "sys/fs/cgroup"
    for path in paths:
        folder = mount / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            switch = candidate / "memory.oom.group"
            if switch.is_file() and switch.read_text().strip() == "1":
                return candidate
            if candidate == mount:
                break
    return None


def check_memfd() -> list[Finding]:
    segment = Memfd.create(PROBE_BYTES)
    try:
        seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)
        if seals & SEALS != SEALS:
            return [Finding("shared memory", PROBLEM, "memfd seals do not hold", "use Linux 4.14 or newer")]
        if segment.allocated_bytes < PROBE_BYTES:
            text = "a memfd does not get its memory at once: a shortage would appear in the middle of training"
            return [Finding("shared memory", PROBLEM, text, "look for a sandbox (gVisor) around this process")]
    finally:
        segment.close()
    return [Finding("shared memory", OK, "memfd_create and its seals work")]


def check_populate() -> list[Finding]:
    segment = Memfd.create(PROBE_BYTES)
    try:
        with mmap.mmap(segment.fd, PROBE_BYTES) as mapping:
            mapping.madvise(MADV_POPULATE_READ)
    except OSError:
        text = "MADV_POPULATE_READ is missing (Linux 5.14): pages are touched one by one before the first step"
        return [Finding("populate", WARNING, text, "a newer kernel starts faster; nothing else changes")]
    finally:
        segment.close()
    return [Finding("populate", OK, "MADV_POPULATE_READ works")]


def check_dev_shm() -> list[Finding]:
    try:
        filesystem = os.statvfs("/dev/shm")
    except OSError:
        return [Finding("/dev/shm", OK, "missing; it does not matter: arenas are memfds")]
    size = format_bytes(filesystem.f_blocks * filesystem.f_frsize)
    return [Finding("/dev/shm", OK, f"{size}; it does not matter: arenas are memfds")]


def check_memlock() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return [Finding("memlock", OK, f"{size}; keepstep locks nothing itself, RDMA between nodes would")]


# Processes


def check_pidfd() -> list[Finding]:
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    finally:
        os.close(pidfd)
    return [Finding("pidfd", OK, "pidfd_open and pidfd_send_signal work")]


def check_pid_namespace() -> list[Finding]:
    if os.readlink("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE:
        return [Finding("pid namespace", OK, "the machine's own")]
    first = Path("/proc/1/comm").read_text().strip()
    text = f"a container's; trainers and keeper must share it, and all of them end with its process 1 ({first})"
    return [Finding("pid namespace", OK, text)]


def check_shared_store() -> list[Finding]:
    if os.environ.get(SHARED_STORE) == "1":
        return [Finding("torchrun restarts", OK, f"{SHARED_STORE}=1")]
    text = "under torchrun's own rendezvous a restart reads stale keys of the shared store and may hang"
    todo = f"torchrun --rdzv-backend=keepstep, or keepstep run, or {SHARED_STORE}=1 on every node"
    return [Finding("torchrun restarts", WARNING, text, todo)]


def check_other_runs(config: Config) -> list[Finding]:
    findings = []
    for run in find_runs(config):
        if not run.alive:
            todo = f"keepstep release --run-id {run.identity.run_id} removes them"
            findings.append(Finding("other runs", WARNING, f"files of the dead keeper of {run} remain", todo))
            continue
        status = fetch_status(run.identity)
        text = f"{run} holds {format_bytes(status.memory_bytes)}, {status.keeper.state}"
        left = status.keeper.lease_left_s
        todo = "" if left is None else f"free in {format_seconds(left)}, or now by keepstep release --run-id"
        level = OK if left is None else WARNING
        findings.append(Finding("other runs", level, text, todo and f"{todo} {run.identity.run_id}"))
    return findings or [Finding("other runs", OK, "no keeper of this user runs on this node")]


# CUDA


PROBE_CUDA = f"""
import mmap, os, sys, numpy, torch
if not torch.cuda.is_available():
    print(f"torch {{torch.__version__}} imports and finds no GPU: state is captured on the CPU")
    sys.exit()
fd = os.memfd_create("keepstep-doctor")
os.ftruncate(fd, {PROBE_BYTES})
memory = numpy.frombuffer(mmap.mmap(fd, {PROBE_BYTES}), dtype=numpy.uint8)
error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, {PROBE_BYTES}, 0)
if int(error):
    sys.exit(f"cudaHostRegister refused shared memory: {{error}}")
torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
print(f"torch {{torch.__version__}} registers shared memory with {{torch.cuda.get_device_name(0)}}")
"""


def check_cuda(*, torch: bool) -> list[Finding]:
    if torch:
        return _probe_cuda()
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return [Finding("cuda", OK, "a device is present", "keepstep doctor --torch tests shared memory with it")]
    return [Finding("cuda", OK, "no NVIDIA device: state is captured on the CPU")]


def _probe_cuda() -> list[Finding]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE_CUDA], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding("cuda", PROBLEM, f"torch did not answer within {TORCH_S:g} s", "nvidia-smi; dmesg")]
    if done.returncode == 0:
        return [Finding("cuda", OK, done.stdout.strip())]
    lines = (done.stderr or done.stdout).strip().splitlines()
    todo = "snapshots still work, through pageable copies that hold the loop longer"
    return [Finding("cuda", WARNING, lines[-1] if lines else f"exit code {done.returncode}", todo)]
