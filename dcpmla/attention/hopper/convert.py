"""The converter of Hopper's decode kernel over 8-bit caches: keys from memory, through registers, into shared
memory in the queries' dtype.

It takes the loader's place (`hopper_load`), with four warps. The other roles do not know the difference. Registers
hold three fifths of a
tile: while one part is converted, those behind it are on their way from memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.gather import find_keys, point_to
from dcpmla.attention.hopper.load import NUM_STAGES, ROPE, tma_load
from dcpmla.attention.hopper.merge import await_cut
from dcpmla.attention.hopper.split import HALF, KEYS, LATENT, ROWS, find_request, next_begin

TILE = gl.constexpr(32)  # words of a latent that share a scale in fp8_ds_mla
TILES = gl.constexpr(4)  # of a latent
# Bytes travel as words of four: a register each, not one for each byte. A load brings eight values, which make 16 bytes
# to store, and eight threads have 64 columns of a key, so that no two store to the same bank.
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
BY_KEY = gl.constexpr(gl.SliceLayout(1, WORDS.value))
POINTS = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))


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
        scales = gl.load(rows_ptr + (TILES * TILE + tile)).to(gl.float32, bitcast=True)
    return codes, scales


@gluon.jit
def _load_rope(rows_ptr, ROW_WORDS: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """The rope parts of a tile of keys: words of four e4m3 [KEYS, 16], in fp8_ds_mla of two bfloat16 [KEYS, 32]."""
    words: gl.constexpr = ROPE // 2 if IS_DS_MLA else ROPE // 4
    return _load_words(rows_ptr, ROW_WORDS - words, words)


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
    """The values of words, the first ones, the second ones and so on, into a buffer [KEYS, N] in its dtype."""
    dtype: gl.constexpr = buffer.dtype
    buffer.store(gl.join(gl.join(a.to(dtype), c.to(dtype)), gl.join(b.to(dtype), d.to(dtype))).reshape(buffer.shape))


@gluon.jit
def _store_tile(buffer, tile: gl.constexpr, codes, scales, IS_DS_MLA: gl.constexpr):
    """Words of e4m3 into a quarter's place; in fp8_ds_mla times their scales, rounded once (`cache/formats.py`)."""
    a, b, c, d = _widen(codes)
    if IS_DS_MLA:
        scale = gl.expand_dims(scales, 1)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
    _join(buffer.slice(tile * (HALF // 2), HALF // 2, dim=1), a, b, c, d)


@gluon.jit
def _halves(words):
    """Words of two bfloat16 -> the first ones, the second ones."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return first.to(gl.bfloat16, bitcast=True), second.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _store_rope(buffer, words, IS_DS_MLA: gl.constexpr):
    if IS_DS_MLA:
        first, second = _halves(words)
        buffer.store(gl.join(first.to(buffer.dtype), second.to(buffer.dtype)).reshape(buffer.shape))
    else:
        a, b, c, d = _widen(words)
        _join(buffer, a, b, c, d)


@gluon.jit
def _find_ahead(tile, keys, ROW_WORDS: gl.constexpr):
    """`find_keys` for `_fetch_ahead`."""
    return find_keys(tile, keys, gl.SliceLayout(1, POINTS), ROW_WORDS, True)


@gluon.jit
def _fetch_ahead(places, cache_ptr, ROW_WORDS: gl.constexpr):
    """Bring pages of one row into the L2, so that their loads wait for that alone."""
    point = gl.arange(0, 8, layout=gl.SliceLayout(0, POINTS)) * (
        (ROW_WORDS - 1) // 7
    )  # less than a line of 128 bytes apart
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [gl.expand_dims(point_to(places, cache_ptr, ROW_WORDS, True), 1) + gl.expand_dims(point, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


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
        first, num_rows, num_keys = find_request(
            request, lens_ptr, start_ptr, query_len, num_heads, row_tile, IS_RAGGED
        )
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
                    ahead = _find_ahead(tile + 2, keys, ROW_WORDS)
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
                    _fetch_ahead(ahead, cache_ptr, ROW_WORDS)
                num_loaded += 1
                tile += 1
            last, last_begin = request, begin
            start = stop
        begin = next_begin(begin, num_keys, granule)
        start = gl.maximum(start, begin)
        request += 1
    await_cut(last, last_begin, work, counters_ptr, merge_ready, row_tile, IS_RAGGED)
