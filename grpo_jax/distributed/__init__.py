"""Meshes, shardings and the placement of the loop's programs on devices."""
