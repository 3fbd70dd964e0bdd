"""Weights <-> files: checkpoints of runs, foreign names, initialization, export."""
