import pickle
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import errors, types
from kvpool.alloc import block_ids
from kvpool.types import DISK, DRAM, HBM, MIXED, KVLayout, Medium, RawLayout


def address(instance=0, medium=1, generation=1, block=0):
    return instance << 50 | medium << 47 | generation << 24 | block


parts = st.tuples(
    st.integers(0, 2**14 - 1), st.sampled_from(Medium), st.integers(0, 2**23 - 1), st.integers(0, 2**24 - 1)
)


# ---- layouts


def test_a_layout_counts_its_bytes():
    layout = KVLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
    assert layout.block_bytes == 2 * 2**20
    assert layout.token_bytes == 128 * 2**10
    assert layout.piece_bytes == (32 * 2**10,) * 64
    assert layout.segment_bytes == (2 * 2**20,)
    assert layout.shape == (32, 2, 8, 16, 128)
    assert replace(layout, dims="NHD").shape == (32, 2, 16, 8, 128)


def test_pages_of_k_beside_v_are_one_piece_a_layer():
    layout = KVLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16, pages="fused")
    assert layout.block_bytes == 2 * 2**20
    assert layout.piece_bytes == (64 * 2**10,) * 32
    assert layout.shape == (32, 8, 16, 256)
    assert replace(layout, dims="NHD").shape == (32, 16, 8, 256)
    assert replace(layout, order="discrete").segment_bytes == layout.piece_bytes


def test_a_discrete_layout_has_a_segment_for_each_piece():
    layout = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4, order="discrete")
    assert layout.segment_bytes == layout.piece_bytes == (128,) * 4


@pytest.mark.parametrize("dtype", types.DTYPES)
def test_bytes_agree_with_the_numpy_view(dtype):
    layout = KVLayout(layers=2, kv_heads=3, head_dim=5, dtype=dtype, block_tokens=7)
    assert np.zeros(layout.shape, layout.numpy_dtype).nbytes == layout.block_bytes == sum(layout.piece_bytes)
    assert layout.itemsize == layout.numpy_dtype.itemsize


def test_numpy_sees_types_that_it_lacks_as_unsigned_integers():
    seen = {name: KVLayout(1, 1, 1, name).numpy_dtype.name for name in types.DTYPES}
    assert seen["bfloat16"] == "uint16"
    assert seen["float8_e4m3fn"] == seen["float8_e5m2"] == "uint8"


def test_a_raw_layout_is_one_piece_of_bytes():
    layout = RawLayout(block_bytes=4096, block_tokens=16)
    assert layout.piece_bytes == layout.segment_bytes == layout.shape == (4096,)
    assert (layout.dtype, layout.itemsize, layout.numpy_dtype) == ("uint8", 1, np.dtype(np.uint8))


def test_numpy_integers_become_ints():
    layout = KVLayout(layers=np.int32(2), kv_heads=np.uint8(1), head_dim=np.int64(8))
    assert type(layout.layers) is type(layout.kv_heads) is type(layout.head_dim) is int
    assert layout == KVLayout(2, 1, 8)


def test_layouts_compare_hash_and_pickle_by_value():
    layout = KVLayout(2, 1, 8)
    assert hash(layout) == hash(KVLayout(2, 1, 8))
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout != KVLayout(2, 1, 8, order="discrete")
    assert layout != KVLayout(2, 1, 8, dims="NHD")
    assert layout != KVLayout(2, 1, 8, pages="fused")


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 2**63, 2**200])
def test_a_layout_refuses_a_number_out_of_range_and_names_it(name, value):
    with pytest.raises(errors.ArgumentError, match=f"{name} is {value}") as caught:
        KVLayout(**{"layers": 1, "kv_heads": 1, "head_dim": 1, name: value})
    assert caught.value.value == value


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [1.0, "1", None, True, [1]])
def test_a_layout_refuses_numbers_that_are_not_ints(name, value):
    with pytest.raises(errors.ArgumentTypeError, match=name):
        KVLayout(**{"layers": 1, "kv_heads": 1, "head_dim": 1, name: value})


def test_a_layout_refuses_a_block_that_fits_no_memory():
    with pytest.raises(errors.ArgumentError, match="a block would have"):
        KVLayout(layers=2**20, kv_heads=2**20, head_dim=1)


@pytest.mark.parametrize("dtype", ["float64", "bf16", "torch.bfloat16", ""])
def test_a_layout_refuses_an_unknown_dtype_and_names_those_it_knows(dtype):
    with pytest.raises(errors.ArgumentError, match="float8_e4m3fn"):
        KVLayout(1, 1, 1, dtype=dtype)


@pytest.mark.parametrize("arguments", [{"dtype": np.float32}, {"order": 1}, {"dims": 1}, {"pages": 1}])
def test_a_layout_refuses_a_name_that_is_not_text(arguments):
    with pytest.raises(errors.ArgumentTypeError):
        KVLayout(1, 1, 1, **arguments)


def test_a_layout_refuses_an_unknown_order():
    with pytest.raises(errors.ArgumentError, match="aggregated, discrete"):
        KVLayout(1, 1, 1, order="mixed")
    with pytest.raises(errors.ArgumentError, match="HND, NHD"):
        KVLayout(1, 1, 1, dims="nhd")
    with pytest.raises(errors.ArgumentError, match="split, fused"):
        KVLayout(1, 1, 1, pages="both")


@pytest.mark.parametrize(
    "arguments", [{"block_bytes": 0}, {"block_bytes": 2**40 + 1}, {"block_bytes": 1, "block_tokens": 0}]
)
def test_a_raw_layout_refuses_numbers_out_of_range(arguments):
    with pytest.raises(errors.ArgumentError):
        RawLayout(**arguments)


# ---- addresses


def test_media_are_small_numbers_with_names():
    assert (HBM, DRAM, DISK, MIXED) == (1, 2, 3, 8)
    assert Medium(2).name == "DRAM"


@given(parts)
def test_an_address_decodes_to_its_parts(made_of):
    assert types.decode_address(address(*made_of)) == made_of
    assert types.decode_address(np.uint64(address(*made_of))) == made_of


@given(st.lists(parts))
def test_arrays_and_lists_of_addresses_decode_alike(made_of):
    numbers = [address(7, *one[1:]) for one in made_of]  # block ids are of one instance
    for given_as in (numbers, tuple(numbers), array("Q", numbers), np.array(numbers, np.uint64)):
        blocks, media = block_ids(given_as), types.media(given_as)
        assert blocks.dtype == np.int64
        assert media.dtype == np.uint8
        assert blocks.tolist() == [one[3] for one in made_of]
        assert media.tolist() == [int(one[1]) for one in made_of]


def test_block_ids_index_a_tensor():
    tensor = np.arange(12).reshape(6, 2)
    assert tensor[block_ids([address(block=4), address(block=1)])].tolist() == [[8, 9], [2, 3]]


def test_block_ids_are_of_one_pool():
    own = [address(block=1), address(instance=7, block=2), address(instance=7, block=3)]  # 0: from before it had peers
    assert block_ids(own).tolist() == [1, 2, 3]
    assert block_ids([address(instance=9, block=4)]).tolist() == [4]  # its number at its owner
    assert block_ids([]).tolist() == []
    with pytest.raises(errors.ArgumentError, match="instances 7 and 9") as caught:
        block_ids([*own, address(instance=9, block=4)])
    assert caught.value.fields["instance"] == 9


def test_block_ids_take_strided_and_read_only_arrays():
    numbers = np.array([address(block=n) for n in range(6)], np.uint64)[::2]
    numbers.flags.writeable = False
    assert block_ids(numbers).tolist() == [0, 2, 4]


def outcome(function, numbers):
    try:
        blocks = function(numbers)
    except errors.ArgumentError as error:
        return str(error)
    return blocks.dtype, blocks.tolist()


@given(st.lists(st.tuples(st.sampled_from([0, 7, 9]), st.integers(0, 7), st.integers(0, 3), st.integers(0, 9))))
def test_block_ids_read_usual_lists_as_they_read_all_others(made_of):
    numbers = np.array([address(*one) for one in made_of], np.uint64)
    for same in (numbers, numbers[::-1], np.repeat(numbers, 2)[::2]):
        assert outcome(block_ids, same) == outcome(types.checked_block_ids, same)


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_an_address_has_64_unsigned_bits(wrong):
    with pytest.raises(errors.ArgumentError, match=str(wrong)):
        types.decode_address(wrong)
    with pytest.raises(errors.ArgumentError, match=rf"addresses\[1\] is {wrong}"):
        block_ids([address(), wrong])


@pytest.mark.parametrize("medium", [0, 4, 7])
def test_an_address_names_a_medium(medium):
    wrong = address(medium=medium)
    with pytest.raises(errors.ArgumentError, match=f"medium bits are {medium}"):
        types.decode_address(wrong)
    for function in (block_ids, types.media):
        with pytest.raises(errors.ArgumentError, match=rf"addresses\[1\].*medium bits are {medium}") as caught:
            function([address(), wrong])
        assert caught.value.position == 1
        assert caught.value.address == wrong


@pytest.mark.parametrize("wrong", [1.5, "1", None, True])
def test_decode_refuses_other_types(wrong):
    with pytest.raises(errors.ArgumentTypeError):
        types.decode_address(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(2, np.int64),
        np.zeros(2, np.float64),
        np.zeros(2, np.uint32),
        [1.5],
        ["1"],
        "12",
        b"12",
        7,
        None,
        {1: 2},
    ],
)
def test_block_ids_refuse_other_types(wrong):
    with pytest.raises(errors.ArgumentTypeError):
        block_ids(wrong)
