"""The benchmarks, by name. A new one is a file with a reader and an entry here."""

from functools import partial

from dino_sparo.image_text.choices import WINOGROUND_EXAMPLES
from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark, no_means
from dino_sparo.image_text.evaluation.compositional.sets import aro, pair_files, pug_spar, vl_checklist, whatsup
from dino_sparo.image_text.evaluation.sugarcrepe import GROUPS, read_pairs
from dino_sparo.image_text.evaluation.winoground import read_examples

ARO = "https://github.com/mertyg/vision-language-models-are-bows"
WHATSUP = "https://github.com/amitakamath/whatsup_vlms"
COCO_IMAGES = "images of COCO val2017, http://images.cocodataset.org/zips/val2017.zip"
COCO_FOLDERS = ("val2017", "images", "coco/val2017", "coco/images/val2017")
CREPE_FILES = tuple(f"{split}.json" for group in GROUPS.values() for split in group)
CREPE_COUNTS = {
    **{"replace_obj": 1652, "replace_att": 788, "replace_rel": 1406},
    **{"swap_obj": 245, "swap_att": 666, "add_obj": 2062, "add_att": 692},
}

_BENCHMARKS = (
    Benchmark(
        "sugarcrepe",
        "SugarCrepe",
        CREPE_FILES,
        read_pairs,
        COCO_FOLDERS,
        f"https://github.com/RAIVNLab/sugar-crepe, {COCO_IMAGES}",
        counts=CREPE_COUNTS,
        means=pair_files.group_means,
        # The repository also has the questions before they were refined, in files of the same names.
        is_own=lambda folder: folder.name != "data_unrefined" and not pair_files.is_scene_pairs(folder),
    ),
    Benchmark(
        "winoground",
        "Winoground",
        (WINOGROUND_EXAMPLES,),
        lambda folder: read_examples(folder / WINOGROUND_EXAMPLES),
        ("images",),
        "https://huggingface.co/datasets/facebook/winoground, after its licence is accepted; unpack images.zip",
        chance={"text": 25.0, "image": 25.0, "group": 100 / 6},
        total=400,
        means=no_means,
        outcomes=pair_files.winoground_outcomes,
    ),
    *(
        Benchmark(name, title, (file,), read, ("images",), ARO, total=total, means=means)
        for name, title, file, read, total, means in (
            ("aro-relation", "ARO VG-Relation", aro.RELATIONS, aro.read_relations, 23_937, aro.relation_means),
            ("aro-attribution", "ARO VG-Attribution", aro.ATTRIBUTES, aro.read_attributes, 28_748, aro.attribute_means),
        )
    ),
    *(
        Benchmark(
            f"{name.lower()}-order",
            f"ARO {name}-Order",
            (f"{name.lower()}_order.json",),
            partial(aro.read_order, f"{name.lower()}_order.json"),
            folders,
            f"{ARO}; dino-sparo order-captions writes it from the captions",
            chance=20.0,
            total=total,
            tie_credit=1.0,
        )
        for name, folders, total in (
            ("COCO", (".", "coco", "coco/images", "images", "val2014"), 25_010),
            ("Flickr", (".", "flickr30k", "flickr30k-images", "images"), 5_000),
        )
    ),
    Benchmark(
        "vl-checklist",
        "VL-CheckList",
        tuple(vl_checklist.FILES.values()),
        vl_checklist.read,
        (".", "images"),
        "https://github.com/om-ai-lab/VL-CheckList, DATASETS.md for the images",
        counts=vl_checklist.COUNTS,
        means=vl_checklist.means,
        part_of=vl_checklist.image_set,
    ),
    *(
        Benchmark(
            f"whatsup-{letter.lower()}",
            f"What'sUp {letter}",
            (file,),
            partial(whatsup.read_controlled, file),
            (folder, "."),
            WHATSUP,
            chance=25.0,
            total=total,
            tie_credit=1.0,
            more=whatsup.pairs_and_sets,
            blind_group=lambda question: "",  # all: within a split, a preposition, every image shows the answer
        )
        for letter, file, folder, total in (
            ("A", whatsup.CONTROLLED_A, "controlled_images", 412),
            ("B", whatsup.CONTROLLED_B, "controlled_clevr", 408),
        )
    ),
    Benchmark(
        "coco-spatial",
        "COCO-spatial",
        tuple(whatsup.COCO.values()),
        partial(whatsup.read_spatial, whatsup.COCO, "{:012d}.jpg"),
        COCO_FOLDERS,
        f"{WHATSUP}, {COCO_IMAGES}",
        counts={"one object": 2247, "two objects": 440},
        tie_credit=1.0,
    ),
    Benchmark(
        "gqa-spatial",
        "GQA-spatial",
        tuple(whatsup.GQA.values()),
        partial(whatsup.read_spatial, whatsup.GQA, "{}.jpg"),
        ("vg_images", "images", "gqa/images"),
        WHATSUP,
        counts={"one object": 1160, "two objects": 291},
        tie_credit=1.0,
    ),
    Benchmark(
        "pug-spar",
        "PUG: SPAR",
        (pug_spar.LABELS,),
        pug_spar.read,
        (".",),
        "https://github.com/facebookresearch/PUG",
        tie_credit=0.5,
        is_own=pug_spar.is_labels,
    ),
    Benchmark(
        "scene-pairs",
        "scene-pairs",
        ("swap_obj.json", "swap_att.json"),
        read_pairs,
        ("images",),
        "the command scene-pairs",
        is_own=pair_files.is_scene_pairs,
    ),
    Benchmark(
        "oc-splits",
        "oc-splits",
        ("split.json",),
        lambda folder: read_pairs(folder / "tests"),
        ("tests/images",),
        "python -m studies oc-splits",
        is_own=lambda folder: (folder / "tests").is_dir(),
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _BENCHMARKS}
