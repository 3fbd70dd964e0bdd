"""Processes, preemption, logs and options of any run."""
