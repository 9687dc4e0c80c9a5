"""Addresses of Python buffers, valid for as long as native code uses them.

ctypes keeps no reference to the owner of an address: a buffer that is freed or a map that is closed during a
native call corrupts the heap. So only `Pins` returns addresses; it holds an export of every buffer (an mmap
with an export cannot be closed, a bytearray cannot be resized) until its block ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SIMPLE, _WRITABLE = 0, 1


class MemorySpan(NamedTuple):
    """Bytes in memory."""

    address: int
    size: int


NOTHING = MemorySpan(0, 0)

Pointers: TypeAlias = "ctypes.Array[ctypes.c_void_p]"  # addresses for native code; they keep nothing alive


def pointers(addresses: Sequence[int]) -> Pointers:
    return (ctypes.c_void_p * len(addresses))(*addresses)


class Pins:
    """Spans of buffers that stay valid inside the `with` block."""

    def __init__(self) -> None:
        self._held: list[_Export] = []

    def read(self, buffer: Buffer | None) -> MemorySpan:
        return NOTHING if buffer is None else self._pin(buffer, _SIMPLE, "read")

    def write(self, buffer: Buffer) -> MemorySpan:
        return self._pin(buffer, _WRITABLE, "written")

    def _pin(self, buffer: Buffer, flags: int, use: str) -> MemorySpan:
        export = _Export()
        try:
            _get_buffer(buffer, ctypes.byref(export), flags)
        except (BufferError, ValueError) as error:
            raise ValueError(f"a {type(buffer).__name__} cannot be {use} as contiguous memory: {error}") from None
        self._held.append(export)
        return MemorySpan(export.address or 0, export.size)

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            _release(ctypes.byref(self._held.pop()))


class _Export(ctypes.Structure):
    """Py_buffer of the stable ABI."""

    _fields_ = [
        ("address", ctypes.c_void_p), ("owner", ctypes.c_void_p), ("size", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


# A handle of our own: argument types set on ctypes.pythonapi apply to the whole process.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_get_buffer.restype = ctypes.c_int
_release = _python.PyBuffer_Release
_release.argtypes = [ctypes.c_void_p]
_release.restype = None
