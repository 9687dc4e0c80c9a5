"""The arithmetic of `parity/` on device tensors, with the same bits."""
