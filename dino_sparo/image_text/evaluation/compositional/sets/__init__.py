"""The benchmarks by name. A new benchmark is a file here and a line in the table."""

from dino_sparo.image_text.evaluation.compositional.benchmark import Benchmark
from dino_sparo.image_text.evaluation.compositional.sets import (
    aro,
    bivlc,
    cola,
    colorswap,
    hard_positives,
    mmvp_vlm,
    pug_spar,
    scene_pairs,
    spec,
    sugarcrepe,
    sugarcrepe_pp,
    valse,
    vismin,
    vl_checklist,
    whatsup,
    winoground,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for file in (
        *(sugarcrepe, sugarcrepe_pp, winoground, colorswap, cola, mmvp_vlm, bivlc, vismin, aro, hard_positives),
        *(vl_checklist, valse, whatsup, spec, pug_spar, scene_pairs),
    )
    for benchmark in file.BENCHMARKS
}
