"""How much encoders know about which colour belongs to which shape: `python -m studies binding`.

`models.py` trains the encoders, `scenes.py` draws the images, `readings.py` reads tokens and slots, `probes.py`
measures information, `run.py` runs the study and `report.py` prints its tables. docs/binding.md explains the results.
"""
