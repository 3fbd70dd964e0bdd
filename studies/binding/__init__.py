"""Study of the information in encoders about which colour belongs to which shape: `python -m studies binding`.

`models.py` trains the encoders and reads their tokens and slots, `scenes.py` draws the images, `probes.py` measures
information, `run.py` runs the study and prints its tables. docs/binding.md explains the results.
"""
