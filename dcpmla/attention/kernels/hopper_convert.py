"""The converter of Hopper's decode kernel over 8-bit caches: keys from memory, through registers, into shared memory in the queries' dtype.

It takes the loader's place (`hopper_load`), with four warps. The other roles do not know the difference. A tile is on its way from memory
while the others are at the ones before it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.kernels.hopper_load import NUM_STAGES, ROPE, find_row, tma_load
from dcpmla.attention.kernels.hopper_merge import await_cut
from dcpmla.attention.kernels.hopper_split import HALF, KEYS, LATENT, ROWS, find_request, next_begin

TILE = gl.constexpr(32)  # words of a latent that share a scale in fp8_ds_mla
TILES = gl.constexpr(4)  # of a latent
SCALE_WORDS = gl.constexpr(4)
# Bytes travel as words of four: a register each, not one for each byte. Keys (a register's, then a thread's) x tiles x words: a load
# brings eight values, which make 16 bytes to store, and a thread's addresses differ by constants.
WORDS = gl.constexpr(gl.BlockedLayout([1, 1, 2, 2], [1, 2, 1, 16], [1, 4, 1, 1], [3, 2, 1, 0]))
ROPE_FP8 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0]))
ROPE_BF16 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0]))
POINTS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
AHEAD = gl.constexpr(3)  # tiles


@gluon.jit
def _load_half(rows_ptr, half: gl.constexpr, is_there, ROW_WORDS: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """Half of the latents of a tile of keys [8, 8, 2, TILE], and in fp8_ds_mla their scales [8, 8, 2]."""
    by_tile: gl.constexpr = gl.SliceLayout(3, WORDS)
    by_key: gl.constexpr = gl.SliceLayout(2, by_tile)
    eighth = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, by_key)), 1)
    key = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, by_key)), 0)
    tile = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(0, by_tile)))
    tile = gl.expand_dims(gl.expand_dims(tile, 0), 0)
    word = gl.arange(0, TILE, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, WORDS))))
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 0), 0)
    row = gl.expand_dims(key * ROW_WORDS + eighth * (8 * ROW_WORDS), 2)
    codes = gl.load(rows_ptr + half * (2 * TILE) + (gl.expand_dims(row + tile * TILE, 3) + word), mask=is_there, other=0)
    scales = row
    if IS_DS_MLA:
        scales = gl.load(rows_ptr + (TILES * TILE + half * 2) + (row + tile), mask=is_there, other=0)
    return codes, scales


@gluon.jit
def _load_rope(rows_ptr, is_there, ROW_WORDS: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """The rope parts of a tile of keys: words of four e4m3 [2, 32, 16], in fp8_ds_mla of two bfloat16 [4, 16, 32]."""
    layout: gl.constexpr = ROPE_BF16 if IS_DS_MLA else ROPE_FP8
    words: gl.constexpr = ROPE // 2 if IS_DS_MLA else ROPE // 4
    keys: gl.constexpr = 16 if IS_DS_MLA else 32
    rope_at: gl.constexpr = TILES * TILE + (SCALE_WORDS if IS_DS_MLA else 0)
    part = gl.expand_dims(gl.arange(0, KEYS // keys, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1)
    key = gl.expand_dims(gl.arange(0, keys, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0)
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, words, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout))), 0), 0)
    row = gl.expand_dims(key * ROW_WORDS + part * (keys * ROW_WORDS), 2)
    return gl.load(rows_ptr + rope_at + (row + word), mask=is_there, other=0)


@gluon.jit
def _fetch_ahead(rows_ptr, ROW_WORDS: gl.constexpr):
    """Bring a tile of keys into the L2, so that its loads wait for that alone."""
    key = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, POINTS)), 1)
    point = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, POINTS)), 0)  # less than a line of 128 bytes apart
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [rows_ptr + (key * ROW_WORDS + point * (ROW_WORDS // 8))],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _widen(codes):
    """Words of four e4m3 -> their values in float32, each fourth one of a word."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, last;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 last, high;
        mov.b32 {low, high}, first;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        mov.b32 {low, high}, last;
        cvt.f32.f16 $2, low;
        cvt.f32.f16 $3, high;
        }""",
        "=f,=f,=f,=f,r",
        [codes],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _join(buffer, a, b, c, d):
    """The values of words, the first ones, the second ones and so on, into a buffer [KEYS, N]."""
    buffer.store(gl.join(gl.join(a, c), gl.join(b, d)).reshape(buffer.shape))


@gluon.jit
def _store_half(buffer, codes, scales, IS_DS_MLA: gl.constexpr):
    """Words of e4m3 into a tile's half; in fp8_ds_mla times their scales, rounded once (`cache/formats.py`)."""
    dtype: gl.constexpr = buffer.dtype
    a, b, c, d = _widen(codes)
    if IS_DS_MLA:
        scale = gl.expand_dims(scales.to(gl.float32, bitcast=True), 3)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
    _join(buffer, a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype))


@gluon.jit
def _store_rope(buffer, words, IS_DS_MLA: gl.constexpr):
    dtype: gl.constexpr = buffer.dtype
    if IS_DS_MLA:
        first, second = (words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True)
        buffer.store(gl.join(first.to(dtype), second.to(dtype)).reshape(buffer.shape))
    else:
        a, b, c, d = _widen(words)
        _join(buffer, a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype))


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
            tile, last_tile = start - begin, stop - begin - 1
            rows_ptr = cache_ptr + find_row(tile, table, rows_per_block, block_size).to(gl.int64) * ROW_WORDS
            left, left_scales = _load_half(rows_ptr, 0, True, ROW_WORDS, IS_DS_MLA)
            rope = _load_rope(rows_ptr, True, ROW_WORDS, IS_DS_MLA)
            right, right_scales = _load_half(rows_ptr, 1, True, ROW_WORDS, IS_DS_MLA)
            mbarrier.wait(q_free, (num_segments & 1) ^ 1)
            mbarrier.expect(q_ready, ROWS * (LATENT + ROPE) * 2)
            tma_load(q_desc, [q_row, 0], q_ready, q_left.index(0))
            tma_load(q_desc, [q_row, HALF], q_ready, q_right.index(0))
            tma_load(q_pe_desc, [q_row, LATENT], q_ready, q_pe.index(0))
            num_segments += 1
            while tile <= last_tile:
                is_next = tile < last_tile
                following = find_row(gl.minimum(tile + 1, last_tile), table, rows_per_block, block_size)
                rows_ptr = cache_ptr + following.to(gl.int64) * ROW_WORDS
                ahead = find_row(gl.minimum(tile + AHEAD, last_tile), table, rows_per_block, block_size)
                stage, phase = num_loaded % NUM_STAGES, (num_loaded // NUM_STAGES) & 1
                mbarrier.wait(left_free.index(stage), phase ^ 1)
                _store_half(k_left.index(stage), left, left_scales, IS_DS_MLA)
                _store_rope(k_pe.index(stage), rope, IS_DS_MLA)
                mbarrier.wait(right_free.index(stage), phase ^ 1)
                _store_half(k_right.index(stage), right, right_scales, IS_DS_MLA)
                fence_async_shared()  # it waits for loads, too: none may be on its way here
                mbarrier.arrive(left_ready.index(stage), count=1)
                mbarrier.arrive(right_ready.index(stage), count=1)
                left, left_scales = _load_half(rows_ptr, 0, is_next, ROW_WORDS, IS_DS_MLA)
                rope = _load_rope(rows_ptr, is_next, ROW_WORDS, IS_DS_MLA)
                right, right_scales = _load_half(rows_ptr, 1, is_next, ROW_WORDS, IS_DS_MLA)
                _fetch_ahead(cache_ptr + ahead.to(gl.int64) * ROW_WORDS, ROW_WORDS)
                num_loaded += 1
                tile += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)
