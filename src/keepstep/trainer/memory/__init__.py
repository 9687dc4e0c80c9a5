"""This rank's arena: requested, mapped, page-locked."""
