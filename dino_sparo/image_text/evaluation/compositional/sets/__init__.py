"""The benchmarks by name. A new one is a file here and a line in the table."""

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.sets import (
    aro,
    pug_spar,
    scene_pairs,
    sugarcrepe,
    vl_checklist,
    whatsup,
    winoground,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for file in (sugarcrepe, winoground, aro, vl_checklist, whatsup, pug_spar, scene_pairs)
    for benchmark in file.BENCHMARKS
}
