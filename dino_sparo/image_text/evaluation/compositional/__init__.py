"""Benchmarks of compositional understanding -> one table.

benchmark.py     what a benchmark is: files, a reader into questions, averages, how its own code treats ties
registry.py      the list of them
aro.py           ARO: VG-Relation, VG-Attribution, COCO-Order, Flickr-Order
word_order.py    captions -> ARO's shuffled ones, `dino-sparo order-captions`
vl_checklist.py  VL-CheckList
whatsup.py       What'sUp: controlled images, COCO-spatial, GQA-spatial
pug_spar.py      PUG: SPAR
pair_files.py    SugarCrepe's format: its own files, the built-in scenes, `oc-splits`; Winoground
finding.py       a folder -> the benchmarks below it, and what they lack
asking.py        questions -> answers, some images at a time
metrics.py       answers -> accuracies with intervals
failures.py      answers -> the clearest errors
failure_pages.py errors -> a page and sheets, with what the model looked at
papers.py        numbers that papers print
command.py       `dino-sparo compositional`
"""
