"""The public names, exactly; what importing costs; the tree of errors."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import keepstep
from keepstep import errors
from keepstep.types import Incarnation, Source, Stateful, Survives, Version

PUBLIC = [
    "CaptureError",
    "Config",
    "ConfigError",
    "Error",
    "IntegrityError",
    "KeeperError",
    "Loader",
    "PendingSnapshot",
    "RecoveryError",
    "Restored",
    "Snapshotter",
    "Source",
    "Stateful",
    "Status",
    "Survives",
    "__version__",
    "find",
]
NEEDS_TORCH = {"Loader", "find", "PendingSnapshot", "Restored", "Snapshotter"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_exactly_these() -> None:
    assert sorted(keepstep.__all__) == PUBLIC
    assert sorted(dir(keepstep)) == PUBLIC


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NEEDS_TORCH])
def test_name_that_needs_no_torch_is_there(name: str) -> None:
    assert getattr(keepstep, name) is not None


def test_names_that_need_torch_are_loaded_on_first_use() -> None:
    names = sorted(NEEDS_TORCH)
    assert run(f"import keepstep; print([getattr(keepstep, name).__name__ for name in {names}])") == str(names)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Manager'"):
        keepstep.Manager  # noqa: B018


def test_import_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, keepstep; keepstep.Config(); keepstep.__version__; dir(keepstep)"
    loaded = run(f"{code}; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))")
    assert loaded == "[]"


def test_import_loads_nothing_that_is_slow() -> None:
    """Modules, not seconds: each of these takes longer than all of keepstep."""
    slow = {"torch", "numpy", "rich", "asyncio", "http", "ssl", "concurrent", "subprocess", "sympy", "zstandard"}
    loaded = run(f"import sys, keepstep; print(sorted({slow} & {{m.split('.')[0] for m in sys.modules}}))")
    assert loaded == "[]"


def test_snapshotter_loads_neither_a_compiler_nor_dtensor() -> None:
    """They would take more time than torch itself; who has an optimizer or a DTensor has loaded them already."""
    slow = ["torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "sympy", "rich", "asyncio"]
    code = (
        "import sys, torch, keepstep\n"
        f"before = {{name for name in {slow} if name in sys.modules}}\n"
        "from keepstep.testing.run import LocalRun\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with LocalRun() as local, keepstep.Snapshotter({'model': model}, local.config()) as snapshots:\n"
        f"    print([name for name in {slow} if name in sys.modules and name not in before])\n"
        "    assert snapshots.restore() is None\n"
        f"    print([name for name in {slow} if name in sys.modules and name not in before])\n"
    )
    assert run(code) == "[]\n[]"


def test_what_the_keeper_is_made_of_loads_neither_torch_nor_numpy() -> None:
    modules = [
        "arena.checksum",
        "keeper.workers.memory_limits",
        "arena.slots",
        "control.client",
        "config",
        "identity",
        "layout",
        "control.messages",
        "control.spawn",
    ]
    imports = ", ".join(f"keepstep.{module}" for module in modules)
    loaded = "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    assert run(f"import sys, {imports}; {loaded}") == "[]"


def test_import_starts_no_thread_and_leaves_logging_and_signals_alone() -> None:
    code = (
        "import logging, signal, threading\n"
        "before = [signal.getsignal(s) for s in signal.valid_signals()]\n"
        "import keepstep\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers\n"
        "assert before == [signal.getsignal(s) for s in signal.valid_signals()]\n"
    )
    run(code)


def test_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert keepstep.__version__ == version("keepstep")


# Errors


def test_every_error_is_a_direct_child_of_error() -> None:
    children = {"ConfigError", "KeeperError", "CaptureError", "IntegrityError", "RecoveryError"}
    assert {cls.__name__ for cls in errors.Error.__subclasses__() if cls.__module__ == "keepstep.errors"} == children
    assert set(errors.KINDS) == children
    assert errors.Error.__bases__ == (Exception,)
    for name, kind in errors.KINDS.items():
        assert kind is getattr(keepstep, name)
        assert kind.__bases__ == (errors.Error,)


def test_tree_in_the_docstring_names_every_error() -> None:
    for name in errors.KINDS:
        assert f"── {name}" in (errors.__doc__ or "")


def test_error_says_what_happened_and_what_to_try() -> None:
    error = keepstep.KeeperError("it is full", hint="make room")
    assert str(error) == "it is full (try: make room)"
    assert (error.message, error.hint) == ("it is full", "make room")
    assert str(keepstep.KeeperError("it is full")) == "it is full"


def test_error_keeps_its_hint_through_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(keepstep.RecoveryError("gone", hint="look on disk")))
    assert type(error) is keepstep.RecoveryError
    assert (error.message, error.hint, str(error)) == ("gone", "look on disk", "gone (try: look on disk)")


# Nouns


def test_survival_is_ordered() -> None:
    assert Survives.NOTHING < Survives.PROCESS < Survives.NODE < Survives.CLUSTER


def test_sources_are_exactly_these() -> None:
    assert {source.name: source.value for source in Source} == {"MEMORY": "memory", "PARITY": "parity", "DISK": "disk"}


def test_anything_with_both_methods_is_stateful() -> None:
    class Loader:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state_dict: dict[str, int]) -> None: ...

    assert isinstance(Loader(), Stateful)
    assert not isinstance({}, Stateful)


def test_versions_are_ordered_by_incarnation_then_step() -> None:
    first, second = Incarnation(1, 99), Incarnation(2, 5)
    ordered = [Version(first, 5), Version(first, 900), Version(second, 1), Version(second, 2)]
    backwards = ordered[::-1]
    assert sorted(backwards) == ordered


def test_versions_of_two_lives_with_one_number_are_different() -> None:
    assert Version(Incarnation(1, 1), 5) != Version(Incarnation(1, 2), 5)


def test_incarnation_is_read_back_from_its_text() -> None:
    for incarnation in (Incarnation(0, 0), Incarnation(7, 2**64 - 1), Incarnation(2**40, 0xABC)):
        assert Incarnation.parse(str(incarnation)) == incarnation
