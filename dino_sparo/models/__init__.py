"""Crops -> tokens -> slots -> encoding: the backbone, the read-outs and the encoder that joins them."""
