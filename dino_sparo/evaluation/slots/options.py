"""The options of `dino-sparo slots study`; no torch here."""

from dino_sparo.evaluation.options import USE_CUDA, evaluation_parser
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, positive_number

SLOT_RANKING: Group = {
    "choosing_images": Option(
        10_000, "Number of training images held out to rank the slots, at most a fifth of all.", positive_int
    ),
    "numbers": Option(
        None, "Numbers of slots to evaluate; by default powers of two and all slots.", positive_int, nargs="+"
    ),
    "keep": Option(
        None,
        "Number of slots in the result file; by default the most accurate number on the --choosing_images.",
        positive_int,
    ),
    "draws": Option(5, "Number of random orders of the slots, as a control.", positive_int),
}
SLOT_KNN: Group = {
    "nb_knn": Option(20, "Number of neighbours.", positive_int),
    "temperature": Option(0.07, "Temperature of the vote.", positive_number),
}
SLOT_PROBES: Group = {
    "probe": Option(False, "Also train linear probes on the chosen slots: 1 + --draws probes for each of --numbers."),
    "epochs": Option(30, "Epochs of the probes.", positive_int),
    "lr": Option(
        [0.01, 0.1, 1.0], "Learning rates for a batch of 256 images; the --choosing_images select one.", positive_number
    ),
    "use_cuda": USE_CUDA,
}


def slot_study_parser() -> Parser:
    """The options of `dino-sparo slots study`, in data-flow order."""
    return evaluation_parser({"slots": SLOT_RANKING, "k-NN": SLOT_KNN, "linear probes": SLOT_PROBES})
