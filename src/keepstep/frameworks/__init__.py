"""Adapters: keepstep inside other training frameworks. The file of a framework's name is what its users import.

Nothing here is imported by `import keepstep`. Each adapter needs the extra of its name: `keepstep[lightning]`.
"""
