"""`keepstep run` fills in what torchrun needs, and changes nothing that was said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keepstep.launcher.torchrun import torchrun_arguments

SCRIPT = ["train.py", "--lr=1", "--rdzv-id", "the script's own", "--standalone", "--max-restarts=2"]
NAMES = ("RDZV_BACKEND", "RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "NNODES", "STANDALONE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_RUN_ID", raising=False)
    for name in NAMES:
        monkeypatch.delenv(f"PET_{name}", raising=False)


def added(arguments: list[str]) -> dict[str, str]:
    """What was put in front; the rest must be there as it was."""
    filled = torchrun_arguments([*arguments, *SCRIPT])
    assert filled[len(filled) - len(arguments) - len(SCRIPT) :] == [*arguments, *SCRIPT]
    return dict(option.split("=", 1) for option in filled[: len(filled) - len(arguments) - len(SCRIPT)])


def test_one_node_gets_all_defaults_and_a_new_id() -> None:
    first, second = added(["--nproc-per-node=2"]), added(["--nproc-per-node=2"])
    assert first.pop("--rdzv-id") != second.pop("--rdzv-id")
    assert first == {
        "--rdzv-backend": "keepstep", "--max-restarts": "1000000", "--rdzv-endpoint": "localhost:0",
    }  # fmt: skip


def test_the_run_id_of_the_environment_becomes_the_rendezvous_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_RUN_ID", "llama")
    assert added([])["--rdzv-id"] == "llama"
    assert added(["--nnodes=4"])["--rdzv-id"] == "llama"


@pytest.mark.parametrize("nnodes", [["--nnodes=4"], ["--nnodes", "1:4"]])
def test_several_nodes_get_no_endpoint_and_no_id_that_each_would_draw_for_itself(nnodes: list[str]) -> None:
    assert added(nnodes) == {"--rdzv-backend": "keepstep", "--max-restarts": "1000000"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--rdzv-id=x"], "--rdzv-id"),
        (["--rdzv-id", "x"], "--rdzv-id"),
        (["--rdzv_id=x"], "--rdzv-id"),
        (["--rdzv_id", "x"], "--rdzv-id"),
        (["--max-restarts=0"], "--max-restarts"),
        (["--max_restarts", "3"], "--max-restarts"),
        (["--max-r=3"], "--max-restarts"),
        (["--rdzv-endpoint=localhost:1234"], "--rdzv-endpoint"),
        (["--rdzv_endpoint", "localhost:1234"], "--rdzv-endpoint"),
        (["--rdzv-backend=keepstep"], "--rdzv-backend"),
    ],
)
def test_what_was_given_stays(arguments: list[str], name: str) -> None:
    whole = {"--rdzv-backend", "--max-restarts", "--rdzv-endpoint", "--rdzv-id"}
    assert set(added([*arguments, "--nproc_per_node", "2"])) == whole - {name}


def test_values_from_torchruns_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_RDZV_ID", "x")
    assert set(added([])) == {"--rdzv-backend", "--rdzv-endpoint"}
    monkeypatch.setenv("PET_NNODES", "2")
    assert set(added([])) == {"--rdzv-backend"}


@pytest.mark.parametrize("arguments", [["--rdzv-backend=c10d"], ["--rdzv_backend", "static"], ["--rdzv-b=etcd"]])
def test_another_backend_is_left_alone(arguments: list[str]) -> None:
    assert added(arguments) == {}


def test_standalone_becomes_our_backend_because_torchrun_would_replace_it() -> None:
    filled = torchrun_arguments(["--standalone", "--nproc-per-node=2", *SCRIPT])
    assert "--rdzv-backend=keepstep" in filled
    assert filled[-len(SCRIPT) - 1 :] == ["--nproc-per-node=2", *SCRIPT]
    assert filled.count("--standalone") == 1  # the script's own


def test_a_module_and_flags_without_values_are_understood() -> None:
    filled = torchrun_arguments(["--no-python", "-m", "package.train", "--rdzv-backend=c10d"])
    assert "--rdzv-backend=keepstep" in filled
    assert filled[-4:] == ["--no-python", "-m", "package.train", "--rdzv-backend=c10d"]


def test_the_entry_point_imports_no_torch() -> None:
    code = (
        "import sys; from keepstep.launcher.torchrun import get_creator; get_creator(); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
