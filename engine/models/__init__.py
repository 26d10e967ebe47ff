"""The models: what a checkpoint is, and the one dense decoder that runs it."""
