"""The mask of selected keys in a consumer's registers; `attention/sparse/mask.py` specifies its words.

Each thread loads the words of its own rows of scores, four a row for a tile of 128 keys. The compiler knows which word
holds a score's bit, and a thread has eight different bits, which stay in registers: a score takes one test and one
selection.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.compat import aggregate

WORD = gl.constexpr(32)  # bits of a word


@aggregate
class Mask:
    """Words of a consumer's queries, and the bit of each key of a tile in its word."""

    rows: gl.tensor  # pointers [rows] to each query's first word
    num_words: gl.tensor  # words per query
    bits: gl.tensor  # [keys of a tile]


@gluon.jit
def open_mask(mask_ptr, num_words, first_row, num_rows, ROWS: gl.constexpr, KEYS: gl.constexpr, layout: gl.constexpr):
    """Return the `Mask` of scores [ROWS, KEYS]. Rows from num_rows on have the words of the row before them.

    Args:
        mask_ptr: Words of all queries [T, num_words].
        first_row: Query in T that the first row belongs to.
    """
    row = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), num_rows - 1)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
    return Mask(mask_ptr + (first_row + row).to(gl.int64) * num_words, num_words, 1 << (key % WORD))


@gluon.jit
def load_words(mask, tile, layout: gl.constexpr):
    """Load the words of a tile of keys as [rows, keys of a tile]: for each score, the word that holds its bit.

    A negative tile, which a load ahead of the last tile asks for, is taken for the first one.
    """
    num_keys: gl.constexpr = mask.bits.shape[0]
    number = gl.expand_dims(gl.arange(0, num_keys, layout=gl.SliceLayout(0, layout)) // WORD, 0)
    words = gl.zeros([mask.rows.shape[0], num_keys], gl.int32, layout)
    for part in gl.static_range(num_keys // WORD):
        word = gl.load(mask.rows + gl.minimum(gl.maximum(tile, 0) * (num_keys // WORD) + part, mask.num_words - 1))
        words = gl.where(number == part, gl.expand_dims(word, 1), words)
    return words


@gluon.jit
def select_scores(scores, words, mask):
    """Replace the scores of keys that are not selected by -inf.

    The test and the selection are one piece of assembly: LLVM would pack the results of tests into words.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 p, bit, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [scores, words, gl.expand_dims(mask.bits, 0)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
