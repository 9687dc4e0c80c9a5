"""Settings: argument > environment > `keepstep.toml` > default.

A `Config` holds what the user passed; `resolve()` fills every field that was not passed from the
environment (`KEEPSTEP_EVERY`, `KEEPSTEP_KEEPER_LEASE_S`: section and field in capitals), then from
`keepstep.toml` in the working directory (or `KEEPSTEP_CONFIG_FILE`), then from the defaults below.
An unknown key is an error that names the field, the value and where it came from.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.errors import ConfigError

ENV_PREFIX = "KEEPSTEP_"
CONFIG_FILE = "keepstep.toml"

# Names that start with the prefix and are not settings of Config: what processes of a node hand each other.
HANDED_DOWN = frozenset({"INCARNATION", "CONFIG_FILE", "SOCKET"})
IGNORED_PREFIXES = ("BENCH_", "TEST_", "DEMO_")


class _Section:
    """Remembers which fields were passed, so that an argument equal to its default still beats the environment."""

    given: frozenset[str]

    def __new__(cls, **passed: Any) -> typing.Self:
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(passed))
        return self


@dataclass(frozen=True, kw_only=True)
class ArenaConfig(_Section):
    """The shared memory of a rank."""

    slots: int = 2
    """Places for snapshots, 2 to 4. Two always hold one complete version while the next is written; with three the
    next one may begin before the last has ended (every step, though the copy is longer than a step); with four that
    one may also still be checksummed (a host that runs ahead of its device)."""
    prefault_threads: int = 8
    """Threads that populate pages before the first step (0.5 s per GiB and thread)."""
    memory_limit_bytes: int = 0
    """Refuse to take more than this for one rank's arena; 0: what the cgroup and the machine allow."""


@dataclass(frozen=True, kw_only=True)
class TakeConfig(_Section):
    """What one `take` may cost."""

    budget_ms: float = 1000.0
    """Copies that must finish inside `take` (nothing fences their writer) may hold it this long, else it skips."""
    rate_bytes_s: int = 0
    """Cap for the background copy; lifted while an optimizer waits for it. 0: no cap."""
    small_bytes: int = 65536
    """Tensors up to this size are copied inside `take`, all together."""
    staging_share: float = 0.095
    """Device memory for what cannot leave a GPU before the next update, as a share of the state."""
    staging_free_share: float = 0.05
    """The same as a share of the free device memory; the smaller one counts. Without any, the update waits."""
    fingerprint: bool = True
    """Look at a part of what is copied behind `take` beforehand, and compare with what landed and was restored."""
    fingerprint_all: bool = False
    """On GPUs, look at all of it, every time. Else at all of it three times, then at 1/64."""


@dataclass(frozen=True, kw_only=True)
class KeeperConfig(_Section):
    """The process that outlives the trainers. Settings of the first trainer that starts it hold."""

    lease_s: float = 600.0
    """How long the state is kept when neither a launcher nor a trainer of the run is left."""
    fence_s: float = 10.0
    """How long a trainer of an older incarnation may take to die before its arena is abandoned to it."""
    orphan_s: float = 300.0
    """How long registered trainers may run on after their launcher died."""
    start_s: float = 30.0
    """Deadline for starting a keeper."""
    request_s: float = 60.0
    """Deadline for an answer of the keeper, restoring and memory excepted."""
    restore_s: float = 600.0
    """Deadline for the keeper's decision what to restore, verification included, and for new arenas."""
    seal_threads: int = 0
    """Threads that checksum snapshots, at low priority. 0: one for each core, 2 to 32."""
    reader_bytes: int = 268435456
    """Snapshots from this size on are checksummed in a process of its own, in half the CPU time. 0: never."""
    log_file: str = ""
    """Where the keeper logs. Default: a file beside its socket, removed with it after a normal end."""
    log_level: str = "INFO"
    """Level of the keeper's log."""


@dataclass(frozen=True, kw_only=True)
class ParityConfig(_Section):
    """What protects the state against the loss of whole nodes."""

    losses: int = 1
    """Nodes of a group that may be lost at once (m), 0 to 4. One node alone has no group, whatever this says."""
    group_size: int = 8
    """Nodes that protect each other, at most; groups of one job differ by at most one node."""
    replicated: str = "full"
    """State that is the same on several nodes: `full` keeps all of it on each, `share` S/(n-m) on each."""
    deadline_s: float = 30.0
    """An exchange that makes no progress for this long is abandoned; the newest version is next."""
    stall_s: float = 60.0
    """Unprotected for this long with no slot free: snapshots go on without waiting for protection (`exposed`)."""
    inventory_s: float = 20.0
    """How long a restore waits for a keeper of the incarnation before that does not answer and is not known dead."""


@dataclass(frozen=True, kw_only=True)
class PeersConfig(_Section):
    """How keepers reach each other."""

    address: str = ""
    """Address or interface (`eth0`) that peers reach. Default: the one that leads to the coordinator."""
    port: int = 0
    """Port to listen on. 0: any."""
    streams: int = 2
    """Connections for bytes, per peer and direction."""
    rate_bytes_s: int = 0
    """Cap for what this node receives and sends, each way, so that training keeps the network. 0: no cap."""
    window_bytes: int = 268435456
    """Memory for chunks in flight."""
    timeout_s: float = 10.0
    """A connection that moves no byte for this long is given up (TCP_USER_TIMEOUT and a progress deadline)."""
    dead_s: float = 3.0
    """A peer that is silent for this long is reported as away."""
    tls_cert: str = ""
    """Certificate of this node for TLS 1.3 between keepers; with tls_key and tls_ca, or none of the three."""
    tls_key: str = ""
    """Its private key."""
    tls_ca: str = ""
    """The authority that signed the peers' certificates."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(_Section):
    """Rounds under `--rdzv-backend=keepstep`: how often a job may be restarted, and when a node is dead."""

    restarts: int = 20
    """Restarts allowed within `window_s`; one more ends the job. A window, not a total: jobs run for weeks."""
    window_s: float = 3600.0
    """The window of that budget."""
    dead_s: float = 3.0
    """A node is dead when its agent was not heard for this long and its keeper does not answer."""
    settle_s: float = 30.0
    """How long a round stands before it is ended to let one more node in. The dead are not waited for."""
    store_s: float = 30.0
    """An agent without workers waits this long for a rendezvous store that does not answer, then gives up."""


@dataclass(frozen=True, kw_only=True)
class Config(_Section):
    """All settings. Pass only what you want to change."""

    run_id: str = ""
    """Names the job. Default: torchrun's --rdzv-id, then the scheduler's job id, then one per launch."""
    node_id: str = ""
    """Names the node. Default: the host name."""
    runtime_dir: str = ""
    """Where sockets live. Default: under XDG_RUNTIME_DIR, else /tmp; mode 0700."""
    every: int = 1
    """`take` acts on steps that are multiples of this."""
    secret_file: str = ""
    """The job's secret, one file for all nodes. Default: drawn per run and passed through the rendezvous store."""
    failure_domain: str = ""
    """What fails together with this node (rack, switch): groups are spread over domains."""
    address: str = ""
    """Short for peers.address."""
    replicated: str = ""
    """Paths (comma separated prefixes) that are the same on all ranks although nothing in torch says so."""
    rng: bool = True
    """Capture and restore the random states of python, numpy, torch and every CUDA device."""
    grads: bool = False
    """Capture `.grad` of optimizer parameters too (for `take` between accumulation steps)."""
    arena: ArenaConfig = field(default_factory=ArenaConfig)
    """Shared memory."""
    take: TakeConfig = field(default_factory=TakeConfig)
    """What `take` may cost."""
    keeper: KeeperConfig = field(default_factory=KeeperConfig)
    """The keeper."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """Restarts."""
    parity: ParityConfig = field(default_factory=ParityConfig)
    """Protection across nodes."""
    peers: PeersConfig = field(default_factory=PeersConfig)
    """The network between keepers."""


def resolve(
    config: Config | None = None, *, environ: Mapping[str, str] | None = None, directory: Path | None = None
) -> Config:
    """The settings in force: what `config` was given, else environment, file, default."""
    environ = os.environ if environ is None else environ
    given = _given(config) if config is not None else {}
    settings: dict[str, tuple[Any, str]] = {}
    settings.update(_from_file(_config_file(environ, directory)))
    settings.update(_from_environment(environ))
    settings.update({name: (value, "argument") for name, value in given.items()})
    resolved = _build(settings)
    _check(resolved, {name: origin for name, (_, origin) in settings.items()})
    return resolved


def as_environment(config: Config) -> dict[str, str]:
    """The settings as environment variables, for a child that must see the same ones."""
    return {ENV_PREFIX + name.replace(".", "_").upper(): _to_text(value) for name, value in _given(config).items()}


def _fields() -> dict[str, tuple[type, Any]]:
    """Dotted name -> (type, default) of every setting."""
    found: dict[str, tuple[type, Any]] = {}
    hints = typing.get_type_hints(Config)
    for entry in dataclasses.fields(Config):
        kind = hints[entry.name]
        if dataclasses.is_dataclass(kind):
            section_hints = typing.get_type_hints(kind)
            for inner in dataclasses.fields(kind):
                found[f"{entry.name}.{inner.name}"] = (section_hints[inner.name], inner.default)
        else:
            found[entry.name] = (kind, entry.default)
    return found


def _sections() -> dict[str, type]:
    hints: dict[str, type] = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if issubclass(kind, _Section)}


def _given(config: Config) -> dict[str, Any]:
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a keepstep.Config, not {type(config).__name__}", hint="keepstep.Config(every=10)"
        )
    for section, kind in _sections().items():
        if not isinstance(part := getattr(config, section), kind):
            raise ConfigError(
                f"{section} = {part!r} (from argument) is not a {kind.__name__}", hint=f"{section}={kind.__name__}(...)"
            )
    values: dict[str, Any] = {}
    for name in _fields():
        section, _, leaf = name.rpartition(".")
        part = getattr(config, section) if section else config
        if leaf in part.given:
            values[name] = getattr(part, leaf)
    return values


def _config_file(environ: Mapping[str, str], directory: Path | None) -> Path | None:
    named = environ.get(ENV_PREFIX + "CONFIG_FILE")
    if named:
        if not Path(named).is_file():
            raise ConfigError(
                f"KEEPSTEP_CONFIG_FILE={named!r} is not a file", hint="point it to a TOML file or unset it"
            )
        return Path(named)
    path = (directory or Path.cwd()) / CONFIG_FILE
    return path if path.is_file() else None


def _from_file(path: Path | None) -> dict[str, tuple[Any, str]]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="fix the file or remove it") from error
    known = _fields()
    found: dict[str, tuple[Any, str]] = {}
    for key, value in document.items():
        if value == {} and key in _sections():
            continue
        in_section = isinstance(value, dict) and value
        items = {f"{key}.{inner}": v for inner, v in value.items()} if in_section else {key: value}
        for name, item in items.items():
            if name not in known:
                raise _unknown(name, item, str(path))
            found[name] = (_from_toml(name, item, known[name][0], str(path)), str(path))
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    known = {name.replace(".", "_").upper(): (name, kind) for name, (kind, _) in _fields().items()}
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        key = variable[len(ENV_PREFIX) :]
        if key in HANDED_DOWN or key.startswith(IGNORED_PREFIXES):
            continue
        if key not in known:
            raise _unknown(key.lower(), text, f"environment variable {variable}")
        if text != "":
            name, kind = known[key]
            found[name] = (_from_text(name, text, kind, f"environment variable {variable}"), f"environment {variable}")
    return found


def _unknown(name: str, value: Any, origin: str) -> ConfigError:
    near = [known for known in _fields() if known.split(".")[-1] in name or name in known]
    hint = f"did you mean {near[0]}?" if near else "known settings: " + ", ".join(sorted(_fields()))
    return ConfigError(f"unknown setting {name} = {value!r} in {origin}", hint=hint)


def _from_text(name: str, text: str, kind: type, origin: str) -> Any:
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{name} = {text!r} in {origin} is not a valid {kind.__name__}", hint=f"give a {kind.__name__}"
        ) from error


def _from_toml(name: str, value: Any, kind: type, origin: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} = {value!r} in {origin} is not a valid {kind.__name__}")
    return value


def _to_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _build(settings: Mapping[str, tuple[Any, str]]) -> Config:
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, (value, _) in settings.items():
        section, _, leaf = name.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[leaf] = value
    hints = typing.get_type_hints(Config)
    for section, values in sections.items():
        top[section] = hints[section](**values)
    return Config(**top)


_RANGES: Mapping[str, tuple[float, float]] = types.MappingProxyType(
    {
        "every": (1, 2**31),
        "arena.slots": (2, 4),
        "arena.prefault_threads": (1, 64),
        "arena.memory_limit_bytes": (0, 2**62),
        "take.budget_ms": (0, 3_600_000),
        "take.rate_bytes_s": (0, 2**62),
        "take.small_bytes": (0, 2**30),
        "take.staging_share": (0, 1),
        "take.staging_free_share": (0, 0.5),
        "keeper.lease_s": (0, 30 * 86400),
        "keeper.fence_s": (0.1, 3600),
        "keeper.orphan_s": (0, 30 * 86400),
        "keeper.start_s": (1, 3600),
        "keeper.request_s": (1, 3600),
        "keeper.restore_s": (1, 86400),
        "keeper.seal_threads": (0, 64),
        "keeper.reader_bytes": (0, 2**62),
        "parity.losses": (0, 4),
        "parity.group_size": (2, 36),
        "parity.deadline_s": (0.1, 86400),
        "parity.stall_s": (0.1, 86400),
        "parity.inventory_s": (0.1, 3600),
        "peers.port": (0, 65535),
        "peers.streams": (1, 16),
        "peers.rate_bytes_s": (0, 2**62),
        "peers.window_bytes": (1 << 24, 2**40),
        "peers.timeout_s": (0.1, 3600),
        "peers.dead_s": (0.1, 3600),
        "launch.restarts": (0, 2**31),
        "launch.window_s": (1, 30 * 86400),
        "launch.dead_s": (0.5, 3600),
        "launch.settle_s": (0, 86400),
        "launch.store_s": (1, 86400),
    }
)


def _check(config: Config, origins: Mapping[str, str]) -> None:
    for name, (kind, _) in _fields().items():
        section, _, leaf = name.rpartition(".")
        value: Any = getattr(getattr(config, section) if section else config, leaf)
        found = f"{name} = {value!r} (from {origins.get(name, 'default')})"
        if type(value) not in ((float, int) if kind is float else (kind,)):
            raise ConfigError(f"{found} is not a valid {kind.__name__}", hint=f"give a {kind.__name__}")
        if name in _RANGES:
            low, high = _RANGES[name]
            if not low <= value <= high:
                raise ConfigError(f"{found} is out of range", hint=f"{low} to {high}")
    if config.parity.replicated not in ("full", "share"):
        raise ConfigError(f"parity.replicated = {config.parity.replicated!r} is not known", hint="full or share")
    tls = (config.peers.tls_cert, config.peers.tls_key, config.peers.tls_ca)
    if any(tls) and not all(tls):
        raise ConfigError("peers.tls_cert, tls_key and tls_ca go together", hint="set all three, or none")
    if config.keeper.log_level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"keeper.log_level = {config.keeper.log_level!r} is not a level", hint="INFO")
