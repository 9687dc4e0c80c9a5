"""Checks on the bytes of one snapshot: fingerprints on devices, samples of host memory."""
