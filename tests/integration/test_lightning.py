"""A fit in Lightning, killed at an epoch's end, in mid-accumulation and in a validation, ends as if it was not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lightning_lives import FitRecord, FitServer, compare

OPTIONS = {"validation": True, "metrics": True, "epochs": 2}


@pytest.fixture
def records() -> Iterator[tuple[FitRecord, FitRecord]]:
    truth, killed = FitRecord(keep=False, **OPTIONS), FitRecord(kills=["5", "6", "batch 1 4", "val 14 1"], **OPTIONS)
    yield truth, killed
    truth.clear()
    killed.clear()


@pytest.mark.timeout(300)
def test_killed_fit_ends_as_the_fit_without_keepstep(records: tuple[FitRecord, FitRecord]) -> None:
    truth, killed = records
    server = FitServer()
    try:
        assert truth.finish(server) == 0
        assert killed.finish(server) == 4
    finally:
        server.close()
    compare(truth, killed)
    killed.check_no_trace()
