"""Processes, faults, preemption, logs and options of any run."""
