"""What a server of ranks does after its imports, once for all its ranks."""

import gc

from triton import knobs

from tests.support.examples import load_profile
from tests.support.interpreter import patch_once
from tests.support.kernel_arguments import check_kernel_arguments

check_kernel_arguments()
load_profile()
if knobs.runtime.interpret:
    patch_once()
gc.freeze()  # A collection in a rank would copy all pages of inherited objects.
