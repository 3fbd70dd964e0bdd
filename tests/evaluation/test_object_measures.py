"""Measures of maps against objects: hand-computed cases, loops over pixels, scikit-learn's values; slots matched."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from dino_sparo.evaluation.objects.measures import (
    MEASURES,
    PatchObjects,
    assign_patches,
    bootstrap_interval,
    count_patches,
    foreground_ari,
    grid_bounds,
    map_jaccards,
    map_subsets,
    move_maps,
    score_maps,
    score_subsets,
    summarize,
)
from dino_sparo.evaluation.objects.slots import (
    class_lift,
    map_redundancy,
    match_held_out,
    mean_best_lift,
    shuffled_lift,
    slot_similarity,
    value_redundancy,
    without_rare,
)

P = 4
ROWS, COLUMNS = 3, 5
SHARE = 0.6


def objects_of(*masks: np.ndarray, void: np.ndarray | None = None, patch_size: int = P) -> PatchObjects:
    stack = np.stack(masks)
    return count_patches(stack, np.zeros(stack.shape[1:], dtype=bool) if void is None else void, patch_size)


def box(top: int, left: int, bottom: int, right: int, height: int = ROWS * P, width: int = COLUMNS * P) -> np.ndarray:
    mask = np.zeros((height, width), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def patch_map(*cells: tuple[int, int], rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    heatmap = np.zeros((rows, columns), dtype=np.float32)
    for cell in cells:
        heatmap[cell] = 1
    return heatmap


def upsampled(regions: np.ndarray, patch_size: int = P) -> np.ndarray:
    return regions.repeat(patch_size, axis=-2).repeat(patch_size, axis=-1)


# Hand-computed cases.


def test_maps_equal_to_the_objects_get_all_points() -> None:
    objects = objects_of(box(0, 0, 8, 8), box(4, 12, 12, 20))
    maps = np.stack([patch_map((0, 0), (0, 1), (1, 0), (1, 1)), patch_map((1, 3), (1, 4), (2, 3), (2, 4))])
    rest = 1 - maps.sum(axis=0, keepdims=True)
    scores = score_maps(np.concatenate([maps, rest]), objects, share=1.0)
    # Of three maps and two objects, two of the six pairs are hits; at best every map points at one of two.
    assert scores == {"jaccard": 1.0, "mbo": 1.0, "fg_ari": 1.0, "pointing": 1.0, "pointing_one_map": 2 / 6}
    bounds = {"jaccard": 1.0, "mbo": 1.0, "fg_ari": float("nan"), "pointing": 1.0, "pointing_one_map": 1 / 2}
    assert grid_bounds(objects) == pytest.approx(bounds, nan_ok=True)


def test_one_map_points_at_all_objects_that_share_the_middle_of_its_patch() -> None:
    together, elsewhere = box(0, 0, 8, 8), box(8, 12, 12, 16)
    objects = objects_of(together, together, elsewhere)
    maps = np.stack([patch_map((1, 1)), patch_map((0, 4)), patch_map((0, 0))])
    assert score_maps(maps, objects, SHARE)["pointing_one_map"] == pytest.approx(4 / 9)
    assert grid_bounds(objects)["pointing_one_map"] == pytest.approx(2 / 3)


def test_a_grid_of_one_patch() -> None:
    objects = objects_of(box(0, 0, 2, 4, height=4, width=4))
    scores = score_maps(np.ones((1, 1, 1), dtype=np.float32), objects, SHARE)
    assert scores["jaccard"] == scores["mbo"] == pytest.approx(8 / 16)
    assert scores["pointing"] == 0  # the middle pixel (2, 2) lies below it
    assert np.isnan(scores["fg_ari"])


def test_an_object_smaller_than_a_patch_is_bounded_by_its_share_of_the_patch() -> None:
    objects = objects_of(box(5, 9, 6, 10))
    bounds = grid_bounds(objects)
    assert bounds["jaccard"] == pytest.approx(1 / 16)
    assert bounds["pointing"] == 0  # it does not hold the middle of its patch, so no map can point at it
    assert score_maps(patch_map((1, 2))[None], objects, SHARE)["jaccard"] == pytest.approx(1 / 16)


def test_no_bound_is_given_for_the_ari_where_the_owner_of_most_pixels_is_not_the_best() -> None:
    ids = np.array([[0, 3, 0, 2, 0, 1, 1, 1], [1, 0, 0, 0, 0, 2, 2, 2]])
    objects = objects_of(*(ids == number for number in (1, 2, 3)), patch_size=2)

    def ari_of(*patches: int) -> float:
        return foreground_ari(np.array(patches)[None, None] == np.arange(3)[:, None, None], objects)

    owners = objects.alone.argmax(axis=0).ravel()
    assert ari_of(*owners) < 0 < ari_of(0, 1, 1, 1)
    assert np.isnan(grid_bounds(objects)["fg_ari"])


def test_the_ari_of_a_single_object_is_left_out_of_the_mean() -> None:
    one, two = objects_of(box(0, 0, 8, 8)), objects_of(box(0, 0, 4, 8), box(4, 0, 8, 8))
    maps = np.stack([patch_map((0, 0), (0, 1)), patch_map((1, 0), (1, 1))])
    assert np.isnan(score_maps(maps, one, SHARE)["fg_ari"])
    assert score_maps(maps, two, SHARE)["fg_ari"] == 1.0
    summary = summarize(np.array([np.nan, 1.0, 0.5]), seed=0)
    assert (summary["mean"], summary["num_images"]) == (0.75, 2)
    assert summarize(np.array([np.nan]), seed=0) == {"mean": None, "interval_95": None, "num_images": 0}


def test_an_object_under_another_one_leaves_nothing_to_separate() -> None:
    """No pixel is the covered object's alone: the ARI is unknown, not 0."""
    outer, inner = box(0, 0, 8, 8), box(2, 2, 6, 6)
    scores = score_maps(np.stack([patch_map((0, 0)), patch_map((1, 1))]), objects_of(outer, inner), SHARE)
    assert np.isnan(scores["fg_ari"])
    beside = score_maps(np.stack([patch_map((0, 0)), patch_map((1, 1))]), objects_of(outer, box(4, 4, 10, 10)), SHARE)
    assert not np.isnan(beside["fg_ari"])


def test_an_image_without_objects_has_an_empty_table() -> None:
    none = count_patches(np.zeros((0, ROWS * P, COLUMNS * P), dtype=bool), np.zeros((ROWS * P, COLUMNS * P), bool), P)
    assert map_jaccards(np.ones((7, ROWS, COLUMNS), dtype=np.float32), none, SHARE).shape == (0, 7)
    assert np.isnan(foreground_ari(np.ones((1, ROWS, COLUMNS), dtype=bool), none))


def test_a_map_that_attends_little_to_patches_keeps_its_share_of_them() -> None:
    objects = objects_of(box(0, 0, 4, 8), box(8, 0, 12, 8))
    maps = np.stack([patch_map((0, 0), (0, 1)), 1e-3 * patch_map((2, 0), (2, 1)) + 1e-5])
    assert score_maps(maps, objects, SHARE)["fg_ari"] == 1.0
    empty = np.zeros((1, ROWS, COLUMNS), dtype=np.float32)  # a slot that attends to the class token alone
    assert score_maps(empty, objects, SHARE)["jaccard"] == 0


def test_subsets_of_one_map_score_the_mean_over_the_chosen_single_maps() -> None:
    maps, masks, void = random_case(2)
    objects = objects_of(*masks, void=void)
    subsets = map_subsets(7, 1, seed=3)
    assert len(set(subsets.ravel().tolist())) == 5
    single = [score_maps(maps[[number]], objects, SHARE) for number in subsets.ravel()]
    expected = {name: np.mean([scores[name] for scores in single]) for name in MEASURES}
    assert score_subsets(maps, objects, SHARE, subsets) == pytest.approx(expected)


def test_subsets_of_maps_are_different_and_always_the_same() -> None:
    subsets = map_subsets(11, 3, seed=0)
    assert subsets.shape == (5, 3)
    assert len({tuple(subset) for subset in subsets.tolist()}) == 5
    assert all(len(set(subset)) == 3 for subset in subsets.tolist())
    np.testing.assert_array_equal(map_subsets(11, 3, seed=0), subsets)
    assert not np.array_equal(map_subsets(11, 3, seed=1), subsets)
    assert not np.array_equal(map_subsets(11, 3, seed=[0, 1]), map_subsets(11, 3, seed=[0, 2]))  # two images
    assert map_subsets(3, 2, seed=0).tolist() == [[0, 1], [0, 2], [1, 2]]  # there are no more
    assert map_subsets(7, None, seed=0).tolist() == map_subsets(7, 7, seed=0).tolist() == [list(range(7))]


# Against loops over pixels, and scikit-learn.


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maps (7, h, w), overlapping masks (3, H, W) and void pixels, at random."""
    rng = np.random.default_rng(seed)
    maps = rng.random((7, ROWS, COLUMNS)).astype(np.float32) ** 3
    masks = np.stack([box(*sorted(rng.integers(0, 11, 2)), 12, 20) for _ in range(3)])
    masks &= rng.random(masks.shape) < 0.8
    masks[:, 6, 10] = True
    return maps, masks, rng.random(masks.shape[1:]) < 0.1


def kept_by_the_reference(heatmap: np.ndarray, share: float) -> np.ndarray:
    """The patches of an ascending order whose running sum exceeds what is to be left out."""
    mass = heatmap.ravel().astype(float) / heatmap.sum()
    order = sorted(range(mass.size), key=lambda patch: mass[patch])
    kept, total = np.zeros(mass.size, dtype=bool), 0.0
    for patch in order:
        total += mass[patch]
        kept[patch] = total > 1 - share
    return kept.reshape(heatmap.shape)


@pytest.mark.parametrize("seed", range(3))
def test_jaccards_equal_a_loop_over_pixels(seed: int) -> None:
    maps, masks, void = random_case(seed)
    objects = objects_of(*masks, void=void)
    table = map_jaccards(maps, objects, SHARE)
    segments = upsampled(assign_patches(maps))
    best, overlaps, hits = [], [], []
    for number, mask in enumerate(masks):
        own = []
        for slot, heatmap in enumerate(maps):
            region = upsampled(kept_by_the_reference(heatmap, SHARE))
            both = (region & mask & ~void).sum()
            own.append(both / ((region | mask) & ~void).sum())
            assert table[number, slot] == pytest.approx(own[-1])
        best.append(max(own))
        overlaps.append(max((s & mask & ~void).sum() / ((s | mask) & ~void).sum() for s in segments))
        peaks = [divmod(int(heatmap.argmax()), COLUMNS) for heatmap in maps]
        hits.append(any((mask & ~void)[row * P + 2, column * P + 2] for row, column in peaks))
    scores = score_maps(maps, objects, SHARE)
    assert (scores["jaccard"], scores["mbo"]) == pytest.approx((np.mean(best), np.mean(overlaps)))
    assert scores["pointing"] == np.mean(hits)
    single = [(mask & ~void)[row * P + 2, column * P + 2] for mask in masks for row, column in peaks]
    assert scores["pointing_one_map"] == pytest.approx(np.mean(single))


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_the_jaccard_index_equals_a_search_over_all_sets_of_patches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask, void = rng.random((2 * P, 3 * P)) < 0.4, rng.random((2 * P, 3 * P)) < 0.2
    objects = objects_of(mask, void=void)
    sets = np.array(list(itertools.product([False, True], repeat=6)))[1:].reshape(-1, 2, 3)
    regions = upsampled(sets)
    found = ((region & mask & ~void).sum() / ((region | mask) & ~void).sum() for region in regions)
    assert grid_bounds(objects)["jaccard"] == pytest.approx(max(found))


def test_the_ari_equals_scikit_learns() -> None:
    content = json.loads((Path(__file__).parents[1] / "reference" / "ari.json").read_text())
    for case in content["cases"]:
        true, predicted = np.array(case["true"]), np.array(case["predicted"])
        masks = true[None, None] == np.unique(true)[:, None, None]
        segments = predicted[None, None] == np.arange(predicted.max() + 1)[:, None, None]
        objects = objects_of(*masks, patch_size=1)
        assert foreground_ari(segments, objects) == pytest.approx(case["score"], abs=1e-12), case


def test_the_ari_counts_pairs_of_pixels_that_have_exactly_one_object() -> None:
    maps, masks, void = random_case(5)
    alone = (masks.sum(axis=0) == 1) & ~void
    segments = assign_patches(maps)
    expected = adjusted_rand_score(masks.argmax(axis=0)[alone], upsampled(segments).argmax(axis=0)[alone])
    assert foreground_ari(segments, objects_of(*masks, void=void)) == pytest.approx(expected)


def test_moved_maps_keep_their_form_and_their_likeness_and_lose_their_place() -> None:
    maps, _, _ = random_case(0)
    places = set()
    for seed in range(200):
        moved = move_maps(maps, np.random.default_rng(seed))
        row, column = np.argwhere(moved[0] == maps[0, 0, 0])[0]
        np.testing.assert_array_equal(moved, np.roll(maps, (row, column), axis=(1, 2)))  # all maps by the same
        places.add((int(row), int(column)))
    assert places == {(row, column) for row in range(ROWS) for column in range(COLUMNS)} - {(0, 0)}
    one = np.ones((2, 1, 1), dtype=np.float32)
    np.testing.assert_array_equal(move_maps(one, np.random.default_rng(0)), one)


def test_the_interval_covers_the_mean_in_most_cases() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        low, high = bootstrap_interval(rng.normal(0.3, 0.1, size=60), seed, draws=200)
        covered += low <= 0.3 <= high
    assert 88 <= covered <= 99
    assert bootstrap_interval(np.full(5, 0.25), seed=0) == (0.25, 0.25)


# Single maps and slots.


def test_a_map_that_finds_one_class_alone_has_its_lift_there() -> None:
    # Map 0 finds class 0 by 0.8, map 1 class 2 by 0.6; class 1 has no objects.
    classes = np.array([0, 0, 2, 2, -1])
    jaccards = np.array([[0.8, 0.0], [0.8, 0.0], [0.0, 0.6], [0.0, 0.6], [1.0, 0.0]])
    lift = class_lift(jaccards, classes, 3)
    # Excess over the mean of both maps: 0.4 and -0.3 for map 0, whose mean over classes is 0.05.
    np.testing.assert_allclose(lift[0], [0.35, np.nan, -0.35])
    np.testing.assert_allclose(lift[1], [-0.35, np.nan, 0.35])
    assert mean_best_lift(lift) == pytest.approx(0.35)


def test_selectivity_by_chance_is_far_below_that_of_selective_maps() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(5, size=300)
    noise = 0.1 * rng.random((300, 5))
    selective = noise + 0.5 * (classes[:, None] == np.arange(5))
    of_images = np.split(classes, 150)
    assert mean_best_lift(class_lift(selective, classes, 5)) > 5 * max(shuffled_lift(selective, of_images, 5, seed=0))
    assert mean_best_lift(class_lift(noise, classes, 5)) < 1.5 * max(shuffled_lift(noise, of_images, 5, seed=0))


def test_maps_that_follow_the_image_and_no_class_are_no_more_selective_than_by_chance() -> None:
    """The bug: classes were shuffled object by object, so that objects of one image, which go together, did not."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, size=300)
    of_images = [np.full(count, rng.integers(12)) for count in counts]
    jaccards = np.concatenate([rng.random((1, 6)) + 0.3 * rng.random((count, 6)) for count in counts])
    own = mean_best_lift(class_lift(jaccards, np.concatenate(of_images), 12))
    assert own == pytest.approx(np.mean(shuffled_lift(jaccards, of_images, 12, seed=0)), rel=0.25)


def test_rare_classes_are_unknown() -> None:
    classes, num_rare = without_rare([np.array([0, 0, 2]), np.array([2, -1]), np.array([], dtype=int)], 4, 2)
    assert [own.tolist() for own in classes] == [[0, 0, 2], [2, -1], []]
    classes, num_rare = without_rare([np.array([0, 0, 2]), np.array([1, -1])], 4, 2)
    assert ([own.tolist() for own in classes], num_rare) == ([[0, 0, -1], [-1, -1]], 2)
    assert without_rare([np.array([-1, -1])], 0, 2)[1] == 0


def test_redundancy_is_one_for_copies_and_zero_for_disjoint_maps_and_orthogonal_values() -> None:
    maps = np.stack([patch_map((0, 0)), patch_map((0, 1)), patch_map((2, 2))])[None]
    assert map_redundancy(maps) == 0
    assert map_redundancy(np.repeat(maps[:, :1], 3, axis=1)) == pytest.approx(1)
    slots = np.eye(3, 5, dtype=np.float32)[None]
    assert value_redundancy(slots) == 0
    assert value_redundancy(np.concatenate([slots[:, :1], -2 * slots[:, :1]], axis=1)) == pytest.approx(1)
    assert np.isnan(value_redundancy(slots[:, :1]))


def test_similarity_is_the_squared_correlation_for_slots_of_width_one() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(50, 3, 1)), rng.normal(size=(50, 4, 1))
    second[:, 2] = 1.0  # a slot that always has one value
    similarity = slot_similarity(first, second)
    for i, j in itertools.product(range(3), (0, 1, 3)):
        assert similarity[i, j] == pytest.approx(np.corrcoef(first[:, i, 0], second[:, j, 0])[0, 1] ** 2)
    np.testing.assert_array_equal(similarity[:, 2], 0)


def test_slots_that_were_rotated_and_reordered_are_matched_to_themselves() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(80, 6, 4))
    order = rng.permutation(6)
    turns = [np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(6)]
    second = np.stack([3 * first[:, slot] @ turn + 7 for slot, turn in zip(order, turns, strict=True)], axis=1)
    first, second = np.repeat(first, 2, axis=0), np.repeat(second, 2, axis=0)
    slots, partners, similarity = match_held_out(first, second)
    np.testing.assert_array_equal(order[partners], slots)
    np.testing.assert_allclose(similarity[slots, partners], 1)
    # With fewer slots on either side the matching is the same one, cut.
    slots, partners, _ = match_held_out(first, second[:, :4])
    np.testing.assert_array_equal(order[partners], slots)
    assert len(slots) == 4
    assert match_held_out(first[:, :2], second)[0].tolist() == [0, 1]
