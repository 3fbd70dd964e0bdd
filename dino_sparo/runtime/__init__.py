"""Processes, preemption, logs and options of any run."""

# Exit status of a process that failed through no mistake of the user's: starting it again may well help.
FAULT_STATUS = 75  # EX_TEMPFAIL of sysexits.h
