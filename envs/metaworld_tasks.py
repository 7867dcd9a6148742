"""Meta-World's tasks and what to say for each. Standard library only, so that names are checked without the suite."""

import difflib
from collections.abc import Sequence

MAX_STEPS = 500  # env steps of an episode, at most
MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
SENTENCES = {
    "assembly-v3": "pick up the ring and put it onto the peg",
    "basketball-v3": "put the ball through the hoop",
    "bin-picking-v3": "move the puck from the left bin to the right bin",
    "box-close-v3": "pick up the lid and close the box with it",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "pick up the hammer and drive the nail in",
    "hand-insert-v3": "put the gripper into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "put the peg into the hole in the side of the box",
    "peg-unplug-side-v3": "pull the peg out of the box",
    "pick-out-of-hole-v3": "lift the puck out of the hole",
    "pick-place-v3": "pick up the puck and bring it to the goal",
    "pick-place-wall-v3": "pick up the puck and bring it over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet to the side",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet from the side",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the gripper to the goal",
    "reach-wall-v3": "move the gripper around the wall to the goal",
    "shelf-place-v3": "pick up the block and put it onto the shelf",
    "soccer-v3": "push the ball into the goal",
    "stick-pull-v3": "pull the bottle with the stick",
    "stick-push-v3": "push the bottle with the stick",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}
BENCHMARKS = {"MT10": MT10, "MT50": tuple(sorted(SENTENCES))}


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The tasks that ``names`` (of tasks or benchmarks) stand for, each once.

    Raises ValueError for an unknown name, with the nearest known ones.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in SENTENCES and name not in BENCHMARKS:
            near = difflib.get_close_matches(name, [*SENTENCES, *BENCHMARKS], n=3, cutoff=0.4)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join([*BENCHMARKS, *SENTENCES])}."
            )
            raise ValueError(f"Meta-World has no task {name!r}; {hint}")
        found |= dict.fromkeys(BENCHMARKS.get(name, (name,)))
    return tuple(found)
