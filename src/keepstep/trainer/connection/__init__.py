"""Who this trainer is, and its connection to the node's keeper."""
