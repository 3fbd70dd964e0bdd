"""All measurements and checks that need a GPU, by one command, in parts that can be rerun.

    python -m benchmarks.gpu                                    # `make gpu`: an hour on one GPU
    python -m benchmarks.gpu --reference ../dino                # the speeds next to the reference's
    python -m benchmarks.gpu --minutes 12                       # the first parts that are not done
    python -m benchmarks.gpu --part losses profile               # these parts
    python -m benchmarks.gpu --device cpu --short               # do the parts work? No number of it counts

Every part is a script in a separate process, `python -m benchmarks.gpu.NAME` or one of the benchmarks. Its checks,
tables and bars go to output/gpu/PART.json and .md, what it says to PART.log. Parts that are done are skipped.

    __main__.py       the parts, one after the other
    page.py           their reports -> docs/gpu.md and README.md
    README.md         all tables of the last runs
    objectives.py     options -> an objective and batches on a device
    steps.py          losses by device, precision and compilation; no synchronisation within a step
    one_process.py    DDP in a group of one: NCCL, static graph, accumulation, checkpointing
    recorded.py       recorded and unrecorded steps give equal weights
    batches.py        time, memory and waiting at several batch sizes
    runs.py           gpu tests, kill and resume, twice 300 steps of the recipe for ImageNet
    search.py         k-NN at ImageNet's size
    profile.py        where a step's time goes, and how far it is from the floor
"""
