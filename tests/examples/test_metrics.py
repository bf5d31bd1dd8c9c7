import numpy as np
import pytest

from flightedl.errors import UsageError
from flightedl.examples.metrics import area_under_curve, log_loss


@pytest.fixture(scope="module")
def sklearn_metrics():
    """Loaded by the one process that needs it: it takes a second."""
    import sklearn.metrics

    return sklearn.metrics


@pytest.mark.parametrize("distinct", [2, 7, 1000])
def test_area_under_curve_agrees_with_sklearn_with_ties_too(sklearn_metrics, distinct):
    random = np.random.default_rng(distinct)
    labels = random.integers(0, 2, 500)
    scores = (random.integers(0, distinct, 500) / distinct).astype(np.float32)
    assert area_under_curve(labels, scores) == pytest.approx(sklearn_metrics.roc_auc_score(labels, scores), abs=1e-12)


def test_area_under_curve_at_its_ends():
    labels = np.array([0, 0, 1, 1])
    assert area_under_curve(labels, np.array([1, 2, 3, 4])) == 1
    assert area_under_curve(labels, np.array([4, 3, 2, 1])) == 0
    assert area_under_curve(labels, np.full(4, 0.3)) == 0.5


@pytest.mark.parametrize("label", [0, 1])
def test_area_under_curve_needs_both_labels(label):
    with pytest.raises(UsageError, match="both labels"):
        area_under_curve(np.full(3, label), np.arange(3))


def test_log_loss_agrees_with_sklearn(sklearn_metrics):
    random = np.random.default_rng(0)
    labels, probabilities = random.integers(0, 2, 500), random.random(500)
    expected = sklearn_metrics.log_loss(labels, probabilities)
    assert log_loss(labels, probabilities) == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_a_certain_mistake_is_finite():
    assert log_loss(np.array([1]), np.array([0.0], np.float32)) == pytest.approx(-np.log(1e-7))


def test_log_loss_of_nothing_is_refused():
    with pytest.raises(UsageError, match="at least one record"):
        log_loss(np.array([]), np.array([]))
