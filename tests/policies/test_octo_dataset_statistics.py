"""Statistics of one dataset out of those in a folder."""

import numpy as np
import pytest
from octo_folders import vectors

from vla_rlaif.policies.octo.dataset_statistics import statistics_for


def test_pain_6_statistics_by_dataset_or_without_a_name():
    """#113: a pretrained folder has them by dataset, a fine-tuned one has no names."""
    action, proprio = vectors(7), vectors(8)
    flat = {"action": action, "proprio": proprio, "num_transitions": np.array(5)}
    for statistics, dataset in (
        (flat, None),
        ({"bridge": flat}, None),
        ({"bridge": flat, "fractal": {"action": vectors(6)}}, "bridge"),
        ({"action": flat}, "action"),
    ):
        found = statistics_for(statistics, dataset, action_dim=7)
        assert found.keys() == {"action", "proprio"}
        assert found["action"]["mean"] is action["mean"] and found["proprio"]["std"] is proprio["std"]


def test_pain_6_statistics_that_fit_none_or_several():
    many = {"bridge_dataset": {"action": vectors(7)}, "fractal": {"action": vectors(7)}}
    with pytest.raises(ValueError, match=r"2 datasets; say whose statistics to use: bridge_dataset, fractal"):
        statistics_for(many, None)
    with pytest.raises(ValueError, match=r"no dataset 'bridge'. Did you mean 'bridge_dataset'\? It knows bridge_"):
        statistics_for(many, "bridge")
    with pytest.raises(ValueError, match=r"no dataset 'xyz'. It knows bridge_dataset, fractal"):
        statistics_for(many, "xyz")
    with pytest.raises(ValueError, match=r"of one dataset without a name.*not 'bridge'"):
        statistics_for({"action": vectors(7)}, "bridge")
    with pytest.raises(ValueError, match="no statistics"):
        statistics_for({}, None)
    with pytest.raises(ValueError, match="no 'action'"):
        statistics_for({"bridge": {"proprio": vectors(7)}}, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": np.array(0.0, np.float32)}, "one number per dimension"),  # #161
        ({"std": np.ones((1, 7), np.float32)}, "one number per dimension"),
        ({"std": np.ones(6, np.float32)}, r"one number per dimension .*'std': \(6,\)"),
        ({"mean": np.full(7, np.nan, np.float32)}, "action/mean is .*finite"),
        ({"mask": np.ones(7, np.float32)}, "booleans in mask only"),
    ],
)
def test_statistics_of_wrong_dimension_or_kind(change, message):
    with pytest.raises(ValueError, match=message):
        statistics_for({"action": vectors(7) | change}, None)


def test_statistics_of_other_dimensions_than_the_model():
    assert statistics_for({"action": vectors(6)}, None, action_dim=7)["action"]["mean"].shape == (6,)
    with pytest.raises(ValueError, match="actions have 8 dimensions, but the model's have 7"):
        statistics_for({"action": vectors(8)}, None, action_dim=7)
    with pytest.raises(ValueError, match="has min; wanted mean and std, or p01 and p99"):
        statistics_for({"action": {"min": np.zeros(7, np.float32)}}, None)
