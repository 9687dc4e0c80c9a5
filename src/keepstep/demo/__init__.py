"""`keepstep demo`: the same training twice, undisturbed and with failures, compared bit for bit.

Read in this order: `script` (the two runs, and the failures), `run_record` (the events of a run, and when a failure is
due: pure), `comparison` (the differences: pure), `training` (four nodes on this machine), `report` (the output).
"""
