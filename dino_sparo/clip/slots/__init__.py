"""Analysis of the slots of a CLIP: select slots, mask them, name their concepts, draw them."""
