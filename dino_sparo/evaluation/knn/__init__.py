"""Weighted k-NN on frozen features."""
