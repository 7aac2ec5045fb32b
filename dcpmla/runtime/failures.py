"""The reasons for which a request ends with an error."""

import torch

from dcpmla.runtime.grammars import Grammars
from dcpmla.runtime.masks import NO_TOKEN
from dcpmla.runtime.request import Request
from dcpmla.runtime.sampling import NOT_FINITE


def failure(token_id: int, request: Request, grammars: Grammars, dtype: torch.dtype) -> Exception:
    """Return the error of a request that gets no token.

    Args:
        token_id: NOT_FINITE or NO_TOKEN, instead of the token.
        dtype: Type of the model's numbers.
    """
    if token_id == NO_TOKEN:
        return grammars.failure(request)
    assert token_id == NOT_FINITE
    return FloatingPointError(
        f"logits are NaN or infinite after {len(request.token_ids)} new tokens; the model's numbers exceed the range "
        f"of {str(dtype).removeprefix('torch.')} (try another --dtype), or its weights are damaged"
    )
