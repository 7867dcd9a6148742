"""Reward functions that tests name as `rewards_for_tests:function`."""

import numpy as np


def nan_for_odd_rows(episodes):
    reward = episodes.state[:, -1, 0].astype(float)
    return np.where(np.arange(len(reward)) % 2, np.nan, reward)


def all_nan(episodes):
    return np.full(len(episodes.success), np.nan)


def constant(episodes):
    return np.ones(len(episodes.success))


def spread_in_even_groups(episodes):
    return np.where(episodes.starts.group % 2, 0.0, episodes.starts.member.astype(float))


def leftwards(episodes):
    """Metres that the gripper moved along y."""
    return (episodes.state[:, -1, 1] - episodes.state[:, 0, 1]).astype(float)


def raises(episodes):
    raise ZeroDivisionError("the reward is broken")


def share_of_group(episodes):
    """Of what the members of the episode's group have together."""
    group, truth = episodes.starts.group, episodes.truth
    return truth / np.array([np.abs(truth[group == g]).sum() for g in group])
