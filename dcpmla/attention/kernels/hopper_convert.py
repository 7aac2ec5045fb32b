"""The converter of Hopper's decode kernel over 8-bit caches: keys from memory, through registers, into shared memory in the queries' dtype.

It takes the loader's place (`hopper_load`), with four warps. The other roles do not know the difference. Registers hold three fifths of a
tile: while one part is converted, those behind it are on their way from memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.kernels.hopper_gather import fetch_ahead, find_ahead, find_keys, point_to
from dcpmla.attention.kernels.hopper_load import NUM_STAGES, ROPE, tma_load
from dcpmla.attention.kernels.hopper_merge import await_cut
from dcpmla.attention.kernels.hopper_split import HALF, KEYS, LATENT, ROWS, find_request, next_begin

TILE = gl.constexpr(32)  # words of a latent that share a scale in fp8_ds_mla
TILES = gl.constexpr(4)  # of a latent
# Bytes travel as words of four: a register each, not one for each byte. A load brings eight values, which make 16 bytes to store, and
# eight threads have 64 columns of a key, so that no two store to the same bank.
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
BY_KEY = gl.constexpr(gl.SliceLayout(1, WORDS.value))
BIAS = gl.constexpr(256.0)  # what `_widen` leaves to be multiplied by


def _spread(shift: int, mask: int) -> str:
    """PTX that puts the bits of four e4m3 of $4 where a 16-bit format has them: the second and the fourth in `odd`, the others in `even`.

    An exponent keeps its number, and so is too small by the difference of the formats' biases. Subnormal numbers stay what they are.
    """
    return f"""
        .reg .b32 odd, even, sign;
        shr.b32 odd, $4, {shift};
        and.b32 odd, odd, {mask:#x};
        lop3.b32 odd, $4, 0x80008000, odd, 0xEA;
        shl.b32 even, $4, {8 - shift};
        and.b32 even, even, {mask:#x};
        shl.b32 sign, $4, 8;
        lop3.b32 even, sign, 0x80008000, even, 0xEA;"""


def _exact(shift: int, mask: int, bias: int, dtype: str) -> str:
    """PTX from four e4m3 to as many values of a 16-bit dtype; bias: the power of two that their exponents lack, twice."""
    return f"""{{
        {_spread(shift, mask)}
        .reg .b32 bias;
        mov.b32 bias, {bias:#x};
        mul.rn.{dtype}x2 odd, odd, bias;
        mul.rn.{dtype}x2 even, even, bias;
        mov.b32 {{$0, $2}}, even;
        mov.b32 {{$1, $3}}, odd;
        }}"""


WIDEN = gl.constexpr(f"""{{
        {_spread(1, 0x3F803F80)}
        .reg .b16 first, second, third, fourth;
        mov.b32 {{first, third}}, even;
        mov.b32 {{second, fourth}}, odd;
        cvt.f32.f16 $0, first;
        cvt.f32.f16 $1, second;
        cvt.f32.f16 $2, third;
        cvt.f32.f16 $3, fourth;
        }}""")
TO_FP16 = gl.constexpr(_exact(1, 0x3F803F80, 0x5C005C00, "f16"))
TO_BF16 = gl.constexpr(_exact(4, 0x07F007F0, 0x7B807B80, "bf16"))


@gluon.jit
def _load_words(rows_ptr, first: gl.constexpr, number: gl.constexpr):
    """Words [first, first + number) of rows -> [KEYS, number]."""
    word = gl.expand_dims(gl.arange(0, number, layout=gl.SliceLayout(0, WORDS)), 0)
    return gl.load(gl.expand_dims(rows_ptr, 1) + (first + word))


@gluon.jit
def _load_tile(rows_ptr, tile: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """Codes [KEYS, TILE] of a quarter of the latents, and in fp8_ds_mla their scales [KEYS]."""
    codes = _load_words(rows_ptr, tile * TILE, TILE)
    scales = codes
    if IS_DS_MLA:
        scales = gl.load(rows_ptr + (TILES * TILE + tile))
    return codes, scales


@gluon.jit
def _load_rope(rows_ptr, ROW_WORDS: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """The rope parts of a tile of keys: words of four e4m3 [KEYS, 16], in fp8_ds_mla of two bfloat16 [KEYS, 32]."""
    words: gl.constexpr = ROPE // 2 if IS_DS_MLA else ROPE // 4
    return _load_words(rows_ptr, ROW_WORDS - words, words)


@gluon.jit
def _widen(codes):
    """Words of four e4m3 -> their values / BIAS in float32, each fourth one of a word."""
    return gl.inline_asm_elementwise(
        WIDEN,
        "=f,=f,=f,=f,r",
        [codes],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _decode(codes, dtype: gl.constexpr):
    """Words of four e4m3 -> their values, exact in 16 bits, each fourth one of a word."""
    asm: gl.constexpr = TO_BF16 if dtype == gl.bfloat16 else TO_FP16
    a, b, c, d = gl.inline_asm_elementwise(
        asm,
        "=h,=h,=h,=h,r",
        [codes],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    return a.to(dtype, bitcast=True), b.to(dtype, bitcast=True), c.to(dtype, bitcast=True), d.to(dtype, bitcast=True)


@gluon.jit
def _join(buffer, a, b, c, d):
    """The values of words, the first ones, the second ones and so on, into a buffer [KEYS, N]."""
    buffer.store(gl.join(gl.join(a, c), gl.join(b, d)).reshape(buffer.shape))


@gluon.jit
def _store_tile(buffer, tile: gl.constexpr, codes, scales, IS_DS_MLA: gl.constexpr):
    """Words of e4m3 into a quarter's place; in fp8_ds_mla times their scales, rounded once (`cache/formats.py`)."""
    dtype: gl.constexpr = buffer.dtype
    place = buffer.slice(tile * (HALF // 2), HALF // 2, dim=1)
    if IS_DS_MLA:
        # Scales are at most 1 / 448 of a number of float32: they have room for the bias.
        scale = gl.expand_dims(scales.to(gl.float32, bitcast=True) * BIAS, 1)
        a, b, c, d = _widen(codes)
        _join(place, (a * scale).to(dtype), (b * scale).to(dtype), (c * scale).to(dtype), (d * scale).to(dtype))
    else:
        a, b, c, d = _decode(codes, dtype)
        _join(place, a, b, c, d)


@gluon.jit
def _store_rope(buffer, words, IS_DS_MLA: gl.constexpr):
    dtype: gl.constexpr = buffer.dtype
    if IS_DS_MLA:
        first, second = (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)
        buffer.store(gl.join(first.to(dtype), second.to(dtype)).reshape(buffer.shape))
    else:
        a, b, c, d = _decode(words, dtype)
        _join(buffer, a, b, c, d)


@gluon.jit
def convert_role(
    descs,
    cache_ptr,
    buffers,
    ready,
    free,
    paging,
    counters_ptr,
    work,
    row_tile,
    IS_RAGGED: gl.constexpr,
    IS_DS_MLA: gl.constexpr,
    IS_SPARSE: gl.constexpr,
    ROW_WORDS: gl.constexpr,
):
    """A segment's queries, then its keys tile after tile into the stages that the others have freed."""
    table_ptr, table_stride, rows_per_block, block_size = paging
    q_desc, q_pe_desc = descs
    q_left, q_right, q_pe, k_left, k_right, k_pe = buffers
    q_ready, left_ready, right_ready, _, merge_ready = ready
    q_free, left_free, right_free, _ = free
    request, begin, start, end, _, granule, lens_ptr, start_ptr, query_len, num_heads = work
    num_segments, num_loaded, last, last_begin = 0, 0, 0, 0
    while start < end:
        first, num_rows, num_keys = find_request(request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED)
        stop = gl.minimum(begin + gl.cdiv(num_keys, KEYS), end)
        if start < stop:
            q_row = first * num_heads + row_tile * ROWS
            table = table_ptr + request.to(gl.int64) * table_stride
            tile, last_key = start - begin, gl.minimum(num_keys, (stop - begin) * KEYS) - 1
            keys = (cache_ptr, table, last_key, rows_per_block, block_size)
            places = find_keys(tile, keys, BY_KEY, ROW_WORDS, IS_SPARSE)
            rows_ptr = point_to(places, cache_ptr, ROW_WORDS, IS_SPARSE)
            c0, s0 = _load_tile(rows_ptr, 0, IS_DS_MLA)
            c1, s1 = _load_tile(rows_ptr, 1, IS_DS_MLA)
            rope = _load_rope(rows_ptr, ROW_WORDS, IS_DS_MLA)
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * 2)
            tma_load(q_desc, [q_row, 0], q_ready, q_left.index(0))
            tma_load(q_desc, [q_row, HALF], q_ready, q_right.index(0))
            tma_load(q_pe_desc, [q_row, LATENT], q_ready, q_pe.index(0))
            num_segments += 1
            while tile * KEYS <= last_key:
                stage, phase = num_loaded % NUM_STAGES, (num_loaded // NUM_STAGES) & 1
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                next_places = find_keys(tile + 1, keys, BY_KEY, ROW_WORDS, IS_SPARSE)
                if IS_SPARSE:
                    ahead = find_ahead(tile + 2, keys)
                rows_ptr = point_to(places, cache_ptr, ROW_WORDS, IS_SPARSE)
                c2, s2 = _load_tile(rows_ptr, 2, IS_DS_MLA)
                _store_tile(k_left.index(stage), 0, c0, s0, IS_DS_MLA)
                c3, s3 = _load_tile(rows_ptr, 3, IS_DS_MLA)
                _store_tile(k_left.index(stage), 1, c1, s1, IS_DS_MLA)
                places = next_places
                rows_ptr = point_to(places, cache_ptr, ROW_WORDS, IS_SPARSE)
                c0, s0 = _load_tile(rows_ptr, 0, IS_DS_MLA)
                _store_rope(k_pe.index(stage), rope, IS_DS_MLA)
                rope = _load_rope(rows_ptr, ROW_WORDS, IS_DS_MLA)
                _store_tile(k_right.index(stage), 0, c2, s2, IS_DS_MLA)
                c1, s1 = _load_tile(rows_ptr, 1, IS_DS_MLA)
                _store_tile(k_right.index(stage), 1, c3, s3, IS_DS_MLA)
                fence_async_shared()  # it waits for loads, too: those on their way here have been for a while
                mbarrier.arrive(left_ready.index(stage), count=1)
                mbarrier.arrive(right_ready.index(stage), count=1)
                if IS_SPARSE:
                    fetch_ahead(ahead, cache_ptr, ROW_WORDS, 8)
                num_loaded += 1
                tile += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)
