"""Benchmarks of speed: each script first checks that results are equal, then measures.

    python -m benchmarks --reference dino --json report.json      # all of them, one report
    python -m benchmarks.readout --reference dino                 # one

`--reference` is a checkout of facebookresearch/dino; without it each script measures this project alone. Ours and the
reference run in turns within one process, and what counts is the ratio within a round, so that a machine that is busy
for a while slows both. All but start.py have `measure(args, reference) -> report.Section` and `main(argv)`.

    timing.py            variants in turns -> seconds, ratios, peak memory; what machine this is
    report.py            options, tables, equality checks and bars -> Markdown and JSON
    reference.py         a checkout -> its modules
    readout.py           SPARO re-associated against the paper's listing
    backbone.py          class token alone in the last block, positions by a matrix
    train_step.py        one training step, total and by part
    clip_step.py         one step of CLIP and its input, against OpenCLIP
    binding.py           OC-CLIP's scores of all pairs against the paper's listing
    input_pipeline.py    decode and crop, on CPU cores and on the device
    knn.py               k-NN classification
    linear.py            linear probes, and what comes before any evaluation: features of images
    scaling.py           several processes measured, many GPUs on paper
    start.py             how long many processes take to open shards, and in how much memory
    gpu/                 all that needs a GPU, in parts: `make gpu`
"""
