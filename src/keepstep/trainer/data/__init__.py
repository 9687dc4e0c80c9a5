"""Data loaders whose position is part of the state, and the loop that asks them for batches."""
