"""Generation: the engine, sampling, and the scripts around it."""
