"""The failures that `keepstep drill` causes, one file per kind.

kills      kill-trainer, kill-keeper, kill-node
outages    freeze-peer, cut-link, and how long the group takes to heal
bit_flips  flip-bits
processes  confirmation, and signals by pidfd
"""
