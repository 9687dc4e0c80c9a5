"""The code, the placement and the fingerprints for whatever sizes and losses hypothesis thinks of."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.parity import galois
from keepstep.parity.code import Code
from keepstep.parity.fingerprint import combine, fingerprint
from keepstep.parity.placement import NodePlace, Placement, ShareMap, cut_groups, keep_positions, recoverable


@st.composite
def erased_codes(draw: st.DrawFn) -> tuple[Code, list[bytes], int, set[int]]:
    k, m = draw(st.integers(1, 32)), draw(st.integers(1, 4))
    data = draw(st.lists(st.binary(max_size=300), min_size=k, max_size=k))
    lost = draw(st.sets(st.integers(0, k + m - 1), min_size=1, max_size=m))
    return Code(k, m), data, max(map(len, data)), lost


@settings(deadline=None, max_examples=200)
@given(erased_codes())
def test_what_is_encoded_is_rebuilt_from_any_k_pieces(case: tuple[Code, list[bytes], int, set[int]]) -> None:
    code, data, size, lost = case
    parity = [bytearray(b"\xee" * size) for _ in range(code.m)]
    for row, out in enumerate(parity):
        code.encode(row, [one or None for one in data], out)
    available = {i: piece for i, piece in enumerate([*data, *parity]) if i not in lost}
    for index in lost & set(range(code.k)):
        out = bytearray(b"\xee" * len(data[index]))
        code.rebuild(index, available, out)
        assert out == data[index]


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=2000), st.binary(max_size=2000), st.integers(0, 255), st.integers(0, 255))
def test_fingerprints_are_linear(a: bytes, b: bytes, x: int, y: int) -> None:
    size = max(len(a), len(b))
    mixed = galois.add(galois.scale(x, a.ljust(size, b"\0")), galois.scale(y, b.ljust(size, b"\0")))
    assert fingerprint(mixed) == combine([x, y], [fingerprint(a), fingerprint(b)])


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=2000), st.data())
def test_changes_of_one_or_two_bytes_always_show(data: bytes, more: st.DataObject) -> None:
    changed = bytearray(data)
    for _ in range(more.draw(st.integers(1, 2))):
        changed[more.draw(st.integers(0, len(data) - 1))] ^= more.draw(st.integers(1, 255))
    assert (fingerprint(changed) == fingerprint(data)) == (changed == data)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60), st.integers(2, 36), st.integers(0, 4))
def test_groups_are_even_large_enough_and_spread(domains: list[str], group_size: int, losses: int) -> None:
    losses = min(losses, len(domains) - 1)
    groups = cut_groups([NodePlace(f"n{i}", domain) for i, domain in enumerate(domains)], group_size, losses)
    sizes = [len(group) for group in groups]
    assert sorted(i for group in groups for i in group) == list(range(len(domains)))
    assert max(sizes) - min(sizes) <= 1
    assert losses < min(sizes)
    assert max(sizes) - losses <= 32
    for domain in set(domains):
        assert max(sum(domains[i] == domain for i in g) for g in groups) <= -(-domains.count(domain) // len(groups))


@given(st.lists(st.integers(0, 12), unique=True), st.lists(st.integers(0, 12), unique=True))
def test_positions_are_kept(before: list[int], nodes: list[int]) -> None:
    after = keep_positions([str(i) for i in before], [str(i) for i in nodes])
    assert sorted(after) == sorted(str(i) for i in nodes)
    assert keep_positions(after, after[::-1]) == after
    if len(before) == len(nodes):
        assert all(after[at] == str(node) for at, node in enumerate(before) if node in nodes)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(1, 36))
    return n, draw(st.integers(max(0, n - 32), min(4, n - 1)))


@given(groups(), st.data())
def test_any_m_nodes_may_go_and_no_more(shape: tuple[int, int], more: st.DataObject) -> None:
    n, m = shape
    lost = more.draw(st.sets(st.integers(0, n - 1)))
    assert (recoverable(n, m, lost, lost) == "") == (len(lost) <= m)


@given(groups(), st.integers(0, 500), st.data())
def test_a_chunk_is_found_where_it_was_put(shape: tuple[int, int], chunk: int, more: st.DataObject) -> None:
    n, m = shape
    position = more.draw(st.integers(0, n - 1))
    stripe, row = Placement(n, m).where(position, chunk)
    assert Placement(n, m).chunk_of(position, stripe, row) == chunk
    shares = ShareMap(chunk + 1, n, m, turn=more.draw(st.integers(0, 10**9)))
    assert sum(chunk in shares.data_of(holder) for holder in range(n)) == 1
