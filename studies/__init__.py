"""Studies: effects of the read-outs, measured with several seeds. `python -m studies --help`.

`plans.py` fixes what is trained and how it is evaluated. `runs.py` makes the missing runs; `report.py` prints tables
and draws a plot; `slots.py` scores the maps and slots of finished runs. Results are small files in `studies/results/`,
which docs/results.md shows. `binding/`, `oc_splits/` and `sweep.py` are experiments with separate commands.
"""
