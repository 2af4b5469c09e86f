"""What stands around the steps of a run: config and settings, opening, checkpoints, files, console, signals."""
