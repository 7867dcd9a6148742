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


def always_the_first(episodes, pairs):
    return np.ones(len(pairs))


def by_the_last_state(episodes, pairs):
    """A labeller: how many more of the last state's second number; a skip where its third is negative."""
    better = 0.5 + 0.5 * np.clip(episodes.state[pairs[:, 0], -1, 1] - episodes.state[pairs[:, 1], -1, 1], -1, 1)
    return np.where((episodes.state[pairs, -1, 2] < 0).any(axis=1), np.nan, better)
