"""The options of image retrieval and copy detection; no torch here."""

from dino_sparo.data.options import DOWNLOAD
from dino_sparo.evaluation.options import SLOTS, USE_CUDA, evaluation_parser
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int

RETRIEVAL: Group = {
    "slots": SLOTS,
    "data_path": Option(
        "", "Folder with roxford5k/ and rparis6k/; for labelled images what --data_path of k-NN takes."
    ),
    "dataset": Option(
        "roxford5k",
        "roxford5k, rparis6k: revisited Oxford and Paris. labelled: each image of the validation split searches among "
        "all others for images of its class.",
        choices=("roxford5k", "rparis6k", "labelled"),
    ),
    "imsize": Option(224, "Longest side of an image in pixels; images keep their shape.", positive_int),
    "multiscale": Option(False, "Average the encodings of an image at its size, and at 0.7 and 0.5 of it."),
    "download": DOWNLOAD,
    "batch_size_per_gpu": Option(
        1, "Images per process and step; more than 1 needs images of equal size.", positive_int
    ),
    "use_cuda": USE_CUDA,
}
COPIES: Group = {
    "slots": SLOTS,
    "data_path": Option("", "Folder of Copydays, with original/ and strong/."),
    "whitening_path": Option(None, "Folder of other images, from which features are whitened; the paper takes 20,000."),
    "distractors_path": Option(None, "Folder of images that are added to the originals; the paper takes 10,000."),
    "imsize": Option(320, "Side of the square that an image is resized to, in pixels.", positive_int),
    "parts": Option(
        ["encoding", "gem"],
        "Features of an image, one after the other. encoding: the class token, or the slots. gem: the generalised mean "
        "of the patch tokens with exponent 4.",
        choices=("encoding", "gem"),
        nargs="+",
    ),
    "batch_size_per_gpu": Option(16, "Images per process and step.", positive_int),
    "use_cuda": USE_CUDA,
}


def image_retrieval_parser() -> Parser:
    """The options of `eval_image_retrieval.py`."""
    return evaluation_parser({}, RETRIEVAL)


def copy_detection_parser() -> Parser:
    """The options of `eval_copy_detection.py`."""
    return evaluation_parser({}, COPIES, columns={})
