"""A rank's shared memory: one memfd with a self-describing header and two to four slots.

records         the records in it, byte for byte (docs/arena-format.md is their table)
memfd           create, seal, read, write and map the shared memory
slots           an arena over a memfd: who may write what, and what a reader may trust
chunks          the chunks of a slot, in the order of its checksum table
checksum        seal a slot and verify it
"""
