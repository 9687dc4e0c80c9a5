"""Erasure coding: what lets the state of lost nodes be computed from those that are left.

galois           GF(256), the few hundred products that are not computed natively
code             one parity row from k units, one lost unit from any k of k + m
backend          arithmetic on bytes: ISA-L, or numpy where there is no ISA-L
isal             ISA-L through ctypes, self-tested
numpy_backend    the same bits with numpy
buffer_pins      addresses of Python buffers, held during native calls
fingerprint      16 bytes of a chunk that obey the same arithmetic, so that parity can be audited without the data
divergence       pure: which replica set differs, and on whose ranks, by the same arithmetic
placement        pure: which nodes protect each other, and which stripe each chunk belongs to
cost_model       pure: what that costs in memory and time
parity_buffer    parity in a memfd: header, table, units
gpu              the same bits on tensors, on CPU and CUDA; only this package imports torch
"""
