"""The mask of selected keys in a consumer's registers; `attention/backends/mask.py` specifies its words.

Each thread loads the words of its own rows of scores, four a row for a tile of 128 keys. The compiler knows which word
holds a score's bit, and a thread has eight different bits, which stay in registers: a score takes one test and one
selection.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dcpmla.attention.hopper.compat import aggregate
from dcpmla.attention.hopper.prefill_pipeline import KEYS, PRODUCT, ROW, ROWS

WORD = gl.constexpr(32)  # bits of a word
COLUMN = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))


@aggregate
class Mask:
    """Words of a consumer's queries, and the bit of each key of a tile in its word."""

    rows: gl.tensor  # pointers [ROWS] to each query's first word
    num_words: gl.tensor  # words per query
    bits: gl.tensor  # [KEYS]


@gluon.jit
def open_mask(mask_ptr, num_words, first_row, num_rows, first_tile):
    """Return the `Mask` of scores [ROWS, KEYS]. Rows from num_rows on have the words of the previous row.

    Args:
        mask_ptr: Words of all queries [T, num_words].
        first_row: Query in T that the first row belongs to.
        first_tile: Tiles of keys that are skipped.
    """
    row = gl.minimum(gl.arange(0, ROWS, layout=ROW), num_rows - 1)
    key = gl.arange(0, KEYS, layout=COLUMN)
    rows, skipped = (first_row + row).to(gl.int64) * num_words, first_tile * (KEYS // WORD)
    return Mask(mask_ptr + rows + skipped, num_words - skipped, 1 << (key % WORD))


@gluon.jit
def load_words(mask, tile):
    """Load the words of a tile of keys as [ROWS, KEYS]: for each score, the word that holds its bit.

    A negative tile counts as the first tile, because the consumer loads one tile more than it uses.
    """
    number = gl.expand_dims(gl.arange(0, KEYS, layout=COLUMN) // WORD, 0)
    words = gl.zeros([ROWS, KEYS], gl.int32, PRODUCT)
    for part in gl.static_range(KEYS // WORD):
        word = gl.load(mask.rows + gl.minimum(gl.maximum(tile, 0) * (KEYS // WORD) + part, mask.num_words - 1))
        words = gl.where(number == part, gl.expand_dims(word, 1), words)
    return words


@gluon.jit
def select_scores(scores, words, mask):
    """Replace the scores of keys that are not selected by -inf.

    The test and the selection are one piece of assembly, because LLVM would pack the results of tests into words.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 p, bit, 0; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r",
        [scores, words, gl.expand_dims(mask.bits, 0)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
