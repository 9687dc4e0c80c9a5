"""For tests, ours and users': faults as values."""
