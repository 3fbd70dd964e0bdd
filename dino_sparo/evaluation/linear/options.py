"""The options of linear and attentive probes; no torch here."""

from dino_sparo.evaluation.options import IMAGE_ENCODER, SLOTS, USE_CUDA, evaluation_parser
from dino_sparo.models.options import SLOT_SIZES
from dino_sparo.runtime.cli import Group, Option, Parser, number_from_0, positive_int, positive_number

PROBES = ("linear", "sparo", "ep", "attention")  # names of `--probe`

PROBE_FEATURES: Group = {
    "image_encoder": IMAGE_ENCODER,
    "slots": SLOTS,
    "n_last_blocks": Option(
        None,
        "Number of last layers whose class tokens are concatenated. 4 suits a ViT-S, 1 a ViT-B. (default: 4 for vision "
        "transformers, 1 for networks of stages and for XCiT)",
        positive_int,
    ),
    "avgpool_patchtokens": Option(
        False, "Also concatenate the mean of the patch tokens; false suits a ViT-S, true a ViT-B."
    ),
}
ATTENTIVE_PROBES: Group = {
    "probe": Option(
        None,
        "Train read-outs on the frozen tokens, each with a linear classifier, and compare accuracy and number "
        "of parameters. linear: the encoder's own read-out, frozen. sparo: slots. ep: efficient probing. "
        "attention: one query with several heads. Writes for each kind an encoder with the trained read-out.",
        choices=PROBES,
        nargs="+",
    ),
    **SLOT_SIZES,
    "ep_queries": Option(32, "Number of queries of ep.", positive_int),
    "ep_reduction": Option(1, "Width of a token divided by the width of ep's encoding.", positive_int),
    "attention_heads": Option(16, "Number of heads of attention; it divides the width of a token.", positive_int),
    "warmup_epochs": Option(
        None, "Epochs of warm-up of the learning rate, with --probe; by default a ninth of --epochs.", number_from_0
    ),
}
PROBE_TRAINING: Group = {
    "epochs": Option(
        None, "Number of epochs; the learning rate falls to 0. By default 100, with --probe 90.", positive_int
    ),
    "lr": Option(
        None,
        "Learning rates for a batch of 256 images, scaled with the batch; each trains one probe. By default "
        "0.001 0.003 0.01 0.03 0.1 0.3, with --probe 0.1 0.2 0.5 1.",
        positive_number,
        nargs="+",
    ),
    "fast": Option(
        False,
        "Encode every image once, without crops and flips, and train on these features: minutes instead of "
        "hours, usually a little less accurate. Every process keeps the features of all images on its GPU, or "
        "with --use_cuda false in main memory: 27 GB for ImageNet with the defaults of ViT-S and SPARO.",
    ),
    "val_freq": Option(1, "Epochs between two validations.", positive_int),
    "num_labels": Option(
        None, "Expected number of classes; the command ends if the data have a different number.", positive_int
    ),
    "evaluate": Option(
        False,
        "Train nothing, and test the probes that the same command without this option trained. Without such probes, "
        "linear.pth in the same folder is read, which may be a linear head of facebookresearch/dino.",
    ),
    "use_cuda": USE_CUDA,
}


def linear_parser() -> Parser:
    """The options of `eval_linear.py`, in data-flow order."""
    return evaluation_parser(
        {
            "features of the probe": PROBE_FEATURES,
            "read-outs on frozen tokens": ATTENTIVE_PROBES,
            "training of the probes": PROBE_TRAINING,
        }
    )
