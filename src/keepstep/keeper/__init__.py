"""The keeper: one process per node and job that outlives the trainers.

    core         takes events in, gives effects out; the lease                     (pure)
    node         what it knows                                                    (pure)
    members      trainers, launchers, incarnations, the fence                      (pure)
    arenas       the memory of the ranks, given, adopted, refused                  (pure)
    snapshots    committed, sealed, complete; free slots                          (pure)
    job          all nodes of a job, as their coordinator sees them: board, counting, planning,
                 granting, taking_over, watermarks                                (pure)
    restoring    what comes back, decided once for all ranks                      (pure)
    events       what reaches the core and what it wants done                     (pure)
    runtime      the loop: sockets, pidfds, timers; carries the effects out
    control      one connection on the control socket
    work         threads that seal, verify and allocate
    reading      large slots, checksummed by a process that maps them (reader)
    holdings     what a slot holds of replica classes, decoded once for each layout
    report       status, metrics and HTTP on the second socket
    lease        its lock, its card, its sockets: that there is one, and that it leaves nothing

It never imports torch or numpy and never touches a device.
"""
