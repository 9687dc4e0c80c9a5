"""The story that `keepstep demo` tells: the same training twice, undisturbed and under fire, compared bit for bit.

Read in this order: `play` (the two runs, and the kills), `record` (what is known about a run, and when a failure is
due: pure), `comparison` (what differs: pure), `training` (four nodes on this machine), `report` and `picture` (what
the user sees).
"""
