"""Between a trainer, launcher or CLI and the keeper of the same node."""
