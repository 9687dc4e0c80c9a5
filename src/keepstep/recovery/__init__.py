"""Restore decisions: what keepers hold (`inventory`), what to restore and why (`plan`). Pure."""
