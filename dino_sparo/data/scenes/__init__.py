"""Built-in scenes: a seed becomes a scene graph (`graphs.py`), and a scene graph becomes an image (`images.py`)."""
