"""The keeper: one process per node and job that outlives the trainers.

    log_file        the log, bounded
    process         the loop: sockets, pidfds, timers, results of threads
    requests        requests on the control socket          connection  one connection of it
    executor        carries out the effects of the core
    status          the status and its metrics              status_server  HTTP for both
    singleton       one keeper per run and node: lock, sockets, card

    node/           what one node decides                                    (pure)
    coordinator/    what one keeper decides for the whole job                (pure)
    workers/        bytes of this node: seal, verify, allocate
    transfer/       bytes between nodes: serve, protect, fetch, rebuild

It never imports torch or numpy and never touches a device.
"""
