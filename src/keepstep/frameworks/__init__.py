"""Adapters: keepstep inside other training frameworks, one file each, through their public interfaces only.

Nothing here is imported by `import keepstep`. Each module needs the extra of its name: `keepstep[lightning]`.
"""
