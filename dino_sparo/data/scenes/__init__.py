"""Built-in scenes: a seed becomes the description of a scene (`graphs.py`), which becomes an image (`images.py`)."""
