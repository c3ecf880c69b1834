"""Between the formats of other tools, checkpoints, and models on devices."""
