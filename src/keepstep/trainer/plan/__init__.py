"""Which bytes of the state are copied, by which rank, and in which order. Data only: `capture/` executes it."""
