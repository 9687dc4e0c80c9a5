"""How many files work on one snapshot and on one restore, recorded in a real run. Run with `-s` to see them.

The limits are the counts of docs/architecture.md, "Hops": who adds a file to a way changes both, or finds it a place in
a file that is on the way already.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from walked_files import ASIDE, NAMES, RESTORE, TAKE, executed, report, walk, walked

MOST_WALKED = {TAKE: 70, RESTORE: 108}
SOURCE = Path(__file__).parents[2] / "src" / "keepstep"


@pytest.mark.timeout(300)
def test_a_snapshot_and_a_restore_pass_through_few_files(tmp_path: Path) -> None:
    walk(tmp_path)
    print(report(tmp_path))
    for number, name in NAMES.items():
        way = walked(tmp_path, number)
        assert len(way) <= MOST_WALKED[number], f"{name}: {sorted(way)}"
        # The recorder works: both ways lead from a trainer through its keeper to the keepers of other nodes.
        assert {"trainer/snapshotter.py", "keeper/node/core.py", "transport/serve.py"} <= set(way)
        assert len(executed(tmp_path, number)) > len(way)


def test_files_beside_the_way_exist() -> None:
    assert not [file for files in ASIDE.values() for file in files if not (SOURCE / file).is_file()]
