"""Weights <-> files: checkpoints of runs, foreign weights, initialization, export."""
