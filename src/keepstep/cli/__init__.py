"""The `keepstep` command: a thin client of keepers, one file per command.

    main      finds the command, loads its file only, prints errors as `error:` and `try:`
    keepers   finds the run that a command is about, and connects to its keeper
    risk      what a failure would cost now
    tables    tables, sizes and times
    signals   SIGTERM as an exception
    commands  one file per command
    drills    the failures that `keepstep drill` causes

A command has `add_arguments(parser)` and `run(args) -> int`. Exit codes: 0 all is well, 1 an error (or no
keeper), 2 wrong usage, 3 something is not protected or not sound. `--json` is a contract: fields are only added.
Only `run`, `demo` and `doctor --torch` let torch be imported.
"""
