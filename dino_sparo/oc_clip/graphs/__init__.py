"""Scene graphs of captions, and the files that hold them."""
