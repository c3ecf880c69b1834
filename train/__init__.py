"""Training: data, loss, step, optimizer and run. Nothing is here yet."""
