"""OC-CLIP's controlled experiment: models trained on some pairs of objects and asked about others.

design.py    seed and shares -> which pairs are trained on, and the questions
data.py      design -> pictures, captions, scene graphs and questions as files
run.py       `python -m studies oc-splits`: train and ask all models, print the table
"""
