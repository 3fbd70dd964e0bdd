"""Benchmarks of true and false captions: one runner for all, one table, one file per benchmark in `sets/`."""
