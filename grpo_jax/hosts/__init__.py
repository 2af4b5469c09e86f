"""The processes of a run, the files and folders that they share, and downloads from buckets and the hub."""
