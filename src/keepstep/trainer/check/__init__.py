"""A trainer under `keepstep check`: what it records, and when it is killed."""
