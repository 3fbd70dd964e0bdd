"""The options of read-outs and backbones; no torch here, so that `--help` is fast."""

from dino_sparo.models.architectures import KEY_DIM, NUM_SLOTS, SLOT_DIM
from dino_sparo.runtime.cli import Group, Option, positive_int

SLOT_SIZES: Group = {
    "sparo_slots": Option(NUM_SLOTS, "Number of slots L.", positive_int),
    "sparo_slot_dim": Option(SLOT_DIM, "Width of a slot V; the encoding has L*V numbers.", positive_int),
    "sparo_key_dim": Option(KEY_DIM, "Width of the attention's keys and queries.", positive_int),
    "sparo_group_size": Option(
        1, "Slots that share one key projection; 2 or 4 save parameters when there are many slots.", positive_int
    ),
}
PRETRAINED = Option(
    False,
    "Start a model timm/NAME from timm's weights, which are downloaded once. Without a network, give --init_from FILE.",
)
