"""GF(256), against multiplication done by hand, and the laws that everything else leans on."""

from __future__ import annotations

import itertools
import random

import pytest

from keepstep.parity import galois


def multiply_by_hand(a: int, b: int) -> int:
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def test_products_are_those_of_polynomials_modulo_0x11d() -> None:
    for a, b in itertools.product(range(256), repeat=2):
        assert galois.mul(a, b) == multiply_by_hand(a, b)


def test_every_element_but_zero_has_an_inverse() -> None:
    assert all(galois.mul(a, galois.inv(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        galois.inv(0)


def test_powers_of_the_generator_run_through_all_elements() -> None:
    assert {galois.power(i) for i in range(255)} == set(range(1, 256))
    assert galois.power(255) == galois.power(0) == galois.power(-255) == 1


def test_buffers_are_scaled_and_added_byte_by_byte() -> None:
    data = bytes(range(256))
    assert galois.scale(7, data) == bytes(multiply_by_hand(7, byte) for byte in data)
    assert galois.add(b"\x01\x02\x00", b"\x03\x02\x00") == b"\x02\x00\x00"
    with pytest.raises(ValueError, match="cannot be added"):
        galois.add(b"1", b"22")


def test_inverse_times_matrix_is_one() -> None:
    draw = random.Random(0)
    for size in (1, 2, 3, 4):
        points = draw.sample(range(1, 256), size)
        matrix = [[galois.power(row * galois.LOG[x]) for x in points] for row in range(size)]
        inverse = galois.inverse(matrix)
        for i, j in itertools.product(range(size), repeat=2):
            total = 0
            for at in range(size):
                total ^= galois.mul(inverse[i][at], matrix[at][j])
            assert total == int(i == j)


@pytest.mark.parametrize("matrix", [[[1, 1], [1, 1]], [[0]], [[1, 2], [2, 4]]])
def test_a_singular_matrix_is_refused(matrix: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="no inverse"):
        galois.inverse(matrix)
    with pytest.raises(ValueError, match="square"):
        galois.inverse([[1, 2]])
