"""The mesh, how values lie on it, and compiled programs."""
