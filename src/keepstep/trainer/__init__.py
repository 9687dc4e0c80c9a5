"""Inside the training process; torch lives here.

snapshotter  the public object: restore(), take(), status(), close()
items        the objects of the state, by name and kind
state        reading them: values as bytes, tensors by reference  (skeleton: recognised as unchanged)
rng          random states
blocks       which bytes those tensors are, each stored once: the layout
fence        the optimizer hooks: what may be copied while training goes on
copies       which of those bytes are copied inside take, which behind it  (scattered, gather: small tensors)
view         the arena as this process writes it
capture      one snapshot: what is copied inside take, what behind it, and the commit  (job: one in flight)
moving       how it is copied on the host
leaving      how it leaves a device; landing: what of it is whole; prepared: what the next one needs
loading      restore(): asked, read, compared, written
restore      into the live objects: checked first, then strictly in place, RNG last
ring         how its bytes get to devices
memory       the arena: asked for, faulted in, made larger
sizing       how large the arena must be before optimizer state exists
link         the connection to the keeper, and coming back to a new one
"""
