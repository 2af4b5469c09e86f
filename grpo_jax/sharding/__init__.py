"""The mesh, the shardings of values on it, and executables."""
