"""The other processes of a run, and the disk that they share."""
