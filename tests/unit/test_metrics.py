"""Metrics and losses are correct, and the same for any division of the test set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BadRequest
from paceline.registry import losses, metrics


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=30),
    st.integers(1, 4),
)
def test_auc_is_the_share_of_ordered_pairs(rows: list[tuple[int, int]], parts: int) -> None:
    scores = torch.tensor([float(s) for s, _ in rows])
    labels = torch.tensor([y for _, y in rows])
    metric = metrics.build("auc")
    total = sum(
        _state(metric, scores, labels, part) for part in torch.arange(len(rows)).tensor_split(parts)
    )
    ups, downs = scores[labels == 1], scores[labels == 0]
    if len(ups) and len(downs):
        pairs = (ups[:, None] > downs).double() + 0.5 * (ups[:, None] == downs).double()
        assert metric.value(total) == pytest.approx(float(pairs.mean()), abs=1e-12)
    else:
        assert metric.value(total) != metric.value(total)


def _state(metric, scores, labels, part):
    state = metric.start(len(scores))
    metric.update(state, part, scores[part], labels[part])
    return state


def test_auc_of_two_classes_and_of_three() -> None:
    metric = metrics.build("auc")
    state = metric.start(2)
    metric.update(
        state, torch.arange(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 0])
    )
    assert metric.value(state) == 1.0
    with pytest.raises(BadRequest, match="two classes"):
        metric.update(metric.start(1), torch.arange(1), torch.zeros(1, 3), torch.tensor([0]))


def test_accuracy_of_classes_and_of_single_logits() -> None:
    metric = metrics.build("accuracy")
    state = metric.start(4)
    metric.update(
        state, torch.arange(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    )
    metric.update(
        state, torch.arange(2, 4), torch.tensor([[2.0], [-2.0]]), torch.tensor([[1.0], [0.0]])
    )
    assert metric.value(state) == 0.75


def test_losses_are_means_over_rows() -> None:
    outputs, classes = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    for name, out, target in (
        ("cross-entropy", outputs, classes),
        ("nll", outputs.log_softmax(1), classes),
        ("mse", outputs[:, :1], outputs[:, 1]),
        ("bce", outputs[:, 0], (classes > 0).long()),
    ):
        loss = losses.build(name)
        rows = torch.stack([loss(out[i : i + 1], target[i : i + 1]) for i in range(6)])
        torch.testing.assert_close(loss(out, target), rows.mean())


def test_a_record_says_which_way_is_better(run_inproc) -> None:
    said = run_inproc(steps=2).record["result"]["metric"]
    assert (said["name"], said["higher_is_better"]) == ("accuracy", True)
    data = torch.randn(32, 4), torch.randn(32, 1)
    said = run_inproc(model=lambda: torch.nn.Linear(4, 1), data=(data, data), steps=2).record[
        "result"
    ]["metric"]
    assert (said["name"], said["higher_is_better"]) == ("mse", False)
