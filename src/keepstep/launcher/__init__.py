"""keepstep inside other people's launchers and trainers: one file per seam, no monkeypatching."""
