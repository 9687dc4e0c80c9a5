"""A rank's shared memory: one memfd with a self-describing header and two to four slots.

header    the records in it, byte for byte           (docs/arena-format.md is their table)
segment   the memfd itself: made, sealed, filled, mapped
slots     an arena over a segment: who may write what, and what a reader may believe
checksum  sealing a slot and verifying it
room      how much memory can be had, before any is taken
"""
