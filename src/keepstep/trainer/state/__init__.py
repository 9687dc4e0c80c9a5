"""The user's objects: what they hold, how it is read, and when it may be written."""
