"""The keeper: one process per node and job that outlives the trainers.

    core         what it knows and decides: members, fencing, restoring, lease   (pure)
    coordinator  grants, completion, retention                                    (pure)
    events       what reaches the core and what it wants done                     (pure)
    runtime      the loop: sockets, pidfds, timers; carries the effects out
    control      one connection on the control socket
    work         threads that seal, verify and allocate
    report       status, metrics and HTTP on the second socket
    lease        its lock, its card, its sockets: that there is one, and that it leaves nothing

It never imports torch or numpy and never touches a device.
"""
