"""Keepers over TLS 1.3: both sides show a certificate, and what they prove is bound to the connection."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from transport_nodes import RUN_ID, SECRET, Node, TcpNet, num_sockets, our_threads, until

from keepstep.config import PeersConfig
from keepstep.errors import ConfigError
from keepstep.transport import FetchError, Peer, TcpTransport
from keepstep.transport.connection import PeerSocket, PeerSocketError, Tls, channel_binding
from keepstep.transport.handshake import CONTROL, AuthError, DialingHandshake, KeeperSelf, run_key

pytestmark = pytest.mark.computing


def openssl(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def make_authority(directory: Path, name: str) -> dict[str, str]:
    """An authority and one certificate of it: the three settings."""
    here = directory / name
    here.mkdir()
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", f"/CN={name}", cwd=here)
    openssl("req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node", cwd=here)
    signed_by = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
    openssl("x509", "-req", "-in", "node.csr", *signed_by, "-out", "node.pem", cwd=here)
    return {
        "tls_cert": str(here / "node.pem"),
        "tls_key": str(here / "node.key"),
        "tls_ca": str(here / "ca.pem"),
    }


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture
def net(authority: dict[str, str]) -> Iterator[TcpNet]:
    before = num_sockets()
    made = TcpNet(**authority)
    try:
        yield made
    finally:
        made.close()
    until(lambda: not our_threads(), f"the end of {our_threads()}", 2.0)
    assert num_sockets() == before


def test_messages_and_bytes_pass_encrypted(net: TcpNet) -> None:
    a, b = net.pair()
    assert a.peers._links.session("b").connection.tls.version() == "TLSv1.3"
    for i in range(200):
        assert a.peers.send("b", b"%d" % i)
    assert a.peers.send("b", bytes(3 << 20))
    data = os.urandom((5 << 20) + 3)
    b.keep(b"thing", data)
    asked = [a.get(b, b"thing", len(data), expect=xxhash.xxh3_128_digest(data)) for _ in range(3)]
    for future, buffer in asked:
        assert future.result(20)
        assert bytes(buffer) == data
    until(lambda: len(b.messages) == 201)
    assert [message for _, message in b.messages[:200]] == [b"%d" % i for i in range(200)]


def test_a_bit_flipped_on_the_wire_breaks_the_connection_not_the_trust(net: TcpNet) -> None:
    a, b = net.pair()
    b.keep(b"thing", bytes(1 << 20))
    net.corrupt(b, a)
    with pytest.raises(FetchError, match="TLS") as caught:
        a.get(b, b"thing", 1 << 20)[0].result(10)
    assert caught.value.lost
    assert a.get(b, b"thing", 1 << 20)[0].result(10)


def test_silence_cancel_and_deadline_work_as_without(net: TcpNet) -> None:
    a, b = net.pair(rate_bytes_s=100_000, timeout_s=60.0)
    size = 6_000_000  # takes a minute
    b.keep(b"thing", bytes(size))
    late, _ = a.get(b, b"thing", size, timeout_s=0.4)
    cancelled, buffer = a.get(b, b"thing", size, timeout_s=60)
    until(lambda: a.peers.counters()["bytes_in"] > 0)
    cancelled.cancel()
    assert cancelled.exception(20) is not None
    buffer += b"x"
    assert late.exception(20).lost
    frozen, _ = a.get(b, b"thing", size, timeout_s=60)
    net.freeze(b)
    assert frozen.exception(20).lost
    until(lambda: a.downs(b))
    assert "silent" in a.downs(b)[0]
    net.thaw(b)
    until(lambda: a.peers.up("b") and b.peers.up("a"))


def test_the_secret_is_still_needed(net: TcpNet, authority: dict[str, str]) -> None:
    a = net.make("a")
    with Wired(a, authority) as wire:
        dialing = DialingHandshake(
            wire, KeeperSelf("b", "1", RUN_ID), CONTROL, binding=channel_binding(wire), deadline=soon()
        )
        with pytest.raises((AuthError, PeerSocketError)):
            dialing.authenticate(run_key(b"some other secret", RUN_ID), a.card)


def test_a_certificate_of_another_authority_is_not_let_in(net: TcpNet, tmp_path: Path) -> None:
    a = net.make("a")
    other = make_authority(tmp_path, "theirs") | {"tls_ca": make_settings(net)["tls_ca"]}
    with pytest.raises(PeerSocketError), Wired(a, other) as wire:
        # TLS 1.3: the client learns only when it reads.
        wire.read_exact(1, deadline=soon())
    until(lambda: a.peers.counters()["strangers"] == 1)


def test_renewed_files_are_used_without_a_restart(tmp_path: Path) -> None:
    """A new authority and its certificates: a running keeper shows and asks for these, and no longer the old ones."""
    used, renewed = make_authority(tmp_path, "used"), make_authority(tmp_path, "renewed")
    old = {name: str(shutil.copy(path, tmp_path / f"old-{name}")) for name, path in used.items()}
    net = TcpNet(**used)
    try:
        a = net.make("a")
        for name, path in renewed.items():
            shutil.copy(path, used[name])
        with Wired(a, renewed):
            pass
        with pytest.raises(PeerSocketError):
            Wired(a, old)
        Path(used["tls_cert"]).write_text("half a certificate")  # The last good ones stay in force.
        with Wired(a, renewed):
            pass
    finally:
        net.close()


def test_no_certificate_or_no_tls_is_not_let_in(net: TcpNet) -> None:
    a = net.make("a")
    plain = PeerSocket(socket.create_connection((a.card.address, a.card.port)), timeout_s=5)
    with pytest.raises(PeerSocketError):
        DialingHandshake(plain, KeeperSelf("b", "1", RUN_ID), CONTROL, binding=b"", deadline=soon()).authenticate(
            run_key(SECRET, RUN_ID), a.card
        )
    plain.close()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    sock = bare.wrap_socket(socket.create_connection((a.card.address, a.card.port)))
    with sock, pytest.raises(OSError, match=r"(?i)certificate|alert|reset"):
        sock.recv(1)
    until(lambda: a.peers.counters()["strangers"] == 2)


def test_an_older_tls_is_not_spoken(net: TcpNet, authority: dict[str, str]) -> None:
    a = net.make("a")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(authority["tls_cert"], authority["tls_key"])
    sock = socket.create_connection((a.card.address, a.card.port))
    with sock, pytest.raises(OSError, match=r"(?i)version|alert"):
        old.wrap_socket(sock)


def test_a_peer_without_tls_and_one_with_it_are_not_linked(net: TcpNet) -> None:
    a = net.make("a")
    plain = Node("b", "1")
    plain.peers = TcpTransport(plain.card, RUN_ID, SECRET, PeersConfig(address="127.0.0.1", dead_s=0.6), plain)
    try:
        card = Peer("b", "1", *plain.peers.card_address())
        a.peers.set_peers([card])
        plain.peers.set_peers([a.card])
        until(lambda: a.peers.counters()["strangers"] and plain.peers.counters()["strangers"])
        assert not a.links + plain.links
    finally:
        plain.peers.close()


def test_a_handshake_relayed_by_a_holder_of_a_valid_certificate_fails(net: TcpNet, authority: dict[str, str]) -> None:
    """An insider of the authority ends TLS on both sides and passes every byte on: the binding tells."""
    a, b = net.make("a"), net.make("b")
    tls = Tls.of(PeersConfig(**authority))
    assert tls is not None
    listener = socket.create_server(("127.0.0.1", 0))
    passed = {"a": 0, "b": 0}

    def relay() -> None:
        sock, _ = listener.accept()
        near = PeerSocket(sock, timeout_s=5)
        far = PeerSocket(socket.create_connection(b.peers.card_address()), timeout_s=5)
        try:
            tls.secure(near, server=True, timeout_s=5)
            tls.secure(far, server=False, timeout_s=5)
            for source, target, size, name in ((near, far, 56, "a"), (far, near, 64, "b"), (near, far, 1, "a")):
                target.write(source.read_exact(size, deadline=soon()))
                passed[name] += size
        except PeerSocketError:
            pass
        finally:
            near.close()
            far.close()

    thread = threading.Thread(target=relay)
    thread.start()
    a.peers.set_peers([Peer("b", "1", *listener.getsockname())])
    thread.join(10)
    listener.close()
    assert passed == {"a": 56, "b": 64}  # the listener's proof came through, and a did not believe it
    assert not a.links + b.links


def test_the_binding_is_the_same_on_both_ends_and_never_twice(authority: dict[str, str]) -> None:
    tls = Tls.of(PeersConfig(**authority))
    assert tls is not None
    seen = set()
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = PeerSocket(socket.create_connection(listener.getsockname()), timeout_s=5)
            far = PeerSocket(listener.accept()[0], timeout_s=5)
        thread = threading.Thread(target=tls.secure, args=(far,), kwargs={"server": True, "timeout_s": 5})
        thread.start()
        tls.secure(near, server=False, timeout_s=5)
        thread.join(10)
        assert channel_binding(near) == channel_binding(far)
        assert len(channel_binding(near)) >= 32
        seen.add(channel_binding(near))
        near.close()
        far.close()
    assert len(seen) == 3


def test_half_a_configuration_and_bad_files_are_refused(authority: dict[str, str], tmp_path: Path) -> None:
    for missing in authority:
        with pytest.raises(ConfigError, match="go together"):
            Tls.of(PeersConfig(**authority | {missing: ""}))
    (tmp_path / "rubbish.pem").write_text("rubbish")
    for name in authority:
        for path in (tmp_path / "rubbish.pem", tmp_path / "not there"):
            with pytest.raises(ConfigError, match="cannot be used"):
                Tls.of(PeersConfig(**authority | {name: str(path)}))
    assert Tls.of(PeersConfig()) is None


def test_an_encrypted_key_is_an_error_and_no_password_prompt(authority: dict[str, str], tmp_path: Path) -> None:
    locked = str(tmp_path / "locked.key")
    openssl("ec", "-in", authority["tls_key"], "-aes256", "-passout", "pass:x1y2z3", "-out", locked, cwd=tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        Tls.of(PeersConfig(**authority | {"tls_key": locked}))


class Wired:
    """A TLS connection to a node by hand."""

    def __init__(self, node: Node, settings: dict[str, str]) -> None:
        tls = Tls.of(PeersConfig(**settings))
        assert tls is not None
        self.wire = PeerSocket(socket.create_connection((node.card.address, node.card.port)), timeout_s=5)
        try:
            tls.secure(self.wire, server=False, timeout_s=5)
        except PeerSocketError:
            self.wire.close()
            raise

    def __enter__(self) -> PeerSocket:
        return self.wire

    def __exit__(self, *_: object) -> None:
        self.wire.close()


def make_settings(net: TcpNet) -> dict[str, str]:
    return net._tls


def soon() -> float:
    return time.monotonic() + 5
