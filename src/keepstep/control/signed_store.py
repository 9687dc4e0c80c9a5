"""Documents in a rendezvous store, signed with the job's secret: whoever reaches the store's port can write there.

A document is `<MAC> <serial> <text>`. The MAC (HMAC-SHA256 under a key that is drawn from the secret and the run id)
covers the key's name, the serial and the text, so that no document can be forged, changed, or moved to another key or
run. The serial grows with each document of a writer: where a key has one writer, a reader ignores a document that is
older than one it has read under that key.

Invariants:
- What does not verify is treated as if it was not there, and counted. It is not decoded.
- Without a secret the MAC is `-` and nothing is verified. With one, an unsigned document does not verify.
- Keys that are read across launches contain a random part, so that a document of an earlier launch fits nowhere.

Used by one thread at a time.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

log = logging.getLogger("keepstep.launcher")
T = TypeVar("T")

UNSIGNED = "-"
REMEMBERED_KEYS = 1 << 16  # of which the newest serial is known; forgotten all at once beyond that
LOG_EVERY_S = 60.0


class Store(Protocol):
    """The part of torch's TCPStore that is used."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Document:
    text: str
    serial: int


class DocumentSigner:
    """Signs and verifies the documents of one run, and remembers what it has seen."""

    def __init__(self, run_id: str, secret: bytes) -> None:
        self.ignored = 0  # documents that did not verify
        self.last_ignored = ""  # key and reason of the last one
        self._key = hmac.digest(secret, b"keepstep store" + run_id.encode(), "sha256") if secret else b""
        self._newest: dict[str, int] = {}
        self._serial = 0
        self._logged_at = float("-inf")

    def sign(self, key: str, text: str) -> str:
        """The document to be written under `key`. Each one is newer than all that this signer made before."""
        self._serial = max(time.time_ns(), self._serial + 1)
        return f"{self._mac(key, self._serial, text)} {self._serial} {text}"

    def verify(self, key: str, raw: bytes) -> Document | None:
        """The document under `key`, or None if there is none that verifies."""
        if not raw:
            return None
        try:
            mac, serial_text, text = raw.decode().split(" ", 2)
            serial = int(serial_text) if len(serial_text) < 24 else -1
        except ValueError:
            self.ignore(key, "it is no document of keepstep")
            return None
        if not hmac.compare_digest(mac.encode(), self._mac(key, serial, text).encode()):
            reason = "it is not signed" if mac == UNSIGNED else "its signature is wrong"
            self.ignore(key, f"{reason}: somebody else wrote it, or with another secret_file")
            return None
        return Document(text, serial)

    def verify_newest(self, key: str, raw: bytes) -> Document | None:
        """The same, for a key with one writer: None also if it is older than one that was read before."""
        document = self.verify(key, raw)
        if document is None:
            return None
        if document.serial < self._newest.get(key, 0):
            self.ignore(key, "it is older than the one before")
            return None
        if len(self._newest) > REMEMBERED_KEYS:
            self._newest.clear()
        self._newest[key] = document.serial
        return document

    def summary(self) -> str:
        """What to add to the reason of a wait that failed: "" when all that was read did verify."""
        if not self.ignored:
            return ""
        return f" ({self.ignored} documents in the store were ignored, the last one {self.last_ignored})"

    def ignore(self, key: str, reason: str) -> None:
        """Count a document that is not used, and say so at most once a minute."""
        self.ignored += 1
        self.last_ignored = f"{key}: {reason}"
        now = time.monotonic()
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "a document in the rendezvous store is ignored, %s (%d so far)", self.last_ignored, self.ignored
            )

    def _mac(self, key: str, serial: int, text: str) -> str:
        if not self._key:
            return UNSIGNED
        return hmac.digest(self._key, f"{len(key)} {key} {serial} {text}".encode(), "sha256").hex()


class SignedStore:
    """A connection to a store, whose documents are signed."""

    def __init__(self, store: Store, signer: DocumentSigner) -> None:
        self.raw, self.signer = store, signer

    def write(self, key: str, text: str) -> None:
        self.raw.set(key, self.signer.sign(key, text))

    def read(self, keys: Sequence[str]) -> list[Document | None]:
        """The documents under these keys; None where there is none that verifies. Waits for none of them."""
        names = list(keys)
        if not names:
            return []
        if self.raw.check(names):
            found = self.raw.multi_get(names)
        else:
            found = [self.raw.get(name) if self.raw.check([name]) else b"" for name in names]
        return [self.signer.verify_newest(name, raw) for name, raw in zip(names, found, strict=True)]

    def read_as(self, keys: Sequence[str], kind: type[T]) -> list[T | None]:
        """The same, decoded from JSON; None also for what is of another form."""
        found: list[T | None] = []
        for key, document in zip(keys, self.read(keys), strict=True):
            try:
                found.append(msgspec.json.decode(document.text, type=kind) if document is not None else None)
            except (msgspec.DecodeError, RecursionError) as error:
                self.signer.ignore(key, f"it is of another form ({type(error).__name__})")
                found.append(None)
        return found
