"""Settings: argument > environment > `keepstep.toml` > default.

A `Config` holds what the user passed; `resolve()` fills every other field from the environment (`KEEPSTEP_EVERY`,
`KEEPSTEP_KEEPER_LEASE_S`: section and field in capitals), then from `keepstep.toml` in the working directory (or
`KEEPSTEP_CONFIG_FILE`), then from the defaults below. The annotation of a field is its type and its range; msgspec
checks both. An unknown key is an error that names the field, the value and its source.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from keepstep.errors import ConfigError

ENV_PREFIX = "KEEPSTEP_"
CONFIG_FILE = "keepstep.toml"

# Names that start with the prefix and are no settings: what processes of a node pass to each other.
HANDED_DOWN = frozenset({"INCARNATION", "CONFIG_FILE", "SOCKET", "CHECK"})
IGNORED_PREFIXES = ("BENCH_", "TEST_", "DEMO_")

BOOLEANS = {"yes": "true", "no": "false"}  # msgspec accepts true, false, 1 and 0

Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Days = Annotated[float, Meta(ge=0, le=30 * 86400)]
Seconds = Annotated[float, Meta(ge=0.1, le=3600)]


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

    slots: Annotated[int, Meta(ge=2, le=4)] | Literal["auto"] = "auto"
    """Snapshots that fit, 2 to 4. Two always hold one complete version while the next is written; with three the
    next one may begin before the last has ended (every step, though the copy is longer than a step); with four that
    one may also still be checksummed (a host that runs ahead of its device). `auto`: 2."""
    memory_limit_bytes: Bytes = 0
    """Refuse to take more than this for one rank's arena; 0: what the cgroup and the machine allow."""


@dataclass(frozen=True, kw_only=True)
class TakeConfig(_Section):
    """What one `take` may cost."""

    budget_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 1000.0
    """Copies that must finish inside `take` (nothing fences their writer) may hold it this long, else it skips."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 2.0
    """`take` waits for its grant, and for the copy before it, at most this long, and only while a CUDA device still
    works on what was queued before it. 0: never."""
    rate_bytes_s: Bytes = 0
    """Cap for the background copy; lifted while an optimizer waits for it. 0: no cap."""
    staging_share: Annotated[float, Meta(ge=0, le=1)] = 0.095
    """Device memory for tensors that cannot be copied out before the next update, as a share of the state."""
    fingerprint: Literal["off", "sampled", "all"] = "sampled"
    """Fingerprint what is copied behind `take` beforehand, and compare the copy and what is restored with it. On GPUs
    `sampled` covers all of it for the first three snapshots, then 1/64; `all` covers all of it every time."""


@dataclass(frozen=True, kw_only=True)
class KeeperConfig(_Section):
    """The process that outlives the trainers. Settings of the first trainer that starts it hold."""

    lease_s: Days = 600.0
    """How long the state is kept when neither a launcher nor a trainer of the run is left; without a run id at most
    60 s."""
    fence_s: Seconds = 10.0
    """How long a trainer of an older incarnation may take to die before its arena is abandoned to it."""
    orphan_s: Days = 300.0
    """How long registered trainers may run on after their launcher died."""
    seal_threads: Annotated[int, Meta(ge=0, le=64)] = 0
    """Threads that checksum snapshots, at low priority. 0: one for each core, 2 to 32."""
    log_file: str = ""
    """Where the keeper logs. Default: a file beside its socket, removed with it after a normal end."""


@dataclass(frozen=True, kw_only=True)
class ParityConfig(_Section):
    """What protects the state against the loss of whole nodes."""

    losses: Annotated[int, Meta(ge=0, le=4)] = 1
    """Nodes of a group that may be lost at once (m), 0 to 4. One node alone has no group, whatever this is."""
    group_size: Annotated[int, Meta(ge=2, le=36)] = 8
    """Nodes that protect each other, at most; groups of one job differ by at most one node."""
    replicated: Literal["full", "share"] = "full"
    """State that is the same on several nodes: `full` keeps all of it on each, `share` S/(n-m) on each."""


@dataclass(frozen=True, kw_only=True)
class PeersConfig(_Section):
    """How keepers reach each other."""

    address: str = ""
    """Address or interface (`eth0`) that peers reach. Default: the one that leads to the coordinator."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port to listen on. 0: any."""
    rate_bytes_s: Bytes = 0
    """Cap for what this node receives and sends, each way, so that training keeps the network. 0: no cap."""
    dead_s: Seconds = 3.0
    """A keeper that is silent for this long is reported as away; a node is dead when its launcher is silent for this
    long and its keeper does not answer."""
    tls_cert: str = ""
    """Certificate of this node for TLS 1.3 between keepers; with tls_key and tls_ca, or none of the three."""
    tls_key: str = ""
    """Its private key."""
    tls_ca: str = ""
    """The authority that signed the peers' certificates."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(_Section):
    """Rounds under `--rdzv-backend=keepstep`."""

    restarts: Annotated[int, Meta(ge=0, le=2**31)] = 20
    """Restarts allowed within an hour; one more ends the job. A window, not a total: jobs run for weeks."""


@dataclass(frozen=True, kw_only=True)
class Config(_Section):
    """All settings. Pass only what you want to change."""

    run_id: str = ""
    """Names the job. Default: torchrun's --rdzv-id, then the scheduler's job id, then one per launch."""
    node_id: str = ""
    """Names the node. Default: the host name."""
    runtime_dir: str = ""
    """Where sockets live. Default: under XDG_RUNTIME_DIR, else /tmp; mode 0700."""
    every: Annotated[int, Meta(ge=1, le=2**31)] = 1
    """`take` acts on steps that are multiples of this."""
    secret_file: str = ""
    """The job's secret, one file for all nodes. Default: drawn per run and passed through the rendezvous store."""
    failure_domain: str = ""
    """What fails together with this node (rack, switch): groups are spread over domains."""
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


# Settings of earlier versions, and what to set instead; nothing: it is a constant now.
REMOVED: Mapping[str, str] = {
    "address": "peers.address",
    "take.fingerprint_all": "take.fingerprint = all",
    "launch.dead_s": "peers.dead_s",
} | dict.fromkeys(
    (
        "arena.prefault_threads", "take.small_bytes", "take.staging_free_share", "keeper.start_s", "keeper.request_s",
        "keeper.restore_s", "keeper.reader_bytes", "keeper.log_level", "parity.deadline_s", "parity.stall_s",
        "parity.inventory_s", "peers.streams", "peers.window_bytes", "peers.timeout_s", "launch.window_s",
        "launch.settle_s", "launch.store_s",
    ),
    "",
)  # fmt: skip


class Given(NamedTuple):
    """A value as it was given, and where."""

    value: Any
    source: str
    text: bool = False  # from the environment: "3" is a number there


# A file that merely lies in the working directory may not choose where this user's processes write and read.
PATH_SETTINGS = ("runtime_dir", "secret_file", "keeper.log_file", "peers.tls_cert", "peers.tls_key", "peers.tls_ca")


def resolve(
    config: Config | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    local_file: bool = True,
) -> Config:
    """The settings in force: what `config` was given, else environment, file, default.

    `local_file`: read `keepstep.toml` of the working directory. Commands of an operator, run anywhere, do not.
    """
    environ = os.environ if environ is None else environ
    if (named := _named_file(environ)) is not None:
        values = _from_file(named)
    else:
        values = _from_local_file((directory or Path.cwd()) / CONFIG_FILE) if local_file else {}
    values |= _from_environment(environ)
    values |= {name: Given(value, "argument") for name, value in _passed(config).items()}
    resolved = _build(values)
    tls = (resolved.peers.tls_cert, resolved.peers.tls_key, resolved.peers.tls_ca)
    if any(tls) and not all(tls):
        raise ConfigError("peers.tls_cert, tls_key and tls_ca go together", hint="set all three, or none")
    return resolved


def as_environment(config: Config) -> dict[str, str]:
    """The settings as environment variables, for a child process that must have the same ones."""
    return {variable(name): _to_text(value) for name, value in _passed(config).items()}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.replace(".", "_").upper()


@functools.cache
def all_settings() -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (type with its range, default) of every setting."""
    sections: dict[str, Any] = {"": Config, **_sections()}
    hints = {name: typing.get_type_hints(kind, include_extras=True) for name, kind in sections.items()}
    return {
        f"{name}.{leaf.name}" if name else leaf.name: (hints[name][leaf.name], leaf.default)
        for name, kind in sections.items()
        for leaf in dataclasses.fields(kind)
        if name or leaf.name not in sections
    }


def _sections() -> dict[str, type[_Section]]:
    hints: dict[str, Any] = typing.get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, _Section)}


def _passed(config: Config | None) -> dict[str, Any]:
    if config is None:
        return {}
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
    for name in all_settings():
        section, _, leaf = name.rpartition(".")
        part = getattr(config, section) if section else config
        if leaf in part.given:
            values[name] = getattr(part, leaf)
    return values


def _named_file(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(ENV_PREFIX + "CONFIG_FILE")
    if not named:
        return None
    if not Path(named).is_file():
        raise ConfigError(f"KEEPSTEP_CONFIG_FILE={named!r} is not a file", hint="point it to a TOML file or unset it")
    return Path(named)


def _from_local_file(path: Path) -> dict[str, Given]:
    if not path.is_file():
        return {}
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise ConfigError(
            f"{path} belongs to another user or can be written by others",
            hint="chmod go-w, or name the file that you trust in KEEPSTEP_CONFIG_FILE",
        )
    values = _from_file(path)
    for name in PATH_SETTINGS:
        if name in values:
            raise ConfigError(
                f"{path} sets {name}, which a file that is only found in the working directory may not",
                hint=f"set {variable(name)}, or name the file in KEEPSTEP_CONFIG_FILE",
            )
    return values


def _from_file(path: Path) -> dict[str, Given]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="fix the file or remove it") from error
    values: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and (value or key in _sections()):
            values |= {f"{key}.{leaf}": item for leaf, item in value.items()}
        else:
            values[key] = value
    for name, value in values.items():
        if name not in all_settings():
            raise _unknown(name, value, str(path))
    return {name: Given(value, str(path)) for name, value in values.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    names = {variable(name): name for name in all_settings()}
    removed = {variable(name): name for name in REMOVED}
    values: dict[str, Given] = {}
    for key, text in environ.items():
        bare = key.removeprefix(ENV_PREFIX)
        if bare == key or bare in HANDED_DOWN or bare.startswith(IGNORED_PREFIXES):
            continue
        source = f"environment variable {key}"
        if key not in names:
            raise _unknown(removed.get(key, bare.lower()), text, source)
        if text != "":
            values[names[key]] = Given(text, source, text=True)
    return values


def _unknown(name: str, value: Any, source: str) -> ConfigError:
    setting = f"{name} = {value!r} in {source}"
    if name in REMOVED:
        instead = REMOVED[name]
        reason = f"was replaced by {instead}" if instead else "is a constant now"
        return ConfigError(f"{setting} {reason}", hint=f"set {instead}" if instead else "remove it")
    near = [known for known in all_settings() if known.split(".")[-1] in name or name in known]
    hint = f"did you mean {near[0]}?" if near else "known settings: " + ", ".join(sorted(all_settings()))
    return ConfigError(f"unknown setting {setting}", hint=hint)


def _build(values: Mapping[str, Given]) -> Config:
    types = all_settings()
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, given in values.items():
        section, _, leaf = name.rpartition(".")
        target = sections.setdefault(section, {}) if section else top
        target[leaf] = _convert(name, given, types[name][0])
    kinds = _sections()
    top |= {section: kinds[section](**leaves) for section, leaves in sections.items()}
    return Config(**top)


def _convert(name: str, given: Given, kind: Any) -> Any:
    value = BOOLEANS.get(given.value.lower(), given.value) if given.text and kind is bool else given.value
    try:
        return msgspec.convert(value, kind, strict=not given.text)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name} = {given.value!r} (from {given.source}) is not valid: {str(error)[0].lower()}{str(error)[1:]}",
            hint=_choices(kind),
        ) from error


def _choices(kind: Any) -> str:
    """What a field accepts, in words: `2 to 4 or auto`."""
    match typing.get_origin(kind):
        case typing.Annotated:
            number, limits = typing.get_args(kind)
            return f"{_choices(number)}, {limits.ge} to {limits.le}"
        case typing.Literal:
            return " or ".join(typing.get_args(kind))
        case None:
            return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    return " or ".join(_choices(option) for option in typing.get_args(kind))


def _to_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
