"""The converting producer of Hopper's decode kernel: 8-bit keys from memory, through registers, into shared memory in
the queries' dtype.

Four warps replace `producers.copy_tiles`; the consumers are the same. Registers hold three fifths of a tile: while
one part of a tile is converted, the next parts are loaded from memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dcpmla.attention.hopper.paging import PAGE_ROWS, find_keys, find_table, load_queries, point_to, split_row
from dcpmla.attention.hopper.schedule import HALF, ROPE
from dcpmla.attention.hopper.stage_ring import await_free, ready_at
from dcpmla.cache import shared_format

# Words of a quarter of a latent, which share a scale in fp8_ds_mla. In shared keys each half of a quarter has its own
# scale, and the last half of the last quarter is the rotated part.
QUARTER = gl.constexpr(32)
SCALE_WORDS = gl.constexpr(shared_format.SCALE_BYTES // 4)  # words of a row's scales
# Bytes are loaded as words of four, which take one register, not four. A load brings eight values, 16 bytes to store.
# Eight threads have 64 columns of a key, so that no two store to the same bank.
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
BY_KEY = gl.constexpr(gl.SliceLayout(1, WORDS.value))
PREFETCHED = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))


@gluon.jit
def _load_words(keys_ptr, first: gl.constexpr, number: gl.constexpr):
    """Load words [first, first + number) of rows -> [KEYS, number]."""
    word = gl.expand_dims(gl.arange(0, number, layout=gl.SliceLayout(0, WORDS)), 0)
    return gl.load(gl.expand_dims(keys_ptr, 1) + (first + word))


@gluon.jit
def _to_scales(found, paging):
    """Return the offset of shared keys' scales from their rows, in words."""
    _, row = split_row(found)
    return PAGE_ROWS * paging.row_stride - row.to(gl.int32) * (paging.row_stride - SCALE_WORDS)


@gluon.jit
def _load_quarter(keys_ptr, quarter: gl.constexpr, found, paging):
    """Load a quarter of the latents: words [KEYS, QUARTER] of four e4m3, and in fp8_ds_mla their scales [KEYS].

    In shared keys, the first quarter of a half loads the scales of both, a byte for each 64 columns; the last quarter
    has half as many words.
    """
    is_planar: gl.constexpr = paging.page_stride is not None
    words: gl.constexpr = QUARTER // 2 if is_planar and quarter == 3 else QUARTER
    codes = _load_words(keys_ptr, quarter * QUARTER, words)
    scales = codes
    if is_planar:
        if quarter % 2 == 0:
            scales = gl.load(keys_ptr + _to_scales(found, paging) + quarter // 2)
    elif paging.is_ds_mla:
        scales = gl.load(keys_ptr + (4 * QUARTER + quarter)).to(gl.float32, bitcast=True)
    return codes, scales


@gluon.jit
def _load_rope(keys_ptr, ROW_WORDS: gl.constexpr, IS_DS_MLA: gl.constexpr):
    """Load rope parts: words of four e4m3 [KEYS, 16], or of two bfloat16 [KEYS, 32] in fp8_ds_mla."""
    words: gl.constexpr = ROPE // 2 if IS_DS_MLA else ROPE // 4
    return _load_words(keys_ptr, ROW_WORDS - words, words)


@gluon.jit
def _widen(codes):
    """Convert words of four e4m3 to float32: four tensors, of the words' first, second, third and fourth values."""
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
    """Store results of `_widen` into a buffer [KEYS, N], in its dtype and in order."""
    dtype: gl.constexpr = buffer.dtype
    buffer.store(gl.join(gl.join(a.to(dtype), c.to(dtype)), gl.join(b.to(dtype), d.to(dtype))).reshape(buffer.shape))


@gluon.jit
def _scales_of(scales, quarter: gl.constexpr, number: gl.constexpr, paging):
    """Return the scales of a quarter's `number` words, [KEYS, 1]; of shared keys, [KEYS, number] from bytes."""
    scales = gl.expand_dims(scales, 1)
    if paging.page_stride is not None:
        word = gl.expand_dims(gl.arange(0, number, layout=gl.SliceLayout(0, WORDS)), 0)
        first, last = scales >> (16 * quarter), scales >> (16 * quarter + 8)
        exponents = gl.where(word < QUARTER // 2, first, last) & 0xFF
        scales = (exponents << 23).to(gl.float32, bitcast=True)
    return scales


@gluon.jit
def _store_quarter(buffer, quarter: gl.constexpr, codes, scales, paging):
    """Store e4m3 into a quarter of a half; in fp8_ds_mla times their scales, rounded once (`dcpmla.cache`)."""
    a, b, c, d = _widen(codes)
    if paging.is_ds_mla:
        scale = _scales_of(scales, quarter, codes.shape[1], paging)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
    _join(buffer.slice(quarter * (HALF // 2), 4 * codes.shape[1], dim=1), a, b, c, d)


@gluon.jit
def _halves(words):
    """Split words of two bfloat16 into the first and the second numbers."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return first.to(gl.bfloat16, bitcast=True), second.to(gl.bfloat16, bitcast=True)


@gluon.jit
def _store_rope(buffer, words, IS_DS_MLA: gl.constexpr):
    """Store rope parts from `_load_rope` into a buffer [KEYS, ROPE], in its dtype."""
    if IS_DS_MLA:
        first, second = _halves(words)
        buffer.store(gl.join(first.to(buffer.dtype), second.to(buffer.dtype)).reshape(buffer.shape))
    else:
        a, b, c, d = _widen(words)
        _join(buffer, a, b, c, d)


@gluon.jit
def _rope_of(buffers, stage):
    """Return the buffer of a tile's rope part; with shared keys, the last columns."""
    if buffers.k_pe is None:
        buffer = buffers.k_right.index(stage).slice(HALF - ROPE, ROPE, dim=1)
    else:
        buffer = buffers.k_pe.index(stage)
    return buffer


@gluon.jit
def _prefetch(found, rows_ptr, paging):
    """Prefetch single rows, and the scales of shared keys, into the L2 cache, so that their loads wait only for L2."""
    is_planar: gl.constexpr = paging.page_stride is not None
    step: gl.constexpr = (paging.row_stride - 1) // (6 if is_planar else 7)  # in words, at most a line of 128 bytes
    word = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, PREFETCHED)) * step, 0)
    if is_planar:
        word = gl.where(word < 7 * step, word, gl.expand_dims(_to_scales(found, paging), 1))
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [gl.expand_dims(point_to(found, rows_ptr, paging), 1) + word],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def convert_rows(queries, rows_ptr, walk, segment, buffers, barriers, paging, num_loaded):
    """Copy the queries of a segment by TMA, then load and convert its keys; return the tiles loaded so far.

    Scales of fp8_ds_mla are multiplied in; the consumers apply the one scale of an e4m3 cache.
    """
    is_planar: gl.constexpr = paging.page_stride is not None
    table = find_table(walk.request, paging)
    tile, stop = walk.start - walk.begin, segment.stop - walk.begin
    found = find_keys(tile, stop, segment, table, rows_ptr, paging, BY_KEY)
    keys_ptr = point_to(found, rows_ptr, paging)
    c0, s0 = _load_quarter(keys_ptr, 0, found, paging)
    c1, s1 = _load_quarter(keys_ptr, 1, found, paging)
    rope = _load_rope(keys_ptr, paging.row_stride, paging.is_ds_mla)
    if segment.is_new:
        load_queries(queries, segment.first_row, buffers, barriers, walk.num_segments)
    while tile < stop:
        stage = await_free(barriers.left, num_loaded)
        await_free(barriers.right, num_loaded)
        next_found = find_keys(tile + 1, stop, segment, table, rows_ptr, paging, BY_KEY)
        if paging.is_sparse:
            ahead = find_keys(tile + 2, stop, segment, table, rows_ptr, paging, gl.SliceLayout(1, PREFETCHED))
        keys_ptr = point_to(found, rows_ptr, paging)
        c2, s2 = _load_quarter(keys_ptr, 2, found, paging)
        _store_quarter(buffers.k_left.index(stage), 0, c0, s0, paging)
        c3, s3 = _load_quarter(keys_ptr, 3, found, paging)
        _store_quarter(buffers.k_left.index(stage), 1, c1, s0 if is_planar else s1, paging)
        found = next_found
        keys_ptr = point_to(found, rows_ptr, paging)
        c0, s0 = _load_quarter(keys_ptr, 0, found, paging)
        _store_rope(_rope_of(buffers, stage), rope, paging.is_ds_mla)
        rope = _load_rope(keys_ptr, paging.row_stride, paging.is_ds_mla)
        _store_quarter(buffers.k_right.index(stage), 0, c2, s2, paging)
        c1, s1 = _load_quarter(keys_ptr, 1, found, paging)
        _store_quarter(buffers.k_right.index(stage), 1, c3, s2 if is_planar else s3, paging)
        fence_async_shared()  # this also waits for loads, which started long before
        mbarrier.arrive(ready_at(barriers.left, num_loaded), count=1)
        mbarrier.arrive(ready_at(barriers.right, num_loaded), count=1)
        if paging.is_sparse:
            _prefetch(ahead, rows_ptr, paging)
        num_loaded += 1
        tile += 1
    return num_loaded
