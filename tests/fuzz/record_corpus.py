"""Writes the corpus: honest inputs of each target, made by the encoders. Run after a format has changed.

python tests/fuzz/record_corpus.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy
from targets import HEADER_BYTES, NODE_ID, RUN_ID, SECRET, TARGETS

from keepstep import layout, values
from keepstep.arena.records import COMMITTED, TrainerHeader
from keepstep.arena.slots import Arena, plan_header
from keepstep.control import messages as control
from keepstep.control.framing import pack
from keepstep.control.membership import NodeClaim, RoundAgreement
from keepstep.control.signed_store import DocumentSigner
from keepstep.keeper.coordinator import messages
from keepstep.keeper.coordinator.messages import GrantOrder, Orders, Report
from keepstep.keeper.transfer.chunk_store import DATA, MANIFEST, ChunkRequest
from keepstep.keeper.workers import manifest
from keepstep.launcher.rounds import AgentId, RoundState
from keepstep.layout import Entry, SnapshotSize, TensorView
from keepstep.recovery.inventory import SetKey
from keepstep.transport.frames import MESSAGE, FrameSigner
from keepstep.types import Incarnation, Version
from keepstep.values import InlineTensor, TensorRef, TorchDevice, TorchDtype, TorchSize

CORPUS = Path(__file__).parent / "corpus"
INCARNATION = Incarnation(1, 1)
VERSION = Version(INCARNATION, 5)
CARD = control.NodeCard(NODE_ID, "i", "127.0.0.1", 4321)
STATE = RoundState(round=1, members=[AgentId("a/1", "a")], agreement="agreement/1.x", broken="", revision=7)


def control_frames() -> list[bytes]:
    return [
        pack(message)
        for message in (
            control.Hello(control.PROTOCOL, RUN_ID, NODE_ID, "launcher", 1),
            control.Register(0, 1, 0, 1, INCARNATION, "", 1, 1, 2, -1),
            control.Membership(INCARNATION, [CARD], 0, SECRET, []),
            control.WantArena(SnapshotSize(4096, 4096, 1 << 20), 2, 3),
            control.GiveBack(["x"], 4), control.Held(["x"]), control.LauncherNote("a note"),
            control.WantStatus(5), control.WantPlan(["b"], 6), control.CutLinks(1.0, 7),
        )
    ]  # fmt: skip


def peer_messages() -> list[bytes]:
    report = Report(NODE_ID, "i", INCARNATION, 1, "serving", CARD, True, (0,), 1, 5)
    orders = Orders(INCARNATION, 1, 2, 3, VERSION, SetKey(VERSION, INCARNATION, 1), grants=(GrantOrder(1, 6),))
    return [messages.encode(report), messages.encode(orders)]


def arenas() -> list[bytes]:
    need = SnapshotSize(4096, 4096, 4096)
    header = plan_header(need, slots=2, local_index=0, run_id=RUN_ID, node_id=NODE_ID, instance=bytes(16))
    arena = Arena.create(header)
    try:
        return [arena.segment.read(0, HEADER_BYTES)]
    finally:
        arena.close()


def layouts() -> list[bytes]:
    part = TensorView("model.weight", "float32", (2, 3), (3, 1), 0, (4, 3), (2, 0), True)
    tied = TensorView("model.tied", "float32", (3,), (1,), 12, (3,), (0,), False)
    number = TensorView("step", "int64", (), (), 0, (), (), False)
    whole = layout.Layout((Entry(0, 24, (part, tied)), Entry(64, 8, (number,))), ((0, 0), (1, 0), (0, 1)))
    return [whole.encode(), layout.Layout((), ()).encode()]


def manifests() -> list[bytes]:
    encoded, inline = layouts()[0], values.encode({"step": 5})
    trainer = TrainerHeader(
        state=COMMITTED, rank=0, world_size=1, local_index=0, local_world_size=1, flags=0, version=VERSION,
        layout_bytes=len(encoded), values_bytes=len(inline), payload_bytes=128,
        layout_digest=layout.digest(encoded), written_at=1.0,
    )  # fmt: skip
    table = bytes(16 * 8)
    return [
        manifest.encode(manifest.NodeManifest(NODE_ID, VERSION, (manifest.RankManifest(*parts, table),)))
        for parts in ((trainer.body(), encoded, inline), (trainer.body(), b"", b""))
    ]


def documents() -> list[bytes]:
    found = []
    for secret in (b"", SECRET + b"another"):
        signer = DocumentSigner(RUN_ID, secret)
        agreement = RoundAgreement(INCARNATION, [CARD], [], b"")
        for key, thing in (("board", STATE), ("card/x", NodeClaim(CARD, 1)), ("agreement/1", agreement)):
            found.append(signer.sign(key, msgspec.json.encode(thing).decode()).encode())
    return found


def main() -> None:
    tree = {
        "step": 5, "lr": 0.1, "names": ["a", b"b", None, True], (1, "key"): {"t": (1, 2), "z": 1j}, "set": {1, 2},
        "tensor": TensorRef(0), "small": InlineTensor("float32", (2,), bytes(8)), "device": TorchDevice("cpu"),
        "dtype": TorchDtype("float32"), "size": TorchSize((2, 3)), "array": numpy.arange(6).reshape(2, 3),
        "large": 1 << 100, "slice": slice(1, 2),
    }  # fmt: skip
    inputs = {
        "control_frames": control_frames(),
        "peer_frames": [FrameSigner(bytes(32)).seal(MESSAGE, b"x" * 40)],
        "peer_messages": peer_messages(),
        "chunk_requests": [ChunkRequest(MANIFEST, VERSION).encode(), ChunkRequest(DATA, VERSION, 0, 1).encode()],
        "snapshot_values": [values.encode(tree), values.encode([])],
        "layouts": layouts(),
        "manifests": manifests(),
        "arena": arenas(),
        "store_documents": documents(),
    }
    assert set(inputs) == set(TARGETS)
    shutil.rmtree(CORPUS, ignore_errors=True)
    for name, seeds in inputs.items():
        (CORPUS / name).mkdir(parents=True)
        for number, seed in enumerate(seeds):
            (CORPUS / name / f"{number:02}").write_bytes(seed)


if __name__ == "__main__":
    main()
