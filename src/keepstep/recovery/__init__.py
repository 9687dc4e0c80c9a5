"""The way back: what is there (inventory), what to restore and why (plan). Both pure."""
