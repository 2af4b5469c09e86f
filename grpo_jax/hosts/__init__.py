"""What touches a shared disk or another process."""
