"""From `take()` to the commit: copies to the arena beside training."""
