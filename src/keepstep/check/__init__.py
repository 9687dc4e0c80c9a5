"""`keepstep check`: runs a training command undisturbed and with kills, and compares every captured bit.

Deciding is apart from doing: `kill_plan`, `comparison` and `causes` are pure, `trajectory` reads records, `command_run`
runs processes, `run_order` has the order of the runs, `report` what is printed and written.
"""
