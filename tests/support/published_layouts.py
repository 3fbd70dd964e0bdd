"""Small copies of all compositional benchmarks in their published layouts, in one folder."""

import json
from pathlib import Path

import numpy as np
from clip_fakes import paint
from compositional_files import (
    ATTRIBUTES,
    CONTROLLED_A,
    CONTROLLED_B,
    RELATIONS,
    captions,
    controlled_entries,
    relation_entries,
    write_json,
)

from dino_sparo.__main__ import run as run_command
from dino_sparo.data.scenes.images import Scenes
from studies.drawn_sets import draw_sets


def older_sets(root: Path) -> Path:
    """The sets that `draw_sets` lacks, small, some below other folders; and images that several share."""
    colours = ("red", "green", "blue")
    rng = np.random.default_rng(0)
    for folder in ("coco/val2017", "aro/images", "wino/images", "vl/vg/VG_100K", "pug", "vg_images"):
        for number, colour in enumerate(colours):
            names = {"coco/val2017": f"{number:012d}.jpg", "vg_images": f"{number}.jpg"}
            paint(root / folder / names.get(folder, f"{colour}.png"), colour)
    entries = {
        str(number): {"filename": f"{number:012d}.jpg", "caption": captions(colour, 2)[0],
                      "negative_caption": captions(colour, 2)[1]}
        for number, colour in enumerate(colours)
    }  # fmt: skip
    for split in ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att"):
        write_json(root / "sugar-crepe" / "data" / f"{split}.json", entries)
    names = ("image_0", "image_1", "caption_0", "caption_1", "collapsed_tag")
    line = dict(zip(names, ("red", "green", "a red thing", "a green thing", "Object"), strict=True))
    (root / "wino" / "examples.jsonl").write_text(json.dumps(line) + "\n")
    write_json(root / "aro" / "visual_genome_relation.json", relation_entries(rng, RELATIONS, 9))
    write_json(root / "aro" / "visual_genome_attribution.json", relation_entries(rng, ATTRIBUTES, 30))
    for name in ("coco", "flickr"):
        options = [f"red thing {number}" for number in range(5)]
        order = [{"image": "val2017/000000000000.jpg", "caption_options": options}]
        write_json(root / "coco" / f"{name}_order.json", order)
    texts = {"POS": ["red thing", "no", "no"], "NEG": ["blue thing", "no"]}
    write_json(root / "vl" / "data" / "Attribute" / "vg" / "color.json", [["VG_100K/red.png", texts]])
    write_json(root / "vl" / "data" / "Relation" / "swig_action.json", [["a_1.jpg", texts]])
    for name, prepositions in (("images", CONTROLLED_A), ("clevr", CONTROLLED_B)):
        entries = controlled_entries(prepositions)
        write_json(root / "whatsup" / f"controlled_{name}_dataset.json", entries)
        for entry in entries:
            paint(root / "whatsup" / f"controlled_{name}" / Path(entry["image_path"]).with_suffix(".png").name, "red")
            entry["image_path"] = str(Path(entry["image_path"]).with_suffix(".png"))
        write_json(root / "whatsup" / f"controlled_{name}_dataset.json", entries)
    for name in ("coco", "vg"):
        for count in ("one", "two"):
            write_json(root / "whatsup" / f"{name}_qa_{count}_obj.json", [[0, "red left", "blue left"], [1, "x", "y"]])
    header = "filename,world_name,character_name,character2_name,character_texture,character2_texture,character1_pos"
    rows = [
        "red.png,Desert,Cat,Dog,Default,Default,left", "red.png,Desert,Cat,Dog,Default,Default,right",
        "blue.png,Desert,Cat,Dog,Blue,Red,bottom", "red.png,Desert,Cat,blank,Default,Default,left",
        "red.png,Desert,Cat,Cat,Default,Default,left", "green.png,Desert,Cat,Dog,Red,Blue,bottom",
        "green.png,Desert,Cat,Dog,Default,Default,bottom",
    ]  # fmt: skip
    (root / "pug" / "labels.csv").write_text("\n".join([header, *rows]) + "\n")
    run_command("scene-pairs", ["--output_dir", str(root / "scenes"), "--num_pairs", "4", "--img_size", "24"])
    split = root / "run" / "seen50" / "data"
    write_json(split / "split.json", {})
    write_json(
        split / "tests" / "single.json", {"0": {"filename": "a.png", "caption": "red", "negative_caption": "blue"}}
    )
    paint(split / "tests" / "images" / "a.png", "red")
    return root


def every_set(root: Path, num: int = 4, size: int = 24) -> Path:
    """All sets of the table, with pictures of scenes; `num` as of `draw_sets`."""
    pictures = [path for path in sorted(older_sets(root).rglob("*")) if path.suffix in (".png", ".jpg")]
    scenes = Scenes(len(pictures), size)
    for number, path in enumerate(pictures):
        scenes.read(number).save(path)
    return draw_sets(root, num, size)
