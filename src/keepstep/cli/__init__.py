"""The `keepstep` command: a thin client of keepers, one file per command.

    main      finds the command, loads its file only, prints errors as `error:` and `try:`
    client    which run is meant, and how its keeper is asked
    tables    how tables, sizes and times look
    checks    what `doctor` looks at

A command has `add_arguments(parser)` and `run(args) -> int`. Exit codes: 0 all is well, 1 an error (or no
keeper), 2 wrong usage, 3 something is not protected or not sound. `--json` is a contract: fields are only added.
Only `run`, `demo` and `doctor --torch` let torch be imported.
"""
