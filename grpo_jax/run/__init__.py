"""Everything around the steps of a run: config, settings, opening, checkpoints, files, console and signals."""
