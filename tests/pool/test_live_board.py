"""Claims on GPUs: given once, kept until everything is gone, refused to schedulers that were replaced."""

from pathlib import Path

import pytest

from vla_rlaif.pool.board import Board
from vla_rlaif.pool.replica import Claim
from vla_rlaif.pool.state import Gpu


def claim(name: str, *slots: int) -> Claim:
    return Claim(replica=name, role="serve", gpus=tuple(Gpu("n0", slot) for slot in slots))


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "audit.jsonl")


def names(board: Board) -> list[str]:
    return [entry.claim.replica for entry in board.entries(0)]


def test_a_claim_is_given_once_and_wiped_at_the_end(board: Board) -> None:
    assert board.claim(1, "acquire:a", claim("a", 0, 1)) == "begun"
    assert board.claim(1, "acquire:a", claim("a", 0, 1)) == "known"
    board.created("a")
    [entry] = board.entries(1)
    assert entry.is_created and entry.leaving_s is None and not entry.kill
    assert board.release(1, "release:a", "a", kill=False) == "begun"
    assert board.release(1, "release:a", "a", kill=False) == "known"
    assert board.release(1, "kill:a", "a", kill=True) == "begun"  # it did not go in time
    [entry] = board.entries(1)
    assert entry.kill and entry.leaving_s is not None
    assert board.wipe(1, "a") == "begun"
    assert board.wipe(1, "a") == "known"
    assert names(board) == []


def test_gpus_that_are_taken_cannot_be_claimed(board: Board) -> None:
    board.claim(1, "acquire:a", claim("a", 0, 1))
    with pytest.raises(AssertionError, match="b claims GPUs that are not free"):
        board.claim(1, "acquire:b", claim("b", 1, 2))


def test_every_claim_makes_names_of_its_gpus_new(board: Board) -> None:
    board.claim(1, "acquire:a-0", claim("a-0", 0))
    board.wipe(1, "a-0")
    assert board.generation() == {Gpu("n0", 0): 1}
    board.claim(1, "acquire:a-1", claim("a-1", 0, 1))
    assert board.generation() == {Gpu("n0", 0): 2, Gpu("n0", 1): 2}


def test_an_older_scheduler_is_refused_after_a_newer_one_looked(board: Board) -> None:
    board.entries(2)
    assert board.claim(1, "acquire:a", claim("a", 0)) == "fenced"
    assert board.release(1, "release:a", "a", kill=False) == "fenced"
    assert board.wipe(1, "a") == "fenced"
    assert board.claim(2, "acquire:a", claim("a", 0)) == "begun"


def test_a_board_that_is_made_anew_adopts_what_is_there(board: Board) -> None:
    board.adopt(claim("serve-n0-0-7", 0))
    board.adopt(claim("serve-n0-0-7", 0))
    [entry] = board.entries(1)
    assert entry.is_created
    assert board.generation() == {Gpu("n0", 0): 8}  # behind what the name tells
