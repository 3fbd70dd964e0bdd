"""What OC-CLIP's options choose among, as plain values: no torch, so that `--help` is fast."""

COMPETITIONS = ("queries", "keys")  # what the softmax of the binding runs over
RELATION_SCORES = ("additive", "mlp")
RELATION_NEGATIVES = ("all", "one")  # which relations of a graph its false graphs alter
MAX_NODES = MAX_RELATIONS = 16  # of a graph
DEMO_MODELS = ("oc_clip", "cls", "sparo")  # what the demo compares; the first has graphs
