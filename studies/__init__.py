"""Studies: what the read-outs do, measured with several seeds. `python -m studies --help`.

`plans.py` fixes what is trained, `scores.py` how it is evaluated, `runs.py` makes the runs that are missing, and
`report.py` turns their results into tables and a plot. `slots.py` scores the slots of finished runs. The results are
small files in `studies/results/`; docs/results.md shows them.
"""
