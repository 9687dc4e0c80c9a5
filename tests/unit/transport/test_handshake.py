"""The handshake between keepers: who gets in, who does not, and what the others learn."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep.transport import handshake
from keepstep.transport.handshake import (
    ACCEPTED,
    ALREADY_LINKED,
    CONTROL,
    DATA,
    AuthError,
    DialingHandshake,
    KeeperSelf,
    ListeningHandshake,
    run_key,
)
from keepstep.transport.interface import Peer

SECRET = b"the secret of this run"
A, B, C = (KeeperSelf(name, f"{name}-instance-1", "the-run") for name in ("node-a", "node-b", "node-c"))
Mangle = Callable[[int, bytes], bytes]


class Hangup(Exception):
    """The other side has gone."""


class Pipe:
    """A line in memory that remembers what was written on it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._in: queue.Queue[bytes | None] = queue.Queue()
        self._out: queue.Queue[bytes | None] = self._in
        self._left = b""
        self.mangle: Mangle = lambda _, data: data

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        one, other = cls(), cls()
        one._out, other._out = other._in, one._in
        return one, other

    def write(self, data: bytes, *, deadline: float | None = None) -> None:
        self.written.append(bytes(data))
        self._out.put(self.mangle(len(self.written) - 1, bytes(data)))

    def read_exact(self, size_bytes: int, *, deadline: float | None = None) -> bytes:
        while len(self._left) < size_bytes:
            data = self._in.get(timeout=5)
            if data is None:
                self._in.put(None)
                raise Hangup
            self._left += data
        data, self._left = self._left[:size_bytes], self._left[size_bytes:]
        return data

    def hang_up(self) -> None:
        self._out.put(None)


@dataclass
class Setting:
    """One handshake. What is not said is as it should be."""

    dialer: KeeperSelf = A
    means: KeeperSelf = B
    listener: KeeperSelf = B
    dialer_key: bytes = run_key(SECRET, "the-run")
    listener_key: bytes | None = run_key(SECRET, "the-run")
    dialer_binding: bytes = b""
    listener_binding: bytes = b""
    kind: int = CONTROL
    verdict: int = ACCEPTED


def secret_keys(handshake: Any) -> tuple[bytes, bytes, bytes]:
    keys = handshake.keys()
    return keys.key, keys.from_dialer, keys.from_listener


def shake(setting: Setting, near: Pipe, far: Pipe) -> tuple[Any, Any]:
    """What came of it on both sides: the agreement, or the exception."""
    deadline = time.monotonic() + 5
    outcomes: list[Any] = [None, None]

    def dial() -> Any:
        s = setting
        dialing = DialingHandshake(near, s.dialer, s.kind, binding=s.dialer_binding, deadline=deadline)
        dialing.authenticate(s.dialer_key, Peer(s.means.node_id, s.means.instance), b"s" * 16)
        dialing.send_confirmation(True)
        return dialing

    def listen() -> Any:
        s = setting
        listening = ListeningHandshake.accept(
            far, s.listener, key_of=lambda *_: s.listener_key, binding=s.listener_binding, deadline=deadline
        )
        listening.send_verdict(s.verdict)
        assert listening.receive_confirmation()
        return listening

    def run(index: int, work: Callable[[], Any], line: Pipe) -> None:
        try:
            outcomes[index] = work()
        except (AuthError, Hangup) as error:
            outcomes[index] = error
        finally:
            line.hang_up()

    threads = [threading.Thread(target=run, args=args) for args in ((0, dial, near), (1, listen, far))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return outcomes[0], outcomes[1]


def attempt(**changed: Any) -> tuple[Any, Any, Pipe, Pipe]:
    near, far = Pipe.pair()
    dialer, listener = shake(Setting(**changed), near, far)
    return dialer, listener, near, far


def failed(outcome: Any) -> bool:
    return isinstance(outcome, AuthError | Hangup)


@pytest.mark.parametrize("kind", [CONTROL, DATA])
def test_two_sides_with_one_secret_derive_the_same_new_keys(kind: int) -> None:
    dialer, listener, near, far = attempt(kind=kind)
    assert secret_keys(dialer) == secret_keys(listener)
    assert dialer.keys().ident == listener.keys().ident
    assert listener.peer == Peer("node-a", "node-a-instance-1")
    assert len({dialer.keys().ident, *secret_keys(dialer)}) == 4
    again, _, _, _ = attempt(kind=kind)
    assert not {again.keys().ident, *secret_keys(again)} & {dialer.keys().ident, *secret_keys(dialer)}
    assert not any(key in b"".join(near.written + far.written) for key in secret_keys(dialer))


@pytest.mark.parametrize(
    "changed",
    [
        {"dialer_key": run_key(b"the secret of another run", "the-run")},
        {"dialer_key": run_key(SECRET, "another-run")},
        {"dialer": KeeperSelf("node-a", "node-a-instance-1", "another-run")},
        {"listener_key": None},
        {"means": C},
        {"means": KeeperSelf("node-b", "node-b-instance-2", "the-run")},
        {"listener": KeeperSelf("node-b", "node-b-instance-2", "the-run")},
        {"dialer_binding": b"tls of one", "listener_binding": b"tls of another"},
        {"dialer_binding": b"tls of one"},
    ],
    ids=[
        "secret",
        "key of a run",
        "run",
        "no secret yet",
        "node",
        "instance",
        "new instance",
        "relayed TLS",
        "half TLS",
    ],
)
def test_any_difference_between_the_sides_fails_the_handshake(changed: dict[str, Any]) -> None:
    dialer, listener, near, _ = attempt(**changed)
    assert failed(dialer)
    assert failed(listener)
    # The listener proves itself first: the dialer has not said who it is.
    assert len(near.written) == 1


def test_versions_must_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = Pipe.pair()
    near.mangle = lambda index, data: data[:4] + b"\x02" + data[5:] if index == 0 else data
    dialer, listener = shake(Setting(), near, far)
    assert failed(dialer)
    assert "version 2" in str(listener)


def test_a_declined_dialer_is_notified_and_the_verdict_cannot_be_forged() -> None:
    dialer, _, _, _ = attempt(verdict=ALREADY_LINKED)
    assert "already" in str(dialer)
    near, far = Pipe.pair()
    far.mangle = lambda index, data: bytes([ALREADY_LINKED]) + data[1:] if index == 1 else data
    dialer, _ = shake(Setting(), near, far)
    assert "wrong proof" in str(dialer)


def test_a_confirmation_cannot_be_inverted() -> None:
    near, far = Pipe.pair()
    near.mangle = lambda index, data: bytes([ALREADY_LINKED]) + data[1:] if index == 2 else data
    _, listener = shake(Setting(), near, far)
    assert "wrong proof" in str(listener)


def test_a_handshake_reflected_to_its_sender_fails() -> None:
    """The attacker answers a's call to b by calling a itself and passing everything on."""
    dialer, listener, near, _ = attempt(listener=A)
    assert failed(dialer)
    assert failed(listener)
    assert len(near.written) == 1


def test_a_challenge_thrown_back_at_the_listener_fails() -> None:
    """The attacker repeats the listener's own proof as if it were the dialer's."""
    line, far = Pipe.pair()
    done: list[Any] = []

    def listen() -> None:
        try:
            ListeningHandshake.accept(
                far, B, key_of=lambda *_: Setting.listener_key, binding=b"", deadline=time.monotonic() + 5
            )
        except (AuthError, Hangup) as error:
            done.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    line.write(handshake._HELLO.pack(b"KSPR", handshake.VERSION, CONTROL, b"n" * 32, handshake.NO_SESSION))
    proof = line.read_exact(64)[32:]
    line.write(b"\x00\x00" + proof)
    thread.join(10)
    assert "wrong proof" in str(done[0])


def test_a_handshake_relayed_to_another_node_of_the_run_fails() -> None:
    """a means b; the attacker passes everything to c, which knows the secret too, and back."""
    dialer, listener, near, _ = attempt(means=B, listener=C)
    assert failed(dialer)
    assert failed(listener)
    assert len(near.written) == 1


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    _, _, near, far = attempt()
    # To a listener: everything the dialer said.
    replayed, fresh = Pipe.pair()
    for data in near.written:
        replayed.write(data)
    replayed.hang_up()
    with pytest.raises(AuthError, match="wrong proof"):
        ListeningHandshake.accept(
            fresh, B, key_of=lambda *_: Setting.listener_key, binding=b"", deadline=time.monotonic() + 5
        )
    # To a dialer: everything the listener said.
    replayed, fresh = Pipe.pair()
    for data in far.written:
        replayed.write(data)
    replayed.hang_up()
    with pytest.raises(AuthError, match="wrong proof"):
        DialingHandshake(fresh, A, CONTROL, binding=b"", deadline=time.monotonic() + 5).authenticate(
            Setting.dialer_key, Peer(B.node_id, B.instance)
        )


def test_an_unauthenticated_dialer_learns_neither_run_nor_node() -> None:
    """Neither who knocks nor who pretends to be the peer."""
    _, _, _, far = attempt(dialer_key=b"guess" * 8)
    _, _, near, _ = attempt(listener_key=b"guess" * 8)
    said = b"".join(far.written + near.written)
    for name in ("the-run", "node-a", "node-b", "instance"):
        assert name.encode() not in said
    assert sum(map(len, far.written)) == 64
    assert sum(map(len, near.written)) == handshake._HELLO.size


def test_the_key_of_another_session_opens_no_stream() -> None:
    one, _, _, _ = attempt()
    other, _, _, _ = attempt()
    dialer, listener, _, _ = attempt(kind=DATA, dialer_key=one.keys().key, listener_key=other.keys().key)
    assert failed(dialer)
    assert failed(listener)


@pytest.mark.parametrize("seed", range(40))
def test_no_byte_of_a_handshake_can_be_changed(seed: int) -> None:
    rng = random.Random(seed)
    near, far = Pipe.pair()
    line, frame = rng.choice([(near, 0), (near, 1), (near, 2), (far, 0), (far, 1)])
    flips: list[bytes] = []

    def flip(index: int, data: bytes) -> bytes:
        if index != frame:
            return data
        at = rng.randrange(len(data))
        if frame == 0 and line is near and at in (6, 7):
            at = 8  # padding
        if frame == 1 and line is near and at in (0, 1):
            at = 2  # a longer length would wait for more
        flips.append(data)
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]

    line.mangle = flip
    dialer, listener = shake(Setting(), near, far)
    assert flips
    assert failed(dialer) or failed(listener)


def test_an_identity_without_bounds_is_not_read() -> None:
    line, far = Pipe.pair()
    line.write(handshake._HELLO.pack(b"KSPR", handshake.VERSION, CONTROL, b"n" * 32, handshake.NO_SESSION))
    line.write(b"\xff\xff")
    with pytest.raises(AuthError, match="65535 bytes"):
        ListeningHandshake.accept(far, B, key_of=lambda *_: b"k" * 32, binding=b"", deadline=time.monotonic() + 5)
