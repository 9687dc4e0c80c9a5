"""Settings: argument > environment > keepstep.toml > default, and errors that say where a value came from."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import os
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest

from keepstep import config as configs
from keepstep.arena.slots import AUTO, requested_slots
from keepstep.config import (
    ArenaConfig,
    Config,
    KeeperConfig,
    TakeConfig,
    as_environment,
    resolve,
    variable,
)
from keepstep.errors import ConfigError

ALL_FIELDS = configs.all_settings()
TOGETHER = ("peers.tls_cert", "peers.tls_key", "peers.tls_ca")
FIELDS = {name: setting for name, setting in ALL_FIELDS.items() if name not in TOGETHER}
MOST_SETTINGS = 32  # each one is a promise: one that nobody sets is a constant
SECTIONS = {name: kind for name, kind in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(kind)}


def value_of(config: Config, name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def number_of(name: str) -> tuple[type, float, float] | None:
    """Type and range of a setting that is a number."""
    kind = FIELDS[name][0]
    annotated = [part for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Annotated]
    if not annotated:
        return None
    number, limits = typing.get_args(annotated[0])
    return number, limits.ge, limits.le


NUMBERS = {name: number for name in FIELDS if (number := number_of(name)) is not None}


def type_name(name: str) -> str:
    return NUMBERS[name][0].__name__ if name in NUMBERS else FIELDS[name][0].__name__


def other_value(name: str) -> Any:
    """A valid value that is not the default."""
    kind, default = FIELDS[name]
    if kind is bool:
        return not default
    if name in NUMBERS:
        return 3 if name == "arena.slots" else default / 2 if 0 < default < 1 else default + 1
    if choices := typing.get_args(kind):
        return next(choice for choice in choices if choice != default)
    return f"some {name}"


def config_with(name: str, value: Any) -> Config:
    section, _, leaf = name.rpartition(".")
    if section:
        return Config(**{section: SECTIONS[section](**{leaf: value})})
    return Config(**{leaf: value})


def toml(directory: Path, name: str, value: Any) -> Path:
    section, _, leaf = name.rpartition(".")
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    # A file that is only found in the working directory may not set paths.
    path = directory / ("named.toml" if name in configs.PATH_SETTINGS else "keepstep.toml")
    path.write_text((f"[{section}]\n" if section else "") + f"{leaf} = {text}\n")
    return path


def env(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def resolved(config: Config | None = None, environ: dict[str, str] | None = None, *, at: Path) -> Config:
    named = {"KEEPSTEP_CONFIG_FILE": str(at / "named.toml")} if (at / "named.toml").exists() else {}
    return resolve(config, environ={**named, **(environ or {})}, directory=at)


@pytest.mark.parametrize("missing", TOGETHER)
def test_tls_is_set_as_a_whole_or_not_at_all(tmp_path: Path, missing: str) -> None:
    whole = {variable(name): f"/some/{name}" for name in TOGETHER}
    assert resolved(environ=whole, at=tmp_path).peers.tls_ca == "/some/peers.tls_ca"
    with pytest.raises(ConfigError, match="go together"):
        resolved(environ={name: value for name, value in whole.items() if name != variable(missing)}, at=tmp_path)


# Precedence


def test_nothing_given_resolves_to_the_defaults(tmp_path: Path) -> None:
    for config in (None, Config()):
        found = resolved(config, at=tmp_path)
        assert {name: value_of(found, name) for name in FIELDS} == {
            name: default for name, (_, default) in FIELDS.items()
        }
        assert found.given == frozenset()


@pytest.mark.parametrize("name", FIELDS)
def test_file_beats_default(tmp_path: Path, name: str) -> None:
    toml(tmp_path, name, other_value(name))
    assert value_of(resolved(at=tmp_path), name) == other_value(name)


@pytest.mark.parametrize("name", FIELDS)
def test_environment_beats_default(tmp_path: Path, name: str) -> None:
    found = resolved(environ={variable(name): env(other_value(name))}, at=tmp_path)
    assert value_of(found, name) == other_value(name)
    assert type(value_of(found, name)) is type(other_value(name))


@pytest.mark.parametrize("name", [name for name, (_, default) in FIELDS.items() if default != ""])
def test_environment_beats_file_even_with_the_default(tmp_path: Path, name: str) -> None:
    toml(tmp_path, name, other_value(name))
    found = resolved(environ={variable(name): env(FIELDS[name][1])}, at=tmp_path)
    assert value_of(found, name) == FIELDS[name][1]


@pytest.mark.parametrize("name", FIELDS)
def test_argument_beats_environment_and_file(tmp_path: Path, name: str) -> None:
    toml(tmp_path, name, FIELDS[name][1])
    environ = {variable(name): env(FIELDS[name][1])}
    assert value_of(resolved(config_with(name, other_value(name)), environ, at=tmp_path), name) == other_value(name)


@pytest.mark.parametrize("name", FIELDS)
def test_argument_equal_to_its_default_still_beats_environment_and_file(tmp_path: Path, name: str) -> None:
    toml(tmp_path, name, other_value(name))
    environ = {variable(name): env(other_value(name))}
    config = config_with(name, FIELDS[name][1])
    assert value_of(resolved(config, environ, at=tmp_path), name) == FIELDS[name][1]


def test_fields_of_one_section_can_come_from_four_places(tmp_path: Path) -> None:
    (tmp_path / "keepstep.toml").write_text("[keeper]\nlease_s = 11\nfence_s = 12\norphan_s = 13\n")
    environ = {"KEEPSTEP_KEEPER_FENCE_S": "22", "KEEPSTEP_KEEPER_ORPHAN_S": "23"}
    keeper = resolved(Config(keeper=KeeperConfig(orphan_s=33.0)), environ, at=tmp_path).keeper
    assert (keeper.lease_s, keeper.fence_s, keeper.orphan_s, keeper.seal_threads) == (11.0, 22.0, 33.0, 0)


def test_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    toml(tmp_path, "every", 7)
    assert resolved(environ={"KEEPSTEP_EVERY": "", "KEEPSTEP_RUN_ID": ""}, at=tmp_path).every == 7


def test_file_named_in_the_environment_is_used_instead_of_the_one_at_hand(tmp_path: Path) -> None:
    toml(tmp_path, "every", 7)
    other = tmp_path / "other.toml"
    other.write_text("every = 9\n")
    assert resolved(environ={"KEEPSTEP_CONFIG_FILE": str(other)}, at=tmp_path).every == 9


@pytest.mark.parametrize("name", configs.PATH_SETTINGS)
def test_file_that_is_only_found_sets_no_paths(tmp_path: Path, name: str) -> None:
    section, _, leaf = name.rpartition(".")
    (tmp_path / "keepstep.toml").write_text((f"[{section}]\n" if section else "") + f'{leaf} = "~/.bashrc"\n')
    assert_names(refused(at=tmp_path), tmp_path / "keepstep.toml", name, variable(name))


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    toml(tmp_path, "every", 7).chmod(mode)
    assert_names(refused(at=tmp_path), tmp_path / "keepstep.toml", "can be written by others")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another user")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = toml(tmp_path, "every", 7)
    os.chown(path, 12345, 12345)
    assert_names(refused(at=tmp_path), path, "belongs to another user")


def test_operators_commands_do_not_read_the_file_at_hand(tmp_path: Path) -> None:
    toml(tmp_path, "every", 7).chmod(0o666)
    assert resolve(environ={}, directory=tmp_path, local_file=False).every == 1


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    toml(tmp_path, "arena.slots", 3)
    once = resolved(Config(every=5), {"KEEPSTEP_GRADS": "yes"}, at=tmp_path)
    assert resolved(once, {"KEEPSTEP_EVERY": "9", "KEEPSTEP_ARENA_SLOTS": "4"}, at=tmp_path) == once


def test_working_directory_and_environment_of_the_process_are_used_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml(tmp_path, "every", 7)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEPSTEP_ARENA_SLOTS", "4")
    found = resolve()
    assert (found.every, found.arena.slots) == (7, 4)


# Errors name the field, the value and where it came from


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(*args, **kwargs)
    return str(caught.value)


def assert_names(text: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in text


def test_unknown_variable_is_refused(tmp_path: Path) -> None:
    text = refused(environ={"KEEPSTEP_EVREY": "3"}, at=tmp_path)
    assert_names(text, "unknown setting evrey", "'3'", "environment variable KEEPSTEP_EVREY")


def test_unknown_variable_is_refused_even_when_empty(tmp_path: Path) -> None:
    assert_names(refused(environ={"KEEPSTEP_EVREY": ""}, at=tmp_path), "unknown setting evrey")


def test_unknown_setting_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keepstep.toml").write_text("every = 2\nevrey = 3\n")
    assert_names(refused(at=tmp_path), "unknown setting evrey = 3", tmp_path / "keepstep.toml")


@pytest.mark.parametrize(
    "text", ["[party]\nlosses = 2\n", "[arena]\nslot = 2\n", "[arena.slots]\nx = 2\n", "arena = 2\n"]
)
def test_unknown_setting_of_a_section_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keepstep.toml").write_text(text)
    assert_names(
        refused(at=tmp_path), "unknown setting" if "slots" not in text else "arena.slots", "2", "keepstep.toml"
    )


def test_empty_section_is_nothing_if_known_and_refused_if_not(tmp_path: Path) -> None:
    (tmp_path / "keepstep.toml").write_text("[arena]\n")
    assert resolved(at=tmp_path) == Config()
    (tmp_path / "keepstep.toml").write_text("[arean]\n")
    assert_names(refused(at=tmp_path), "unknown setting arean", "keepstep.toml")


def test_unknown_setting_has_a_near_one_as_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environ={"KEEPSTEP_SLOTS": "3"}, directory=Path("/"))
    assert caught.value.hint == "did you mean arena.slots?"


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="evrey"):
        Config(evrey=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("config", [{"every": 2}, 5, ArenaConfig()])
def test_config_that_is_not_a_config_is_refused(tmp_path: Path, config: Any) -> None:
    assert_names(refused(config, at=tmp_path), f"not {type(config).__name__}")


@pytest.mark.parametrize("section", [{"slots": 3}, None, 3, KeeperConfig(lease_s=1.0)], ids=repr)
def test_section_of_another_type_is_refused_and_not_ignored(tmp_path: Path, section: Any) -> None:
    assert_names(refused(Config(arena=section), at=tmp_path), "arena", repr(section), "argument", "ArenaConfig")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("every", "often"), ("every", "1.5"), ("every", "0x2"), ("rng", "maybe"), ("rng", "2"),
        ("keeper.lease_s", "ten"),
    ],
)  # fmt: skip
def test_variable_of_the_wrong_type_is_refused(tmp_path: Path, name: str, text: str) -> None:
    error = refused(environ={variable(name): text}, at=tmp_path)
    assert_names(error, f"{name} = {text!r}", variable(name), type_name(name))


@pytest.mark.parametrize(
    ("name", "text"),
    [("every", '"2"'), ("every", "2.0"), ("every", "true"), ("rng", "1"), ("keeper.lease_s", '"9"'), ("run_id", "7")],
)
def test_file_with_a_value_of_the_wrong_type_is_refused(tmp_path: Path, name: str, text: str) -> None:
    section, _, leaf = name.rpartition(".")
    (tmp_path / "keepstep.toml").write_text((f"[{section}]\n" if section else "") + f"{leaf} = {text}\n")
    assert_names(refused(at=tmp_path), f"{name} = ", tmp_path / "keepstep.toml", type_name(name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", "2"), ("every", 2.0), ("every", True), ("every", None), ("rng", "no"), ("rng", 1), ("run_id", 7),
        ("run_id", None), ("node_id", b"a"), ("runtime_dir", Path("/x")), ("keeper.lease_s", "9"),
        ("keeper.lease_s", True), ("keeper.log_file", 10),
    ],
)  # fmt: skip
def test_argument_of_the_wrong_type_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    error = refused(config_with(name, value), at=tmp_path)
    assert_names(error, f"{name} = {value!r}", "argument", type_name(name))


def test_whole_number_is_a_float_too(tmp_path: Path) -> None:
    assert resolved(Config(keeper=KeeperConfig(lease_s=5)), at=tmp_path).keeper.lease_s == 5


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_out_of_range_are_refused_wherever_they_come_from(tmp_path: Path, name: str) -> None:
    kind, low, high = NUMBERS[name]
    for bad, limit in ((kind(low) - 1, f">= {low}"), (kind(high) * 2 + 1, f"<= {high}")):
        with pytest.raises(ConfigError) as caught:
            resolved(config_with(name, bad), at=tmp_path)
        assert_names(str(caught.value), f"{name} = {bad!r}", "argument", limit, f"{low} to {high}")
        error = refused(environ={variable(name): str(bad)}, at=tmp_path)
        assert_names(error, f"{name} = '{bad}'", variable(name), limit)
    toml(tmp_path, name, kind(low) - 1)
    assert_names(refused(at=tmp_path), f">= {low}", tmp_path / "keepstep.toml")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_number_that_is_not_finite_is_refused(tmp_path: Path, text: str) -> None:
    assert_names(refused(environ={"KEEPSTEP_KEEPER_LEASE_S": text}, at=tmp_path), "keeper.lease_s", "is not valid")


def test_every_number_has_a_range_and_its_default_lies_in_it() -> None:
    plain = {name for name, (kind, _) in FIELDS.items() if kind in (int, float)}
    assert not plain
    for name, (_, low, high) in NUMBERS.items():
        assert FIELDS[name][1] == "auto" or low <= FIELDS[name][1] <= high


@pytest.mark.parametrize("name", ["take.fingerprint", "parity.replicated", "arena.slots"])
def test_choice_that_does_not_exist_is_refused_with_the_choices(tmp_path: Path, name: str) -> None:
    error = refused(environ={variable(name): "loud"}, at=tmp_path)
    assert_names(error, name, "'loud'")
    with pytest.raises(ConfigError) as caught:
        resolved(config_with(name, "loud"), at=tmp_path)
    choices = [choice for choice in typing.get_args(FIELDS[name][0]) if isinstance(choice, str)]
    for choice in choices or ["auto"]:
        assert choice in str(caught.value.hint)


@pytest.mark.parametrize("name", configs.REMOVED)
def test_removed_setting_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    reason = "was replaced by" if configs.REMOVED[name] else "is a constant now"
    for empty in ("", "5"):
        error = refused(environ={variable(name): empty}, at=tmp_path)
        assert_names(error, f"{name} = {empty!r}", variable(name), reason)
    toml(tmp_path, name, 5)
    assert_names(refused(at=tmp_path), f"{name} = 5", tmp_path / "keepstep.toml", reason)


def test_removed_settings_name_settings_that_exist_and_are_none_themselves() -> None:
    for name, instead in configs.REMOVED.items():
        assert name not in ALL_FIELDS
        assert not instead or instead.split(" ")[0] in ALL_FIELDS


def test_number_of_settings_stays_small() -> None:
    assert len(ALL_FIELDS) <= MOST_SETTINGS


def test_slots_are_a_number_or_decided_by_keepstep(tmp_path: Path) -> None:
    assert requested_slots(resolved(at=tmp_path).arena) == AUTO
    assert requested_slots(resolved(Config(arena=ArenaConfig(slots=4)), at=tmp_path).arena) == 4
    assert requested_slots(resolved(environ={"KEEPSTEP_ARENA_SLOTS": "3"}, at=tmp_path).arena) == 3
    assert requested_slots(resolved(environ={"KEEPSTEP_ARENA_SLOTS": "auto"}, at=tmp_path).arena) == AUTO


@pytest.mark.parametrize("content", [b"every = = 2", b"\xff\xfe", b"every = 2\nevery = 3\n"])
def test_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keepstep.toml").write_bytes(content)
    assert_names(refused(at=tmp_path), tmp_path / "keepstep.toml", "cannot be read")


def test_named_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.toml")
    assert_names(refused(environ={"KEEPSTEP_CONFIG_FILE": missing}, at=tmp_path), "KEEPSTEP_CONFIG_FILE", missing)


def test_what_processes_hand_each_other_is_not_a_setting(tmp_path: Path) -> None:
    environ = {f"KEEPSTEP_{name}": "anything" for name in configs.HANDED_DOWN - {"CONFIG_FILE"}}
    environ |= {"KEEPSTEP_TEST_X": "1", "KEEPSTEP_BENCH_X": "1", "KEEPSTEP_DEMO_X": "1", "OTHER": "1"}
    assert resolved(environ=environ, at=tmp_path) == Config()


# What a config is


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = {variable(name) for name in FIELDS}
    assert len(variables) == len(FIELDS)
    assert not variables & {f"KEEPSTEP_{name}" for name in configs.HANDED_DOWN}


def _is_docstring(rest: list[ast.stmt]) -> bool:
    match rest:
        case [ast.Expr(value=ast.Constant(value=str(text))), *_]:
            return bool(text.strip())
    return False


def test_every_field_of_every_section_has_a_docstring_under_it() -> None:
    tree = ast.parse(inspect.getsource(configs))
    sections = {kind.__name__ for kind in (Config, *SECTIONS.values())}
    checked = 0
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in sections:
            assert ast.get_docstring(node), f"{node.name} has no docstring"
            for position, statement in enumerate(node.body):
                if isinstance(statement, ast.AnnAssign):
                    assert _is_docstring(node.body[position + 1 :]), f"{node.name}.{ast.unparse(statement.target)}"
                    checked += 1
    assert checked == len(ALL_FIELDS) + len(SECTIONS)


def test_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().every = 2  # type: ignore[misc]
    for kind in (Config, *SECTIONS.values()):
        with pytest.raises(TypeError):
            kind(1)


def test_config_remembers_what_was_given_through_copies_and_pickles() -> None:
    config = Config(every=1, arena=ArenaConfig(slots=2))
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert same.given == {"every", "arena"}
        assert same.arena.given == {"slots"}


# For a child process


@pytest.mark.parametrize("name", FIELDS)
def test_child_sees_the_same_value_whatever_its_file_says(tmp_path: Path, name: str) -> None:
    config = config_with(name, other_value(name))
    toml(tmp_path, name, FIELDS[name][1])
    environ = as_environment(config)
    assert list(environ) == [variable(name)]
    assert value_of(resolved(environ=environ, at=tmp_path), name) == other_value(name)


def test_child_sees_all_settings_of_its_parent_at_once(tmp_path: Path) -> None:
    toml(tmp_path, "take.budget_ms", 1.25)
    given = Config(
        run_id="a b", every=3, rng=False, grads=True, take=TakeConfig(rate_bytes_s=10**12),
        keeper=KeeperConfig(lease_s=0.1, log_file="/tmp/x y=z"),
    )  # fmt: skip
    parent = resolved(given, {"KEEPSTEP_ARENA_SLOTS": "4"}, at=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert resolved(environ=as_environment(parent), at=elsewhere) == parent


def test_config_with_nothing_given_adds_nothing_to_the_environment() -> None:
    assert as_environment(Config()) == {}


def test_argument_equal_to_its_default_reaches_the_child() -> None:
    assert as_environment(Config(rng=True, arena=ArenaConfig(slots=2))) == {
        "KEEPSTEP_RNG": "1",
        "KEEPSTEP_ARENA_SLOTS": "2",
    }
