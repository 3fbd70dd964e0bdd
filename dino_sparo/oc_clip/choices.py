"""Choices and limits of OC-CLIP's options, without torch, so that `--help` is fast."""

COMPETITIONS = ("queries", "keys")  # axis of the softmax of the binding
RELATION_SCORES = ("additive", "mlp")
RELATION_NEGATIVES = ("all", "one")  # relations that false graphs alter
MAX_NODES = MAX_RELATIONS = 16  # of a graph
DEMO_MODELS = ("oc_clip", "cls", "sparo")  # models of the demo; the first has graphs
