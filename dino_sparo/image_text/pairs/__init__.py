"""Any pairs of images and captions -> batches of crops and token ids; begin with `sources.py` and `batches.py`."""
