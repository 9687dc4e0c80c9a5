"""Inside the training process; torch lives here.

    snapshotter  the public object: restore(), take(), status(), close()
    state        the user's state as a tree of values and a list of tensors
    blocks       which bytes those tensors are, each stored once: the layout
    fence        the optimizer hooks: what may be copied while training goes on
    capture      one snapshot: what is copied inside take, what behind it, and the commit
    restore      the way back: checked first, then strictly in place, RNG last
    sizing       how large the arena must be before optimizer state exists
    link         the connection to the keeper, and coming back to a new one
"""
