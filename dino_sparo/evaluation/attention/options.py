"""The options of `dino-sparo attention`; no torch here."""

from dino_sparo.draw.options import FIGURE_FORMAT, SHOW_CHANNELS
from dino_sparo.evaluation.options import EVALUATION_LIMITS, IMAGE_ENCODER, OUTPUT, map_parser
from dino_sparo.runtime.cli import Group, Option, Parser, positive_int, share_above_0

DRAWN_IMAGES: Group = {
    "data_path": Option(
        None,
        "An image, a folder, or any data that training takes; by default the images of --atlas, else a built-in scene.",
        spellings=("image_path",),
    ),
    **EVALUATION_LIMITS,
    "img_size": Option(
        None,
        "Size of the image in pixels: one number for the short side (several images are cropped to the central "
        "square), or height and width. By default twice the training size, for finer maps.",
        positive_int,
        nargs="+",
        spellings=("image_size",),
    ),
    "num_images": Option(8, "Number of images taken from a folder, evenly spread.", positive_int),
}
PICTURES: Group = {
    "output_dir": OUTPUT["output_dir"]._replace(default=".", help="Folder of the files."),
    "overwrite": OUTPUT["overwrite"],
    "threshold": Option(
        None,
        "Also draw masks.png: the fewest patches that contain this share of a map's mass, e.g. 0.6.",
        share_above_0,
    ),
    "save_each": Option(False, "Also write one PNG per map."),
    "figure_format": FIGURE_FORMAT,
    **SHOW_CHANNELS,
    "max_maps": Option(None, "Number of maps in a grid, most peaked first; by default all maps.", positive_int),
    "compare": Option(None, "Another checkpoint, drawn below this one in compare.png."),
    "pca": Option(
        False,
        "Draw the first three principal components of the patch tokens as colours instead of maps, with one basis for "
        "all images: pca.png, pca.npy and pca.json. With slots, also those of the patches' attention over slots.",
    ),
    "foreground": Option(False, "With --pca: only patches of the foreground, by the sign of the first component."),
}
ATLAS: Group = {
    "atlas": Option(
        None,
        "Images to search for those that activate each slot most: a folder, or any data that --data_path takes, "
        "such as scenes. Writes atlas.png, atlas.html and atlas.json.",
    ),
    "atlas_images": Option(8, "Images per slot.", positive_int),
    "atlas_max_images": Option(2000, "Largest number of images to search, a random subset.", positive_int),
}


def attention_parser() -> Parser:
    """The options of `visualize_attention.py`."""
    groups = {"images": DRAWN_IMAGES, "pictures": PICTURES, "slot atlas": ATLAS}
    return map_parser(groups, {"image_encoder": IMAGE_ENCODER})
