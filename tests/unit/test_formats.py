"""include/epcomm/formats.h against ml_dtypes and NumPy: every 16-bit and 8-bit input, and float32 where it matters."""

import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import _rows

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
INCLUDE = Path(__file__).resolve().parents[2] / "include"

ALL16 = np.arange(2**16, dtype=np.uint16)
# Every sign, exponent and upper mantissa, with lower halves around each format's rounding points.
LOW_HALVES = (0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
FLOATS = ((ALL16.astype(np.uint32) << 16)[:, None] | np.array(LOW_HALVES, np.uint32)).ravel().view(np.float32)


def convert(name, values):
    """A function of formats.h over the bits of an array."""
    bits = values.view(f"u{values.dtype.itemsize}").astype(np.uint32)
    return _rows.convert(name, np.ascontiguousarray(bits.ravel()))


def to_float(name, codes):
    return convert(name, codes).view(np.float32)


def from_float(name, values, dtype):
    bits = convert(name, np.ascontiguousarray(values, np.float32))
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def expected_e4m3(values):
    """Clamped, to nearest even, NaN as 0x7f."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8).copy()
    codes[np.isnan(values)] = 0x7F
    return codes


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("f16", F16)])
def test_every_16_bit_code_to_float32_and_back(name, dtype):
    codes = ALL16.view(dtype)
    floats = to_float(f"{name}_to_f32", codes)
    oracle.assert_bits(floats, codes.astype(np.float32), f"{name} to float32")
    oracle.assert_bits(from_float(f"f32_to_{name}", floats, dtype), codes, f"{name} and back")
    if name == "f16":  # bf16 only moves bits
        assert (floats.view(np.uint32)[np.isnan(floats)] & 0x400000).all(), "a NaN must come out quiet"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("f16", F16)])
def test_float32_to_16_bits(name, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        expected = FLOATS.astype(dtype)
    oracle.assert_bits(from_float(f"f32_to_{name}", FLOATS, dtype), expected, f"float32 to {name}")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("f16", F16)])
def test_nan_keeps_its_sign_and_is_quiet(name, dtype):
    nans = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7F801000], np.uint32).view(np.float32)
    codes = from_float(f"f32_to_{name}", nans, dtype).view(np.uint16)
    quiet = 0x40 if dtype == BF16 else 0x200
    assert np.isnan(codes.view(dtype)).all()
    assert (codes & quiet == quiet).all()
    assert (codes >> 15).tolist() == [0, 1, 0, 1, 0]


def test_points_where_float16_turns():
    def code(value):
        return int(from_float("f32_to_f16", np.array([value]), F16).view(np.uint16)[0])

    assert code(65519.99) == 0x7BFF and code(65520) == 0x7C00 and code(-1e30) == 0xFC00
    assert code(2.0**-24) == 1 and code(2.0**-25) == 0 and code(2.0**-25 * 1.0000001) == 1
    assert code(1.5 * 2.0**-24) == 2 and code(2.5 * 2.0**-24) == 2  # ties to even among subnormals
    assert code(2.0**-14 - 2.0**-25) == 0x400  # carries from the subnormals into the normals


def test_every_e4m3_code():
    codes = np.arange(256, dtype=np.uint8)
    floats = to_float("e4m3_to_f32", codes)
    oracle.assert_bits(floats, codes.view(E4M3).astype(np.float32), "e4m3 to float32")
    back = convert("f32_to_e4m3", floats).astype(np.uint8)
    assert back.tolist() == [0x7F if code & 0x7F == 0x7F else code for code in range(256)]


def test_float32_to_e4m3():
    got = convert("f32_to_e4m3", FLOATS).astype(np.uint8)
    wrong = np.flatnonzero(got != expected_e4m3(FLOATS))
    assert wrong.size == 0, [(float(FLOATS[i]), int(got[i])) for i in wrong[:5]]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_value_to_e4m3(dtype):
    values = ALL16.view(dtype).astype(np.float32)
    assert (convert("f32_to_e4m3", values).astype(np.uint8) == expected_e4m3(values)).all()


def test_between_two_neighbours_e4m3_takes_the_even_one():
    codes = np.arange(0x7F, dtype=np.uint8)
    values = codes.view(E4M3).astype(np.float64)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    above = np.nextafter(middle, np.float32(np.inf), dtype=np.float32)
    below = np.nextafter(middle, np.float32(-np.inf), dtype=np.float32)
    even = [code if code % 2 == 0 else code + 1 for code in range(0x7E)]
    assert convert("f32_to_e4m3", middle).tolist() == even
    assert convert("f32_to_e4m3", -middle).tolist() == [code | 0x80 for code in even]
    assert convert("f32_to_e4m3", above).tolist() == list(range(1, 0x7F))
    assert convert("f32_to_e4m3", below).tolist() == list(range(0x7E))


bits32 = st.integers(0, 2**32 - 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(bits32, st.floats(width=32).map(lambda v: int(np.float32(v).view(np.uint32)))), min_size=1))
def test_any_float32(bits):
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        oracle.assert_bits(from_float("f32_to_bf16", values, BF16), values.astype(BF16))
        oracle.assert_bits(from_float("f32_to_f16", values, F16), values.astype(F16))
    assert (convert("f32_to_e4m3", values).astype(np.uint8) == expected_e4m3(values)).all()


# ------------------------------------------------------------------------------------------------ scales


def expected_scale(amax, round_scale):
    """In words of the standard: a correctly rounded quotient of two float32, then the next power of two."""
    scale = np.float32(np.float32(max(np.float32(amax), np.float32(1e-4))) / np.float32(448))
    if round_scale:
        power = 2.0 ** np.floor(np.log2(float(scale)))
        scale = np.float32(power if power == float(scale) else 2 * power)
    return scale


@pytest.mark.parametrize("round_scale", [False, True])
def test_scale_of_every_finite_magnitude(round_scale):
    amax = np.abs(FLOATS[np.isfinite(FLOATS)])
    name = "group_scale_rounded" if round_scale else "group_scale"
    got = convert(name, amax).view(np.float32)
    floored = np.maximum(amax, np.float32(1e-4))
    plain = floored / np.float32(448)
    if not round_scale:
        assert (got == plain).all()
        return
    mantissa, exponent = np.frexp(plain)
    expected = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    assert (got == expected).all()
    assert np.isfinite(got).all() and (got >= plain).all() and (got < 2 * plain).all()


@pytest.mark.parametrize("amax", [0, 1e-45, 1e-5, 1e-4, 1.0001e-4, 1, 447.9, 448, 448.1, 896, 65504, 3.4028235e38])
@pytest.mark.parametrize("round_scale", [False, True])
def test_scale_by_hand(amax, round_scale):
    name = "group_scale_rounded" if round_scale else "group_scale"
    got = convert(name, np.array([amax], np.float32)).view(np.float32)[0]
    assert got == expected_scale(amax, round_scale)


def test_e8m0():
    codes = np.arange(256, dtype=np.uint8)
    floats = to_float("e8m0_to_f32", codes)
    oracle.assert_bits(floats, codes.view(E8M0).astype(np.float32), "e8m0 to float32")
    normal = slice(1, 255)
    assert (convert("f32_to_e8m0", floats)[normal] == codes[normal]).all()


# ----------------------------------------------------------------------------------------- three compilers


@pytest.mark.parametrize("header", ["epcomm/base.h", "epcomm/formats.h", "epcomm/heap.h"])
def test_headers_for_devices_need_no_host_header(header, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source = tmp_path / "probe.cpp"
    source.write_text(
        "#define __host__\n#define __device__\n#define __CUDACC__\n#define __CUDACC_RTC__\n"
        f'#include "{header}"\nint main() {{ return 0; }}\n'
    )
    command = [compiler, "-std=c++17", "-nostdinc", "-nostdinc++", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, f"-I{INCLUDE}", str(source)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
