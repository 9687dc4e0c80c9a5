"""Erasure coding: what lets the state of lost nodes be computed from those that are left.

field        arithmetic in GF(256), the few hundred products that are not done natively
code         one parity row from k pieces, one lost piece from any k of k + m
placement    pure: who protects whom, which chunk travels in which stripe, what that costs
fingerprint  16 bytes of a chunk that obey the same arithmetic, so that parity can be audited without the data
backend      who does the arithmetic on bytes: isal (ctypes), or plain (numpy) where there is no ISA-L
buffers      addresses of Python buffers, held for as long as native code uses them
device       the same bits on tensors, on CPU and CUDA: with kernels, the only file here that knows torch
kernels      Triton, for CUDA; reached through device only
"""
