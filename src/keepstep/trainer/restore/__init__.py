"""From the keeper's answer to live objects."""
