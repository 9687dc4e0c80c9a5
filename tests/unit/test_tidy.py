"""The shape of the source tree: small rooms, one meaning per name, comments as comments, no switches for tests."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keepstep"
MOST_MODULES = 12
MOST_LINES = 450
MOST_SUBJECT = 72
FIRST_COMMIT = "1aef291"  # Subjects are checked from here on; those before it are longer.

# A change in the last module of a chain may be felt in all of them; who wires too much knows too much.
LONGEST_CHAINS = {"trainer": 9, "keeper": 10}
MOST_IMPORTS = {"trainer/snapshotter.py": 14}

# What one has to read to believe that no state is lost; everything else is a leaf behind an interface.
READING_CORE = (
    "trainer/snapshotter.py", "trainer/results.py", "trainer/capture", "trainer/state/optimizer_fence.py", "arena",
    "keeper/node", "keeper/coordinator", "recovery",
)  # fmt: skip
MOST_CORE_LINES = 7200

# Public dataclasses document their fields by strings, which tools show.
FIELD_DOCSTRINGS = {"config.py", "types.py", "trainer/results.py"}
LONG_FILES = {"parity/gpu/kernels.py"}  # Triton kernels: one arithmetic, read together.
MAY_READ_TEST_SWITCHES = {"faults.py"}


def modules() -> Iterator[Path]:
    return (path for path in sorted(SOURCE.rglob("*.py")))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    return ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in modules())


def test_no_folder_holds_more_than_twelve_modules() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        if path.name != "__init__.py":
            folders[name_of(path.parent)].append(path.name)
    crowded = {folder: len(names) for folder, names in folders.items() if len(names) > MOST_MODULES}
    assert not crowded, "a new idea gets a room of its own"


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    long = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert not {name: lines for name, lines in long.items() if lines > MOST_LINES and name not in LONG_FILES}


def test_a_class_name_means_one_thing() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(name_of(path))
    assert not {name: files for name, files in defined.items() if len(files) > 1}


def test_module_names_are_in_the_glossary() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = text.partition("## Module names")[2].partition("\n## ")[0]
    known = set(re.findall(r"^\| `([\w]+)` \|", section, re.MULTILINE))
    names = {path.stem for path in modules()} - {"__init__", "__main__", "_version"}
    assert names - known == set(), "say in docs/glossary.md what such a module is"
    assert known - names == set(), "no module has this name any more"


def test_comments_are_comments() -> None:
    """A string that nobody uses is no comment, but for docstrings and those of public fields."""
    strings = []
    for path, tree in trees():
        for node in ast.walk(tree):
            body = getattr(node, "body", [])
            for at, statement in enumerate(body if isinstance(body, list) else []):
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                    continue
                docstring = at == 0 and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                field = isinstance(node, ast.ClassDef) and name_of(path) in FIELD_DOCSTRINGS
                if isinstance(statement.value.value, str) and not docstring and not field:
                    strings.append(f"{name_of(path)}:{statement.lineno}")
    assert strings == []


def imports_of(path: Path, tree: ast.Module) -> set[str]:
    """The modules of keepstep that a module imports, wherever in it: `if TYPE_CHECKING` hides nothing."""
    package = ["keepstep", *path.relative_to(SOURCE).parent.parts]
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            imported.update(parent if is_module(parent) else f"{parent}.{alias.name}" for alias in node.names)
    return {name for name in imported if is_module(name)}


def is_module(name: str) -> bool:
    return name.startswith("keepstep.") and (SOURCE.parent / f"{name.replace('.', '/')}.py").is_file()


def longest_chain(imports: dict[str, set[str]], package: str) -> list[str]:
    """The longest chain of imports between modules of a package."""
    chains: dict[str, list[str]] = {}

    def chain_from(name: str) -> list[str]:
        if name not in chains:
            inside = [other for other in imports[name] if other.startswith(f"keepstep.{package}.")]
            chains[name] = [name, *max(map(chain_from, inside), key=len, default=[])]
        return chains[name]

    return max((chain_from(name) for name in imports if name.startswith(f"keepstep.{package}.")), key=len)


def test_chains_of_imports_are_short() -> None:
    imports = {
        "keepstep." + name_of(path).removesuffix(".py").replace("/", "."): imports_of(path, tree)
        for path, tree in trees()
        if path.name != "__init__.py"
    }
    for package, most in LONGEST_CHAINS.items():
        chain = longest_chain(imports, package)
        assert len(chain) <= most, " > ".join(chain)


def test_no_module_wires_too_much_together() -> None:
    for path, tree in trees():
        imported = imports_of(path, tree)
        assert len(imported) <= MOST_IMPORTS.get(name_of(path), len(imported)), sorted(imported)


def test_reading_core_can_be_read_in_an_evening() -> None:
    lines = 0
    for name in READING_CORE:
        place = SOURCE / name
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        assert files, name
        lines += sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert lines <= MOST_CORE_LINES


def test_no_production_code_reads_a_switch_of_tests_or_benchmarks() -> None:
    switch = re.compile(r"KEEPSTEP_(TEST|BENCH)_\w+")
    readers = {
        name_of(path): switch.findall(path.read_text(encoding="utf-8"))
        for path in modules()
        if name_of(path) not in MAY_READ_TEST_SWITCHES and not name_of(path).startswith("testing/")
    }
    assert not {name for name, found in readers.items() if found}


def test_subjects_of_commits_fit_a_line() -> None:
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{FIRST_COMMIT}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if log.returncode:
        pytest.skip("no git history here that reaches back to the first commit that is checked")
    assert [subject for subject in log.stdout.splitlines() if len(subject) > MOST_SUBJECT] == []
