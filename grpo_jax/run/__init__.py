"""What the loop of a run stands on."""
