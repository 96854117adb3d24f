"""Data codes, and files of lengths."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.workload.codes import (
    MAX_TEXT_TOKENS,
    DataCode,
    parse_data_codes,
    rank_lengths,
    read_lengths,
    sample_lengths,
    seq_lens,
)

MIXED = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"


def test_visual_tokens_of_a_data_code() -> None:
    of_code = {"i256f1s0": 256, "i512f1s0": 1024, "i1024f1s0": 4096, "i2048f1s0": 16384}
    of_code |= {"i256f4s0": 256 * 4, "i256f85s1": 256 * 25, "i512f85s1": 1024 * 25}
    of_code |= {"i256f3s1": 256, "i256f1s1": 256, "i271f1s0": 256, "i16f1s0": 1}
    for code, tokens in of_code.items():
        assert parse_data_codes(f"g1b1{code}")[0].image_tokens == tokens


def test_latent_frames_are_those_of_the_printed_formula() -> None:
    for num_frames in range(1, 2000):
        for compressed, latent in ((True, max(int(num_frames / 3.4), 1)), (False, num_frames)):
            assert DataCode(1, 1, 16, num_frames, compressed).latent_frames == latent


NUMBERS = st.integers(1, 999), st.integers(0, 999), st.integers(16, 9999), st.integers(1, 999)


@given(st.builds(DataCode, *NUMBERS, st.booleans()))
def test_a_code_survives_printing(code: DataCode) -> None:
    assert parse_data_codes(str(code)) == (code,)


def test_drawn_lengths_are_in_range_and_share_the_factor_of_their_rank() -> None:
    codes = parse_data_codes(MIXED)
    shapes = sample_lengths(codes, seed=1, step=7)
    nominal = [256] * 16 + [1024] * 4 + [4096] * 4 + [16384] * 8
    assert [len(rank) for rank in shapes] == [4] * 16 + [5] * 8 + [1] * 8
    for samples, tokens in zip(shapes, nominal, strict=True):
        assert len({sample.image_tokens for sample in samples}) == 1
        assert 0.96 * tokens - 0.5 <= samples[0].image_tokens <= 1.04 * tokens + 0.5
        assert all(0 <= sample.text_tokens <= MAX_TEXT_TOKENS for sample in samples)
    assert seq_lens(shapes) == [[s.text_tokens + s.image_tokens for s in rank] for rank in shapes]


def test_lengths_are_a_function_of_seed_step_and_rank() -> None:
    codes = parse_data_codes(MIXED)
    first = sample_lengths(codes, seed=1, step=2)
    assert sample_lengths(codes, seed=1, step=2) == first
    assert [rank_lengths(codes, rank, seed=1, step=2) for rank in range(32)] == first
    assert sample_lengths(codes, seed=1, step=3) != first
    assert sample_lengths(codes, seed=2, step=2) != first
    assert first[0] != first[1]


def test_a_larger_world_is_replicas_with_other_samples() -> None:
    codes = parse_data_codes("g1b3i256f1s0,g1b2i512f1s0")
    one = sample_lengths(codes, seed=0, step=0)
    three = sample_lengths(codes, seed=0, step=0, world_size=6)
    assert three[:2] == one
    assert [len(rank) for rank in three] == [3, 2, 3, 2, 3, 2]
    assert [rank[0].grid_width for rank in three] == [16, 32] * 3
    assert three[2] != three[0]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("1 2 3\n\n4,5\n", [[1, 2, 3], [], [4, 5]]),
        ("# header\n1, 2 # rank 0\n  # note\n3\r\n", [[1, 2], [3]]),
        ("\ufeff0\t7", [[0, 7]]),
        ("1\n2\n\n", [[1], [2], []]),
        ("[[1, 2], [], [3]]", [[1, 2], [], [3]]),
        (" \n[1, 2, 3]", [[1, 2, 3]]),
        ("[[]]", [[]]),
        ("[]", [[]]),
    ],
)
def test_length_files(tmp_path: Path, text: str, lengths: list[list[int]]) -> None:
    path = tmp_path / "some lengths.txt"
    path.write_text(text, encoding="utf-8")
    assert read_lengths(path) == lengths


@pytest.mark.parametrize("text", ["1 2 3 4 5", "[1, 2, 3, 4, 5]", "[[1, 2, 3, 4, 5]]"])
def test_one_list_is_dealt(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path, num_ranks=2) == [[1, 3, 5], [2, 4]]
    assert read_lengths(path, num_ranks=1) == [[1, 2, 3, 4, 5]]
