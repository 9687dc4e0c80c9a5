"""Every section of the keeper's state has one owner: no other module of its package writes to it.

A write is an assignment to an attribute that is a field of a section, or of a value that belongs to one, a `del`, or
a call that changes such a container (`.add`, `.pop`, ...), also through a local name. `state.py` holds the sections
and the methods of the values, and may write.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import keepstep.keeper

KEEPER = Path(keepstep.keeper.__file__).parent
MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip
# Classes whose fields are owned, and the modules that own them.
OWNERS = {
    "node": {
        "NodeState": ("core",),
        "NodeTrainers": ("trainers",), "RegisteredTrainer": ("trainers",), "OpeningIncarnation": ("trainers",),
        "NodeArenas": ("arenas",), "ArenaState": ("arenas",), "Slot": (),
        "NodeGrants": ("grants",), "NodeGrant": ("grants",),
        "NodeRestore": ("restore",),
        "NodeProtection": ("protection",),
        "NodeOrders": ("orders",),
    },
    "coordinator": {
        "CoordinatorState": ("coordinator",),
        "NodeView": ("coordinator", "restore"),
        "JobGrants": ("grants",), "JobGrant": ("grants",),
        "JobRestore": ("restore",),
        "JobProtection": ("protection",),
    },
}  # fmt: skip


def owners_of_fields(package: str) -> dict[str, set[str]]:
    """Field name -> modules that may write it."""
    owners: dict[str, set[str]] = defaultdict(set)
    classes = {
        node.name: node
        for path in (KEEPER / package).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    for name, modules in OWNERS[package].items():
        for field in fields(classes[name]):
            owners[field].update(modules)
    return owners


def fields(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def writes(source: str, owned: set[str]) -> Iterator[tuple[int, str]]:
    """(line, field) of everything that is written in this source."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        aliases = dict(_aliases(function, owned))
        for node in ast.walk(function):
            field = None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                field = node.attr
            elif (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)) or (
                isinstance(node, ast.Attribute) and node.attr in MUTATORS
            ):
                field = _field(node.value, aliases)
            if field in owned:
                yield node.lineno, str(field)


def _aliases(function: ast.FunctionDef, owned: set[str]) -> Iterator[tuple[str, str]]:
    """Local names of containers: `sets = node.protection.sets`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name) and isinstance(value, ast.Attribute) and value.attr in owned:
                    yield name.id, value.attr


def _field(value: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(value, ast.Attribute):
        return value.attr
    return aliases.get(value.id) if isinstance(value, ast.Name) else None


@pytest.mark.parametrize("package", OWNERS)
def test_a_module_writes_only_to_its_own_section(package: str) -> None:
    owners = owners_of_fields(package)
    assert len(owners) > 25
    wrong = [
        f"{package}/{path.name}:{line} writes {field!r}, which belongs to {sorted(owners[field]) or 'state'}"
        for path in sorted((KEEPER / package).glob("*.py"))
        if path.stem != "state"
        for line, field in writes(path.read_text(), set(owners))
        if path.stem not in owners[field]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "statement",
    [
        "node.protection.exchange = None",
        "del node.protection.sets[key]",
        "node.protection.sets[key] = parity",
        "node.protection.sets.pop(key)",
        "(node.protection.sets.pop if gone else node.protection.sets.get)(key)",
        "sets = node.protection.sets; sets.clear()",
        "number, sets = 1, node.protection.sets; del sets[key]",
        "node.protection.exchange_started += 1.0",
    ],
)
def test_every_kind_of_write_is_found(statement: str) -> None:
    owned = {"sets", "exchange", "exchange_started"}
    source = "def f(node, key, parity, gone):\n" + "".join(f"    {part.strip()}\n" for part in statement.split(";"))
    assert list(writes(source, owned))
