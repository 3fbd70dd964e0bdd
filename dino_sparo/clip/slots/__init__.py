"""Analysis of the slots of a CLIP: select, mask and draw slots, name the concepts of slots."""
