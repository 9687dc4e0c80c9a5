"""The failures that `keepstep drill` causes, one file per kind.

asking     confirmation              processes  signals that reach only whom they are meant for
deaths     kill-trainer, kill-keeper, kill-node
outages    freeze-peer, cut-link, and how long the group takes to heal
bits       flip-bits
"""
